"""What prepares data for training: files written once, for many runs."""

from trainpipes.prepare.repack import Repacked, repack
from trainpipes.prepare.tokenize.ready import tokenized_rows
from trainpipes.prepare.tokenize.run import Tokenized, tokenize

__all__ = ["Repacked", "Tokenized", "repack", "tokenize", "tokenized_rows"]
