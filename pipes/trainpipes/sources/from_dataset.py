"""Rows that Python has, by number: ``from_dataset`` and ``from_tensors``."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence, Set, Sized
from dataclasses import KW_ONLY
from operator import length_hint
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, Sampler, Subset

from trainpipes._internal import callers, checks, locks
from trainpipes._internal.checks import IntArray, Schema
from trainpipes.columns.content import tensor_digest
from trainpipes.columns.payload import Payload
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.processes.channel import Pickler
from trainpipes.errors import ConfigError, DataChangedError, DataError
from trainpipes.interfaces import source
from trainpipes.interfaces.options import DRAWS, as_table, instead, instead_of_path
from trainpipes.interfaces.read_columns import blame
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import RunStage, Source
from trainpipes.interfaces.watched_calls import DrawWatch, at_work_of
from trainpipes.samplers import BatchSampler, RowSampler, torch_samplers
from trainpipes.sources.from_iterable import IterableReader


def _as_tensor(values: Any) -> torch.Tensor:
    """Numbers as a tensor: a copy of arrays that torch does not take, as flipped or big-endian ones."""
    is_array = isinstance(values, np.ndarray)
    if is_array and not (values.dtype.isnative and min(values.strides, default=0) >= 0):
        values = np.array(values, values.dtype.newbyteorder("="), order="C")
    is_tensor = isinstance(values, torch.Tensor)
    return values if is_tensor else torch.as_tensor(values, device="cpu")


class FromTensors(Source, random_access=True):
    """Rows of tensors that share their first dimension: tuples, or dicts if tensors have names.

    The first state hashes all numbers.

    Args:
        tensors: each ``[N, ...]``, as tensors, arrays or lists of numbers.
        names: a name for each, or None for tuples.

    Raises:
        ConfigError: first dimensions differ.

    >>> import torch, trainpipes as tp
    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    >>> list(tp.from_tensors(x, y).batch(2).collate())[1]
    [tensor([[4., 5.]]), tensor([0])]
    """

    free = frozenset({"tensors", "names"})

    tensors: tuple[Any, ...]
    names: tuple[str, ...] | None = None

    def check(self) -> None:
        some = isinstance(self.tensors, list | tuple) and len(self.tensors) > 0
        checks.require(some, "from_tensors(...)", "one tensor or more", self.tensors)
        if self.names is not None:
            names = checks.column_names(self.names, "from_tensors(names)")
            good = len(names) == len(self.tensors)
            checks.require(good, "from_tensors(names)", "a name for each tensor", names)
            self._set(names=tuple(names))
        try:
            converted = tuple(map(_as_tensor, self.tensors))
        except (RuntimeError, TypeError, ValueError) as error:
            by_name = isinstance(self.tensors[0], Mapping)
            way = "from_tensors(**tensors) takes them by name" if by_name else str(error)
            rule = "tensors, arrays or lists of numbers"
            raise checks.wrong("from_tensors(...)", rule, self.tensors, way) from error
        dense = all(t.layout is torch.strided for t in converted)
        layouts = [str(t.layout) for t in converted]
        checks.require(dense, "from_tensors(...)", "dense tensors, such as x.to_dense()", layouts)
        shapes = [tuple(t.shape) for t in converted]
        alike = all(shapes) and len({s[0] for s in shapes if s}) < 2
        checks.require(alike, "from_tensors(...)", "tensors of the same first dimension", shapes)
        self._set(tensors=converted)

    @locks.cached_property
    def _rows(self) -> TensorRows:
        return TensorRows(self.tensors, self.names)

    def open(self) -> TensorSource:
        return TensorSource(self._rows)

    def __repr__(self) -> str:
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors]
        if self.names is not None:
            shapes = [f"{n}={s}" for n, s in zip(self.names, shapes, strict=True)]
        return f"from_tensors({', '.join(shapes)})"


class TensorSource(source.NumberedRowsSource):
    """Rows of tensors in memory."""

    def __init__(self, rows: TensorRows) -> None:
        super().__init__(len(rows))
        self._rows = rows
        self.row_bytes = rows.nbytes / len(rows) if len(rows) else None

    def slice(self, start: int, stop: int) -> TensorRows:
        return self._rows.slice(start, stop)

    def take(self, index: IntArray) -> TensorRows:
        return self._rows.take(index)

    def block_key(self, block: int) -> Any:
        names = self._rows.names
        return [[tensor_digest(t) for t in self._rows.tensors], names and list(names), block]

    def fingerprint(self) -> dict[str, Any]:
        shapes = [f"{t.dtype}{list(t.shape)}" for t in self._rows.tensors]
        digest = hashlib.sha256()
        for tensor in self._rows.tensors:
            for row in tensor[:: max(1, len(self._rows) // 4)][:5]:
                digest.update(repr(row.tolist()).encode())
        content = hashlib.sha256("".join(map(tensor_digest, self._rows.tensors)).encode())
        sample, known = digest.hexdigest()[:16], content.hexdigest()[:16]
        return {"rows": self.rows, "tensors": shapes, "sample": sample, "content": known}


#: Datasets whose ``__getitem__`` is no code of the user's: many rows of them are fetched at once.
PLAIN = (list, tuple, range)


class FromDataset(Source, gives="objects", holds_data=True):
    """Rows of any torch ``Dataset`` with ``__getitem__`` or ``__getitems__``.

    Each rank and worker fetches only its own items. A state knows the dataset by its class and length.

    Args:
        dataset: has a ``len()``.
        sampler: gives the keys of each epoch; 0, 1, 2, … if left out. Torch's samplers get another seed each
            epoch, others a call of ``set_epoch`` if they have it. ``torch.manual_seed`` changes no order, a
            ``generator=`` of theirs does.
        batch_sampler: gives lists of keys, instead of ``batch``. Items are then lists of rows, for
            ``collate``.
        schema: Arrow types of the items' columns, where these are dicts; see ``map``.

    Raises:
        ConfigError: an option does not fit.
        DataError: ``__getitems__`` returns anything but a list of as many rows as it was asked for.

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
        of_path = instead_of_path(dataset)  # a text would give its characters
        way = (
            instead(dataset)
            or of_path
            or "from_iterable(dataset) reads an IterableDataset" * streams
        )
        table = "table" if isinstance(dataset, pa.Table | pa.RecordBatch) else ""
        by_keys = self.keys is not None and isinstance(dataset, Mapping)
        if not (by_keys or isinstance(dataset, list | tuple)):
            table = table or as_table(dataset)
        way = f"from_arrow({table}) gives its rows" if table else way
        good = hasattr(dataset, "__getitem__") and not (streams or table or of_path)
        rule = "rows by number" if table else "an object with __len__ and __getitem__"
        self._require(good, "dataset", rule, way)
        if sampler is not None and batch_sampler is not None:
            raise ConfigError("from_dataset(...) takes a sampler or a batch_sampler, got both")
        for order in (sampler, batch_sampler):
            if isinstance(order, RowSampler | BatchSampler):
                raise ConfigError(
                    f"{type(order).__name__} is of rows by number: write "
                    "from_dataset(dataset, sampler=...), or shuffle(sampler=...) after it"
                )
        sized = self.keys is not None or isinstance(dataset, Sized)
        self._require(sized, "dataset", "an object with a length", "else give a sampler")
        if type(dataset) is dict and self.keys is None:
            numbered = dataset.keys() == set(range(len(dataset)))
            rule = "a dict of the keys 0, 1, 2, …, without a sampler"
            way = "give sampler=list(dataset), or the rows alone: list(dataset.values())"
            self._require(numbered, "dataset", rule, way)
        option, way = self._option, instead(self.keys)
        good = self.keys is None or isinstance(self.keys, Iterable)
        good = good and not isinstance(self.keys, str)
        passes = isinstance(self.keys, Iterator) and not isinstance(self.keys, Sized | Sampler)
        if passes and not way:
            way = "an iterator is empty after one epoch: give list(...) of it"
        if isinstance(self.keys, Set) and not isinstance(self.keys, KeysView):
            way = "a set has another order in another process: give sorted(...) of it"
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

    def open(self) -> source.RowSource | source.RowStream:
        if self.keys is not None:
            return SamplerStream(self.keys, self.dataset)
        return IndexSource(self.dataset)

    def _late(self) -> Fetch:
        return Fetch(self.dataset, self.traits.makes_batches)

    def _traits(self) -> dict[str, Any]:
        ordered = self.keys is not None
        return {
            "orders_rows": ordered,
            "reorders": ordered and torch_samplers.reorders(self.keys),
            "makes_batches": self.batch_sampler is not None,
            "random_access": not ordered,
        }

    @property
    def _runs_user_code(self) -> bool:
        return self.keys is not None and torch_samplers.draws_globally(self.keys)

    def identity(self) -> dict[str, Any]:
        if self.keys is None:
            return {"stage": self.name}
        return {"stage": self.name, self._option: type(self.keys).__qualname__, **self._content}

    @made_once
    def _content(self) -> dict[str, Any]:
        return torch_samplers.content_of(self.keys)

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

    @made_once
    def _draw_watch(self) -> DrawWatch:
        return DrawWatch(self, str(self), DRAWS["Fetch"])

    def process(self, run: Run) -> Run:
        keys = run.block.data
        assert isinstance(keys, list)
        left = iter(keys)
        at_work = at_work_of(self)
        taken = left if at_work is None else at_work.noting(left, run.first_ids())
        try:
            if self.batched:
                rows: list[Any] = [self._rows(batch, batch) for batch in map(list, taken)]
            else:
                rows = self._rows(keys, taken)
        except Exception as error:
            begun = len(keys) - length_hint(left)
            # Which row it is about is not known where all are asked for at once.
            blame(error, self, int(run.block.ids[begun - 1]) if begun else None)
            raise
        return run.with_block(run.block.with_data(rows))

    @property
    def _many(self) -> Any:
        """``__getitems__``, but that of a ``Subset`` which asks for one item after the other."""
        inner = self.dataset
        while type(inner) is Subset:
            inner = inner.dataset
        own = getattr(inner, "__getitems__", None)
        return getattr(self.dataset, "__getitems__", None) if callable(own) else None

    def _rows(self, keys: list[Any], one_by_one: Iterable[Any]) -> list[Any]:
        many = self._many
        around = self._draw_watch.around if self._runs_user_code else lambda fn: fn
        if many is None:
            one = around(self.dataset.__getitem__)
            # map() would take a StopIteration of it for the end of the keys.
            return [one(key) for key in one_by_one]
        given = around(many)(keys)
        are_rows = isinstance(given, Iterable) and not isinstance(given, Mapping | str | bytes)
        rows = list(given) if are_rows else []
        if len(rows) != len(keys):
            got = f"{len(rows):,} rows" if are_rows else f"a {type(given).__name__}"
            raise DataError(
                f"{type(self.dataset).__name__}.__getitems__ must return a list of a row for each index, got "
                f"{got} for {len(keys):,}; raise an error for what it cannot read, and leave rows out with "
                "filter()"
            )
        return rows

    def __repr__(self) -> str:
        return f"{type(self.dataset).__name__}[…]"


class IndexSource(source.NumberedRowsSource):
    """The indices of a map-style dataset; ``Fetch`` makes rows of them."""

    row_bytes = 8.0

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self._dataset, self._name = dataset, _named(dataset)

    def _check_length(self) -> None:
        if (now := len(self._dataset)) != self.rows:
            raise DataChangedError(
                f"the dataset has {now:,} rows, and had {self.rows:,} when the pipeline first looked: make "
                "the pipeline again"
            )

    def slice(self, start: int, stop: int) -> Payload:
        return list(range(start, stop))

    def take(self, index: IntArray) -> Payload:
        return index.tolist()

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.rows, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), *super().describe()]


class SamplerStream(source.RowStream):
    """A torch sampler's indices as a stream."""

    def __init__(self, sampler: Iterable[Any], dataset: Any) -> None:
        self._sampler = sampler
        self._name = _named(dataset)

    @property
    def length(self) -> int | None:
        count = torch_samplers.length_of(self._sampler)
        return None if count is None else count * torch_samplers.replicas_of(self._sampler)

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        with callers.making_rows():
            return IterableReader(torch_samplers.keys_of(self._sampler, epoch))

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.length, "dataset": self._name}

    def describe(self) -> list[tuple[str, str]]:
        return [("dataset", self._name), ("rows", f"{self.length} an epoch, by a sampler")]


def _named(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


#: Items of a list that is worth packing, and those that are looked at first; bytes of an item that others
#: hold, too, and that may be copied.
LEAST_ITEMS, SOME_ITEMS, MOST_COPIED = 1000, 100, 1024


class PackedList(Sequence[Any]):
    """A list that worker processes share: a look at a pickled item changes no reference count, which would
    copy it.

    >>> PackedList([{"a": 1}, {"a": 2}])[1]
    {'a': 2}
    """

    def __init__(self, items: Sequence[Any]) -> None:
        content, ends = bytearray(), [0]
        for item in items:
            content += _pickled(item)
            ends.append(len(content))
        # Tensors in shared memory: spawned workers get them without a copy too.
        self._content = torch.from_numpy(np.frombuffer(content, dtype=np.uint8)).share_memory_()
        self._ends = torch.tensor(ends, device="cpu").share_memory_()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, stop = self._ends[place : place + 2].tolist()
        return pickle.loads(self._content[start:stop].numpy().data)


def _pickled(value: Any) -> bytes:
    content = io.BytesIO()
    Pickler(content, protocol=5).dump(value)  # of a view of a tensor no more than that
    return content.getvalue()


def _share_much(items: Sequence[Any]) -> bool:
    """Whether items hold the same large objects, of which each would have a copy."""
    apart = sum(len(_pickled(item)) for item in items)
    return apart - len(_pickled(list(items))) > MOST_COPIED * len(items)


def packed(stage: Stage) -> Stage:
    """A ``from_dataset`` with a long list of picklable items packed, but of items that share much; else the
    stage itself.
    """
    items: Any = stage.dataset if isinstance(stage, FromDataset) else None
    if type(items) not in (list, tuple) or len(items) < LEAST_ITEMS:
        return stage
    try:
        if _share_much(items[:SOME_ITEMS]):
            return stage
        return stage._replaced(dataset=PackedList(items))
    except (pickle.PicklingError, TypeError, AttributeError):
        return stage
