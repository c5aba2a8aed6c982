"""What prepares data for training: files written once, for many runs."""

from trainpipes.prepare.repack_files import repack
from trainpipes.prepare.tokenize_files import Tokenized, tokenize, tokenized_rows

__all__ = ["Tokenized", "repack", "tokenize", "tokenized_rows"]
