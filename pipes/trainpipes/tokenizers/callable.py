"""Any function from texts to lists of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.errors import DataError
from trainpipes.kinds.options import identify, show
from trainpipes.tokenizers.engine import Engine
from trainpipes.tokenizers.ragged import Ragged


class Function(Engine):
    """A function of one's own."""

    def __init__(self, function: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        super().__init__()
        self._function = function

    def __repr__(self) -> str:
        return show(self._function)

    def _load(self) -> Any:
        return self._function

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        given = texts.to_pylist()
        with self.turn:  # reading the ids too: the function may use the same list again
            return ids_of(self._function(given), len(texts), self)

    def runs_on(self) -> str:
        return "a function of yours, called by one thread at a time"

    def fingerprint(self) -> Any:
        return identify(self._function)


def ids_of(rows: Any, count: int, asker: object) -> Ragged:
    """Rows of ids that a function gave for ``count`` texts."""
    rule = f"the tokenizer {asker} gives a list of ids for each text"
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
