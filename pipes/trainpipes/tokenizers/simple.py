"""Tokenizers without a model: UTF-8 bytes, any function of texts, and what transformers has in Python."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart
from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError
from trainpipes.kinds.options import identify, show
from trainpipes.tokenizers.engine import Affixes, Engine, Special, digest, utf8
from trainpipes.tokenizers.ragged import Ragged

#: Of bytes, the ids that are none.
SPECIAL = {"<eos>": 256, "<pad>": 257}
NAMES = {number: name for name, number in SPECIAL.items()}
#: Size of an embedding for these ids.
VOCABULARY = 258


class Bytes(Engine):
    """The UTF-8 bytes of a text, 0 to 255; 256 ends a text, 257 pads."""

    def __init__(self) -> None:
        super().__init__("bytes")

    def _load(self) -> None:
        return None

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        texts.validate(full=True)  # nothing else would notice what is not UTF-8
        values, offsets = apart(texts)
        return Ragged(values.astype(np.int32), offsets)

    def runs_on(self) -> str:
        return ""

    special = Special({"<eos>": 256}, pad=257)  # type: ignore[assignment]

    def token_id(self, token: str) -> int | None:
        return SPECIAL.get(token)

    def _named(self, token: int) -> str:
        return "" if 0 <= token < 256 else NAMES.get(token, f"<{token}>")

    def _text(self, ids: list[int]) -> str:
        return utf8(bytes(ids))

    def fingerprint(self) -> str:
        return "bytes"


class Function(Engine):
    def __init__(self, function: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        super().__init__(show(function))
        self._function = function

    def _load(self) -> Any:
        return self._function

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        given = texts.to_pylist()
        with self.turn:  # reading the ids too: the function may use the same list again
            return ids_of(self._function(given), len(texts), self)

    def decode(self, ids: Sequence[int]) -> None:
        return None

    def runs_on(self) -> str:
        return "a function of yours, called by one thread at a time"

    def fingerprint(self) -> Any:
        return identify(self._function)


class Slow(Engine):
    """A transformers tokenizer written in Python, used by calling it, one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(type(tokenizer).__name__)
        self._tokenizer = tokenizer

    def _load(self) -> Any:
        return copy.deepcopy(self._tokenizer)

    def _ids(self, texts: list[str], special: bool) -> Any:
        off = ("padding", "truncation", "return_attention_mask", "return_token_type_ids", "verbose")
        with self.turn:
            made = self.loaded(texts, add_special_tokens=special, **dict.fromkeys(off, False))
        return made["input_ids"]

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
        said = f"which special tokens {self} puts around a text is not known"
        raise ConfigError(f"{said}: pass add_special_tokens=False")

    @cached_property
    def special(self) -> Special:
        own = self._tokenizer
        ends = {} if own.eos_token_id is None else {own.eos_token: own.eos_token_id}
        side: Side = "left" if own.padding_side == "left" else "right"
        return Special(ends, own.pad_token_id, side, own.all_special_ids)

    def token_id(self, token: str) -> int | None:
        return self.pieces().get(token)

    def pieces(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def _named(self, token: int) -> str:
        return "" if 0 <= token < len(self.loaded) else f"<{token}>"

    def _text(self, ids: list[int]) -> str:
        with self.turn:
            return str(self.loaded.decode(ids, clean_up_tokenization_spaces=False))

    @cached_property
    def _digest(self) -> str:
        kept = [self._tokenizer.get_vocab(), self._tokenizer.init_kwargs]
        content = json.dumps(kept, sort_keys=True, default=str)
        return digest(content.encode("utf-8", "surrogatepass"))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self._tokenizer).__qualname__, "content": self._digest}


def ids_of(rows: Any, count: int, caller: object) -> Ragged:
    """What a function returned, if it is a list of ids for each text."""
    rule = f"the tokenizer {caller} gives a list of ids for each text"
    try:
        rows = list(rows)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    except TypeError as error:
        raise DataError(f"{rule}, got {error}") from error
    if len(rows) != count:
        raise DataError(f"{rule}, got {len(rows)} for {count} texts")
    arrays = rows and all(isinstance(row, np.ndarray) for row in rows)
    values = np.concatenate(rows) if arrays else np.array(list(chain.from_iterable(rows)))
    if values.size:
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise DataError(f"{rule}, got values such as {values.reshape(-1)[0].item()!r}")
        most = max(abs(int(values.max())), abs(int(values.min()) + 1))
        if most > np.iinfo(np.int32).max:
            raise DataError(f"{rule}, of 32 bits, got {most}")
    return Ragged.of_lengths(values.astype(np.int32).reshape(-1), lengths)
