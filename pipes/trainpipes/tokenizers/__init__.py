"""Text to token ids: an adapter for each kind of tokenizer."""

from __future__ import annotations

from trainpipes.tokenizers.engine import Engine
from trainpipes.tokenizers.load import load
from trainpipes.tokenizers.ragged import Ragged

__all__ = ["Engine", "Ragged", "load"]
