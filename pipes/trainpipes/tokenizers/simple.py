"""Tokenizers without a model: UTF-8 bytes, and any function of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart
from trainpipes.engine.layout import IntArray
from trainpipes.errors import DataError
from trainpipes.kinds.options import identify, show
from trainpipes.tokenizers.engine import Engine, text_of_bytes
from trainpipes.tokenizers.ragged import Ragged

#: Ids after the 256 bytes.
EOS, PAD = 256, 257
#: Size of an embedding for these ids.
VOCABULARY = 258


class Bytes(Engine):
    """The UTF-8 bytes of a text, 0 to 255; 256 ends a text, 257 pads."""

    def __repr__(self) -> str:
        return "bytes"

    def _load(self) -> None:
        return None

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        texts.validate(full=True)  # nothing else would notice what is not UTF-8
        values, offsets = apart(texts)
        return Ragged(values.astype(np.int32), offsets)

    def runs_on(self) -> str:
        return ""

    def ends(self) -> dict[str, int]:
        return {"<eos>": EOS}

    def pad_id(self) -> int:
        return PAD

    def token_id(self, token: str) -> int | None:
        return {"<eos>": EOS, "<pad>": PAD}.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        names = {EOS: "<eos>", PAD: "<pad>"}
        return text_of_bytes(
            bytes([i]) if 0 <= i < 256 else names.get(i, f"<{i}>") for i in map(int, ids)
        )

    def fingerprint(self) -> str:
        return "bytes"


class Function(Engine):
    def __init__(self, function: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        super().__init__()
        self._function = function

    def __repr__(self) -> str:
        return show(self._function)

    def _load(self) -> Any:
        return self._function

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        given = texts.to_pylist()
        with self.turn:  # reading the ids too: the function may use the same list again
            return ids_of(self._function(given), len(texts), self)

    def runs_on(self) -> str:
        return "a function of yours, called by one thread at a time"

    def fingerprint(self) -> Any:
        return identify(self._function)


def ids_of(rows: Any, count: int, caller: object) -> Ragged:
    rule = f"the tokenizer {caller} gives a list of ids for each text"
    try:
        rows = list(rows)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    except TypeError as error:
        raise DataError(f"{rule}, got {error}") from error
    if len(rows) != count:
        raise DataError(f"{rule}, got {len(rows)} for {count} texts")
    if all(isinstance(row, np.ndarray) for row in rows) and rows:
        values = np.concatenate(rows)
    else:
        values = np.array(list(chain.from_iterable(rows)))
    limits = np.iinfo(np.int32)
    if not values.size:
        values = np.empty(0, dtype=np.int32)
    elif values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{rule}, got values such as {values.reshape(-1)[0].item()!r}")
    elif values.max() > limits.max or values.min() < limits.min:
        raise DataError(f"{rule}, of 32 bits, got {max(abs(values.max()), abs(values.min()))}")
    return Ragged.of_lengths(values.astype(np.int32), lengths)
