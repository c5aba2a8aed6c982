"""What to write instead of a tokenizer that is an object: its path, where that gives the same one."""

from __future__ import annotations

import json
import os
from typing import Any

from trainpipes.tokenizers.load import load

__all__ = ["tokenizer_way_out"]


def tokenizer_way_out(tokenizer: Any) -> str:
    """Why a tokenizer is not written, and what to write instead.

    Args:
        tokenizer: an object.
    """
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    said = f"a tokenizer that is an object ({kind}) has no form in a config"
    for name in _names(tokenizer):
        if _same(tokenizer, name):
            return f"{said}; it is the same as that of {name!r}: give that instead"
    if hasattr(tokenizer, "save_pretrained"):
        way = "save_pretrained(folder), and give the folder"
    elif hasattr(tokenizer, "save"):
        way = 'save("tokenizer.json"), and give that path'
    else:
        return f"{said}: save it to a file that tokenize() reads, and give its path"
    return f"{said}: save it with {way}"


def _names(tokenizer: Any) -> list[str]:
    """What a tokenizer may be called where it is read from."""
    path = getattr(tokenizer, "name_or_path", None)
    if isinstance(path, str) and path and os.path.exists(path):
        return [path]
    if type(tokenizer).__module__.split(".")[0] == "tiktoken":
        return [f"tiktoken:{tokenizer.name}"]
    return []


def _same(tokenizer: Any, name: str) -> bool:
    try:
        one, other = load(tokenizer).fingerprint(), load(name).fingerprint()
    except Exception:  # whatever keeps it from being read there
        return False
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
