"""What a ``tokenizer.json`` says, read without the package that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainpipes.tokenizers.content import digest

#: Names that end a text in published tokenizers.
ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|eos|>", "[EOS]")
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True)
class Named:
    """What a tokenizer's settings, kept beside its model, say of it.

    Args:
        eos: token that ends a text.
        pad: padding token.
        padding_side: "left" or "right".
    """

    eos: str | None = None
    pad: str | None = None
    padding_side: str | None = None

    @staticmethod
    def of_config(content: bytes | None) -> Named:
        """From a ``tokenizer_config.json``; what is not there or not understood is None."""
        try:
            config = json.loads(content or b"{}")
        except (ValueError, RecursionError):
            return Named()
        eos, pad, side = (config.get(k) for k in ("eos_token", "pad_token", "padding_side"))
        return Named(_token(eos), _token(pad), side if side in ("left", "right") else None)


def _token(entry: Any) -> str | None:
    """A token, given as its text or as a dict that holds it."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


@dataclass(frozen=True)
class TokenizerJson:
    """Facts of a ``tokenizer.json``.

    Args:
        fingerprint: of all that shapes ids: what truncates and pads is left out, and so is what
            only differs by the version of the package that wrote the file.
        tokens: id of each added token, and of each token with a known name.
    """

    fingerprint: str
    tokens: dict[str, int]

    @staticmethod
    def of(text: str) -> TokenizerJson:
        """
        Raises:
            ValueError: not a ``tokenizer.json``.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError('it is no JSON object with a "model"')
        model = content["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, list):  # Unigram: pairs of a piece and its score
            vocab = {entry[0]: number for number, entry in enumerate(vocab)}
        vocab = vocab or {}
        tokens = {name: vocab[name] for name in (*ENDS, *PADS) if name in vocab}
        tokens |= {t["content"]: t["id"] for t in content.get("added_tokens") or ()}
        if model.get("merges"):
            model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        shaping = {
            k: v for k, v in content.items() if k not in ("version", "truncation", "padding")
        }
        canonical = json.dumps(_set_only(shaping), sort_keys=True, separators=(",", ":"))
        return TokenizerJson(digest(canonical.encode("utf-8", "surrogatepass")), tokens)


def _set_only(value: Any) -> Any:
    """Without options that are off: newer versions write more of them."""
    if isinstance(value, list):
        return [_set_only(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: _set_only(v) for k, v in value.items() if v is not None and v is not False and v != ""
    }
