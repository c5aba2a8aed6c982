"""What prepares data for training: files written once, for many runs.

tokenize   token ids, so that training reads numbers only
"""

from trainpipes.prepare.tokenize.ready import tokenized_rows
from trainpipes.prepare.tokenize.run import Tokenized, tokenize

__all__ = ["Tokenized", "tokenize", "tokenized_rows"]
