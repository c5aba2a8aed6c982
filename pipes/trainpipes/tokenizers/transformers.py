"""Tokenizers of transformers: by name or folder, and those that have no fast form."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.engine import Affixes, Engine, digest, with_unknown
from trainpipes.tokenizers.ragged import Ragged
from trainpipes.tokenizers.simple import ids_of


class Slow(Engine):
    """A transformers tokenizer written in Python, used by calling it, one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return type(self._tokenizer).__name__

    def _load(self) -> Any:
        return copy.deepcopy(self._tokenizer)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        work = self.loaded
        options = (
            "padding",
            "truncation",
            "return_attention_mask",
            "return_token_type_ids",
            "verbose",
        )
        off = dict.fromkeys(options, False)
        with self.turn:
            found: list[list[int]] = work(texts, add_special_tokens=special, **off)["input_ids"]
        return found

    def runs_on(self) -> str:
        return "transformers, in Python, by one thread at a time"

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        return ids_of(self._ids(texts.to_pylist(), special=False), len(texts), self)

    def affixes(self) -> Affixes:
        for probe in ("a", "0", "The end", "."):
            (bare,), (full,) = self._ids([probe], special=False), self._ids([probe], special=True)
            places = [k for k in range(len(full)) if full[k : k + len(bare)] == bare]
            if bare and len(places) == 1:
                return tuple(full[: places[0]]), tuple(full[places[0] + len(bare) :])
        raise ConfigError(
            f"which special tokens {self} puts around a text is not known: pass "
            "add_special_tokens=False"
        )

    def ends(self) -> dict[str, int]:
        name, found = self._tokenizer.eos_token, self._tokenizer.eos_token_id
        return {} if found is None else {name: found}

    def pad_id(self) -> int | None:
        found: int | None = self._tokenizer.pad_token_id
        return found

    def padding(self) -> Side | None:
        return "left" if self._tokenizer.padding_side == "left" else "right"

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found

    def pieces(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def special_ids(self) -> list[int]:
        return sorted(self._tokenizer.all_special_ids)

    def decode(self, ids: Sequence[int]) -> str:
        work = self.loaded
        size = len(work)

        def decode(known: list[int]) -> str:
            with self.turn:
                return str(work.decode(known, clean_up_tokenization_spaces=False))

        return with_unknown(list(map(int, ids)), lambda i: 0 <= i < size, decode)

    @cached_property
    def _content(self) -> str:
        kept = [self._tokenizer.get_vocab(), self._tokenizer.init_kwargs]
        content = json.dumps(kept, sort_keys=True, default=str)
        return digest(content.encode("utf-8", "surrogatepass"))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self._tokenizer).__qualname__, "content": self._content}


def is_hub_name(text: str) -> bool:
    path = text.endswith((".json", ".model")) or text.count("/") > 1 or text[:1] in "./~"
    return not path and ":" not in text and text != "bytes"


def auto_tokenizer(name: str) -> Any:
    need("transformers", f"the tokenizer {name}")
    from transformers import AutoTokenizer

    folder = os.path.isdir(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=folder, trust_remote_code=False)
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        if folder:
            message = f"transformers makes no tokenizer of {name}: {why}"
            raise UnreadableError(message, path=name) from error
        raise ConfigError(
            f"{name!r} is not a path, and transformers.AutoTokenizer finds no tokenizer of that name: {why}; "
            f"without a network, fetch it elsewhere (hf download {name}) and give the folder"
        ) from error
