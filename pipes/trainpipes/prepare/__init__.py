"""Data prepared once for many runs, as files.

tokenize  writes token ids, so that training reads numbers only
"""

from __future__ import annotations

from trainpipes.prepare.tokenize.ready import tokenized_rows
from trainpipes.prepare.tokenize.run import Tokenized, tokenize

__all__ = ["Tokenized", "tokenize", "tokenized_rows"]
