"""``from_dataset``: rows of a map-style dataset, fetched by the consumer that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from trainpipes.errors import ConfigError
from trainpipes.order import random_key
from trainpipes.runtime.block import Payload
from trainpipes.runtime.run import Run
from trainpipes.runtime.source import Place, Reader, RowSource, RowStream
from trainpipes.runtime.stage import Stage
from trainpipes.sources.iterable import IterableReader
from trainpipes.stages.blame import blame, each

__all__ = ["FromDataset"]

BLOCK_ROWS = 8192


class FromDataset(Stage):
    """Rows of any torch ``Dataset`` with ``__getitem__`` or ``__getitems__``.

    Out: the items, untouched up to ``collate``. Cursor: a row number. Indices are shuffled and dealt,
    and a consumer fetches only its own; a shuffle's buffer costs 8 bytes a row. Without ``batch``,
    items are fetched one by one; with it, a micro-batch at a time.

    Args:
        dataset: the dataset; ``len(dataset)`` items.
        sampler: gives the indices (or other keys) of each epoch; in file order if left out. Torch's
            samplers draw from a seed of their own for each epoch, not from the global one. Resuming
            draws the epoch's indices again and passes over those used.

    >>> import trainpipes as tp
    >>> list(tp.from_dataset(["a", "b", "c"]).batch(2))
    [['a', 'b'], ['c']]
    """

    role = "source"

    def __init__(
        self, source: None = None, dataset: Any = None, sampler: Iterable[Any] | None = None
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"from_dataset(dataset) takes a map-style dataset, got {type(dataset).__name__}, which is "
                "an IterableDataset: use from_iterable(dataset)"
            )
        if not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                "from_dataset(dataset) takes an object with __len__ and __getitem__, got "
                f"{type(dataset).__name__}"
            )
        if sampler is None and not isinstance(dataset, Sized):
            raise ConfigError(
                f"from_dataset(dataset) needs len(dataset), and {type(dataset).__name__} has none: give "
                "a sampler"
            )
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "from_dataset(sampler) gives the indices of all ranks, got a DistributedSampler, which "
                "gives one rank's: leave it out and add .shuffle().sharding_filter()"
            )
        if sampler is not None and not isinstance(sampler, Iterable):
            raise ConfigError(f"from_dataset(sampler) is an iterable of indices, got {sampler!r}")
        super().__init__(source, dataset=dataset, sampler=sampler)
        self._dataset = dataset
        self._sampler = sampler

    def open_source(self, files: Any = None) -> RowSource | RowStream:
        if self._sampler is not None:
            return SamplerStream(self._sampler, self._dataset)
        return IndexSource(self._dataset)

    def late(self) -> Stage:
        return Fetch(None, dataset=self._dataset)

    @property
    def orders_rows(self) -> bool:
        """Whether the rows come in an order that a shuffle would undo."""
        return self._sampler is not None

    def identity(self) -> dict[str, Any]:
        sampler = None if self._sampler is None else type(self._sampler).__qualname__
        return {"stage": self.name, **({} if sampler is None else {"sampler": sampler})}

    def __repr__(self) -> str:
        size = f"{len(self._dataset):,} items" if isinstance(self._dataset, Sized) else "no length"
        sampler = "" if self._sampler is None else f", sampler={type(self._sampler).__name__}"
        return f"from_dataset({type(self._dataset).__name__} of {size}{sampler})"


class Fetch(Stage):
    """Items of a dataset for their keys.

    Args:
        dataset: where they are.
    """

    role = "rows"
    per_row = True

    def __init__(self, source: None = None, dataset: Any = None) -> None:
        super().__init__(source, dataset=dataset)
        self._dataset = dataset

    def process(self, run: Run) -> Run:
        keys = run.block.data
        assert isinstance(keys, list)
        many = getattr(self._dataset, "__getitems__", None)
        if many is None:
            rows = each(self, self._dataset.__getitem__, run)
        else:
            try:
                rows = list(many(keys))
            except Exception as error:
                blame(error, self, int(run.block.ids[0]))
                raise
        return run.with_block(run.block.with_data(rows))

    def __repr__(self) -> str:
        return f"{type(self._dataset).__name__}[…]"


class IndexSource(RowSource):
    """The indices of a dataset, in blocks."""

    row_bytes = 8.0

    def __init__(self, dataset: Any) -> None:
        self._rows = len(dataset)
        self._name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        self._starts = np.arange(0, max(1, self._rows), BLOCK_ROWS, dtype=np.int64)
        self.lengths = np.diff(np.append(self._starts, self._rows))

    def reader(self) -> Reader:
        return self

    def read(self, block: int, start: int, stop: int) -> Payload:
        first = int(self._starts[block])
        return list(range(first + start, first + stop))

    def close(self) -> None:
        """Nothing is open."""

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._starts[block]) + row)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self._rows, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), ("rows", f"{self._rows:,}")]


class SamplerStream(RowStream):
    """The keys that a sampler gives, epoch by epoch."""

    def __init__(self, sampler: Iterable[Any], dataset: Any) -> None:
        self._sampler = sampler
        self._name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"

    @property
    def length(self) -> int | None:
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        seed = int(random_key(0, "sampler", epoch)[0] >> np.uint64(1))
        own = getattr(self._sampler, "generator", None)
        kept = own.get_state() if isinstance(own, torch.Generator) else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(own, torch.Generator):
                own.manual_seed(seed ^ own.initial_seed())
            keys = list(self._sampler)
            if isinstance(own, torch.Generator) and kept is not None:
                own.set_state(kept)
        return IterableReader(iter(keys))

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.length, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), ("rows", f"{self.length} an epoch, by a sampler")]
