from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence, Sized
from dataclasses import KW_ONLY
from operator import length_hint
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from trainpipes._internal.callers import making_rows
from trainpipes._internal.checks import Schema
from trainpipes._internal.types import IntArray
from trainpipes.columns.payload import Payload
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.interfaces.blame import blame
from trainpipes.interfaces.hints import instead
from trainpipes.interfaces.source import NumberedRowsSource, RowSource, RowStream
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RunStage, Source
from trainpipes.samplers import BatchSampler, RowSampler
from trainpipes.samplers.torch_samplers import draws_globally, keys_of, reorders
from trainpipes.sources.memory.from_iterable import IterableReader

#: Datasets whose ``__getitem__`` is no code of the user's: many rows of them are fetched at once.
PLAIN = (list, tuple, range)


class FromDataset(Source, gives="objects", holds_data=True):
    """Rows of any torch ``Dataset`` with ``__getitem__`` or ``__getitems__``.

    Each rank and worker fetches only its own items. A state knows the dataset by its class and length.

    Args:
        dataset: has a ``len()``.
        sampler: gives the keys of each epoch; 0, 1, 2, … if left out. Torch's samplers get another seed each
            epoch.
        batch_sampler: gives lists of keys, instead of ``batch``. Items are then lists of rows, for
            ``collate``.
        schema: Arrow types of the items' columns, where these are dicts; see ``map``.

    >>> import trainpipes as tp
    >>> list(tp.from_dataset(["a", "b", "c"]).batch(2))
    [['a', 'b'], ['c']]
    """

    dataset: Any
    sampler: Iterable[Any] | None = None
    _: KW_ONLY
    batch_sampler: Iterable[Any] | None = None
    schema: Schema | None = None

    def check(self) -> None:
        dataset, sampler, batch_sampler = self.dataset, self.sampler, self.batch_sampler
        streams = isinstance(dataset, IterableDataset)
        way = instead(dataset) or "from_iterable(dataset) reads an IterableDataset" * streams
        if table := isinstance(dataset, pa.Table | pa.RecordBatch):
            way = "from_arrow(table) gives its rows"
        good = hasattr(dataset, "__getitem__") and not streams and not table
        self._require(good, "dataset", "an object with __len__ and __getitem__", way)
        if sampler is not None and batch_sampler is not None:
            raise ConfigError("from_dataset(...) takes a sampler or a batch_sampler, got both")
        for given in (sampler, batch_sampler):
            if isinstance(given, RowSampler | BatchSampler):
                raise ConfigError(
                    f"{type(given).__name__} is of rows by number: write "
                    "from_dataset(dataset, sampler=...), or shuffle(sampler=...) after it"
                )
        sized = self.keys is not None or isinstance(dataset, Sized)
        self._require(sized, "dataset", "an object with a length", "else give a sampler")
        option, way = self._option, instead(self.keys)
        good = self.keys is None or isinstance(self.keys, Iterable)
        self._require(good and not way, option, "an iterable of indices", way)
        if self.schema is not None and batch_sampler is not None:
            raise ConfigError(
                "from_dataset(schema) is of rows, and a batch_sampler gives lists of them"
            )

    @property
    def keys(self) -> Iterable[Any] | None:
        """What gives the keys of each epoch; None for all indices in file order."""
        return self.batch_sampler if self.sampler is None else self.sampler

    @property
    def _option(self) -> str:
        return "sampler" if self.batch_sampler is None else "batch_sampler"

    def open(self) -> RowSource | RowStream:
        if self.keys is not None:
            return SamplerStream(self.keys, self.dataset)
        return IndexSource(self.dataset)

    def _late(self) -> Fetch:
        return Fetch(self.dataset, self.traits.makes_batches)

    def _traits(self) -> dict[str, Any]:
        ordered = self.keys is not None
        return {
            "orders_rows": ordered,
            "reorders": ordered and reorders(self.keys),
            "makes_batches": self.batch_sampler is not None,
            "random_access": not ordered,
        }

    @property
    def _runs_user_code(self) -> bool:
        return self.keys is not None and draws_globally(self.keys)

    def identity(self) -> dict[str, Any]:
        if self.keys is None:
            return {"stage": self.name}
        return {"stage": self.name, self._option: type(self.keys).__qualname__}

    def __repr__(self) -> str:
        size = f"{len(self.dataset):,} items" if isinstance(self.dataset, Sized) else "no length"
        sampler = "" if self.keys is None else f", {self._option}={type(self.keys).__name__}"
        return f"from_dataset({type(self.dataset).__name__} of {size}{sampler})"


class Fetch(RunStage, holds_data=True):
    """Makes of indices the rows of a map-style dataset."""

    dataset: Any
    batched: bool = False

    @property
    def _runs_user_code(self) -> bool:
        return type(self.dataset) not in PLAIN

    def _traits(self) -> dict[str, Any]:
        return {"per_row": self._runs_user_code}

    def process(self, run: Run) -> Run:
        keys = run.block.data
        assert isinstance(keys, list)
        left = iter(keys)
        try:
            if self.batched:
                rows: list[Any] = [self._rows(batch, batch) for batch in map(list, left)]
            else:
                rows = self._rows(keys, left)
        except Exception as error:
            begun = len(keys) - length_hint(left)  # 0 where all are asked for at once
            blame(error, self, int(run.block.ids[max(0, begun - 1)]))
            raise
        return run.with_block(run.block.with_data(rows))

    def _rows(self, keys: list[Any], one_by_one: Iterable[Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return list(map(self.dataset.__getitem__, one_by_one)) if many is None else list(many(keys))

    def __repr__(self) -> str:
        return f"{type(self.dataset).__name__}[…]"


class IndexSource(NumberedRowsSource):
    """The indices of a map-style dataset; ``Fetch`` makes rows of them."""

    row_bytes = 8.0

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self._name = _named(dataset)

    def slice(self, start: int, stop: int) -> Payload:
        return list(range(start, stop))

    def take(self, index: IntArray) -> Payload:
        return index.tolist()

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.rows, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), *super().describe()]


class SamplerStream(RowStream):
    """A torch sampler's indices as a stream."""

    def __init__(self, sampler: Iterable[Any], dataset: Any) -> None:
        self._sampler = sampler
        self._name = _named(dataset)

    @property
    def length(self) -> int | None:
        if isinstance(self._sampler, DistributedSampler):
            return len(self._sampler) * self._sampler.num_replicas
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        with making_rows():
            return IterableReader(keys_of(self._sampler, epoch))

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.length, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), ("rows", f"{self.length} an epoch, by a sampler")]


def _named(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


#: Items of a list that is worth packing.
LEAST_ITEMS = 1000


class PackedList(Sequence[Any]):
    """A list that worker processes share: a look at a pickled item changes no reference count, which would
    copy it.

    >>> PackedList([{"a": 1}, {"a": 2}])[1]
    {'a': 2}
    """

    def __init__(self, items: Sequence[Any]) -> None:
        content, ends = bytearray(), [0]
        for item in items:
            content += pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
            ends.append(len(content))
        # Tensors in shared memory: spawned workers get them without a copy too.
        self._content = torch.from_numpy(np.frombuffer(content, dtype=np.uint8)).share_memory_()
        self._ends = torch.tensor(ends).share_memory_()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, stop = self._ends[place : place + 2].tolist()
        return pickle.loads(self._content[start:stop].numpy().data)


def packed(stage: Stage) -> Stage:
    """A ``from_dataset`` with a long list of picklable items packed; else the stage itself."""
    items: Any = stage.dataset if isinstance(stage, FromDataset) else None
    if type(items) not in (list, tuple) or len(items) < LEAST_ITEMS:
        return stage
    try:
        return stage._replaced(dataset=PackedList(items))
    except (pickle.PicklingError, TypeError, AttributeError):
        return stage
