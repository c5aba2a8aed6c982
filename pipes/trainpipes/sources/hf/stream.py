from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem

from trainpipes.columns.content import short_digest
from trainpipes.columns.payload import Payload
from trainpipes.errors import StateError
from trainpipes.kinds.source import RowStream, StreamReader
from trainpipes.sources.files.schema import fitted, plain
from trainpipes.sources.memory.from_torchdata import plain as as_json
from trainpipes.sources.memory.from_torchdata import restored

#: Rows that are fetched at a time.
BATCH_ROWS = 256


def shuffles(dataset: Any) -> bool:
    """Whether an ``IterableDataset`` holds rows in a buffer and draws from it."""
    return any("BufferShuffled" in type(one).__name__ for one in _parts(dataset._ex_iterable))


def _parts(iterable: Any) -> Iterator[Any]:
    yield iterable
    inner = getattr(iterable, "ex_iterable", None)
    for one in [*([] if inner is None else [inner]), *getattr(iterable, "ex_iterables", [])]:
        yield from _parts(one)


def _copied(dataset: Any) -> Any:
    """A copy that shares file systems, whose copies would fill fsspec's cache."""
    shared = [value for value in vars(dataset).values() if isinstance(value, dict)]
    caches = [
        one for one in shared if any(isinstance(v, AbstractFileSystem) for v in [*one.values()])
    ]
    return copy.deepcopy(dataset, {id(one): one for one in caches})


class HFStream(RowStream):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        features = getattr(dataset, "features", None)
        fields = None if features is None else map(plain, features.arrow_schema)
        self._schema = None if fields is None else pa.schema(fields)

    @property
    def seekable(self) -> bool:
        return not shuffles(self._dataset)

    def open(self, epoch: int, state: dict[str, Any] | None) -> HFReader:
        # It knows its own position, and there may be several readers.
        dataset = _copied(self._dataset)
        dataset = dataset.with_format(None if self._schema is None else "arrow")
        dataset.set_epoch(epoch)
        return HFReader(dataset, self._schema, state)

    def fingerprint(self) -> dict[str, Any]:
        parts = list(_parts(self._dataset._ex_iterable))
        drawn = [one.generator for one in parts if getattr(one, "generator", None) is not None]
        found: dict[str, Any] = {
            "dataset": type(self._dataset).__name__,
            "shards": int(self._dataset.num_shards),
            "columns": None if self._schema is None else _digest(str(self._schema)),
            "steps": [type(one).__name__ for one in parts],
        }
        if drawn:  # one without a seed draws another order in each process
            found["shuffle"] = [_digest(repr(g.bit_generator.state)) for g in drawn]
        return found

    def describe(self) -> list[tuple[str, str]]:
        own = "goes on from its own state"
        how = own if self.seekable else "reads and drops the rows already used"
        return [("rows", f"an IterableDataset: number of rows unknown; a resume {how}")]


class HFReader(StreamReader):
    def __init__(
        self, dataset: Any, schema: pa.Schema | None, state: dict[str, Any] | None
    ) -> None:
        self._dataset, self._schema = dataset, schema
        self._batch: Any = None
        self._used = 0  # rows of it
        self._start = as_json(dataset.state_dict())  # where the batch began
        if state is not None:
            self._go(state)
        self._batches = iter(dataset.iter(batch_size=BATCH_ROWS))
        if state is not None and state["rows"]:
            self._next()
            self._used = int(state["rows"])

    def _go(self, state: dict[str, Any]) -> None:
        try:
            self._start = state["dataset"]
            self._dataset.load_state_dict(restored(self._start))
            int(state["rows"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"the position in the IterableDataset is damaged ({str(error)[:80]}); load the state as it "
                "was saved"
            ) from error

    def _next(self) -> bool:
        if self._batch is not None:
            self._start = as_json(self._dataset.state_dict())
        self._batch, self._used = next(self._batches, None), 0
        if self._batch is not None and self._schema is None:
            names = list(self._batch)
            rows = zip(*self._batch.values(), strict=True)
            self._batch = [dict(zip(names, row, strict=True)) for row in rows]
        return self._batch is not None

    def read(self, rows: int) -> Payload | None:
        if (self._batch is None or self._used >= len(self._batch)) and not self._next():
            return None
        start, self._used = self._used, min(len(self._batch), self._used + rows)
        if self._schema is not None:
            return fitted(self._batch.slice(start, self._used - start), self._schema)
        part: list[Any] = self._batch[start : self._used]
        return part

    def state(self) -> dict[str, Any]:
        return {"dataset": self._start, "rows": self._used}


def _digest(text: str) -> str:
    return short_digest(json.dumps(text).encode())
