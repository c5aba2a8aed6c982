"""Text to token ids: one adapter for each kind of tokenizer, behind one small interface."""

from __future__ import annotations

from trainpipes.tokenizers.engine import Engine
from trainpipes.tokenizers.load import load
from trainpipes.tokenizers.ragged import Ragged

__all__ = ["Engine", "Ragged", "load"]
