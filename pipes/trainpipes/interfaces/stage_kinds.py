from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray, require, takes
from trainpipes._internal.locks import ForkLock
from trainpipes.columns.block import Block, first_bad, naming_bad_values
from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run, unplaced
from trainpipes.errors import ConfigError, DataError
from trainpipes.interfaces.read_columns import blame, each
from trainpipes.interfaces.source import Reader, RowSource, RowStream
from trainpipes.interfaces.stage import Stage, made_once

#: Opens the rows below a stage at a state of theirs.
OpenBelow = Callable[[dict[str, Any]], Iterator[Run]]
#: Makes rows of those of a block.
Apply = Callable[[Block], Block]


class RunStage(Stage):
    """A stage without a position of its own: makes a run of a run."""

    _inside = Stage._inside | {"process"}
    #: Whether it takes rows one by one after ``batch``, too, where others of its kind take batches.
    _rows_of_batches: ClassVar[bool] = False
    #: Whether its rows hold large arrays, which stay as they are: types are not found by making some twice.
    _gives_arrays: ClassVar[bool] = False

    @abstractmethod
    def process(self, run: Run) -> Run:
        """The run that comes out for the run that goes in. Without ``keeps_rows`` rows may be dropped
        (``run.pick``), never added or reordered.
        """

    def _check_rows(self, run: Run, single: bool = False) -> None:
        if run.items is not None:
            raise ConfigError(
                f"{self} works on rows: put it before pad_collate(), collate() or the map() that made "
                "something of its batches, or use map() after them"
            )
        if single and run.bounds is not None:
            raise ConfigError(f"{self} works on single rows: put it before batch()")

    def _settle(self, threads: int) -> None:
        """Prepare for calls by this many threads at once; 0 for only the thread that iterates."""


class WorkingStage(RunStage):
    """A stage that may have workers, which begin with a run before it is due."""

    @property
    def has_workers(self) -> bool:
        return True

    @property
    def most_workers(self) -> int:
        """How many work at once, if it has workers."""
        return 1

    @property
    def most_begun(self) -> int:
        """Runs of a shard that its workers are given ahead, beside those that are asked for."""
        return 0

    @property
    def inner(self) -> tuple[Stage, ...]:
        """The stages that its workers run."""
        return (self,)

    @abstractmethod
    def submit_run(self, run: Run) -> Callable[[], Run] | None:
        """Have workers begin with a run; returns a call that waits for the result of ``process``, or
        None without workers.
        """


@dataclass(frozen=True)
class Rows:
    """The rows of a table, for stages that draw random numbers for each.

    Args:
        ids: the number of each row in file order over all files, int64 ``[rows]``.
        epochs: the epoch of each row, int64 ``[rows]``.
    """

    ids: IntArray
    epochs: IntArray


class TableStage(RunStage, takes="columns"):
    """A stage on rows as an Arrow table: a row comes out for each that goes in, in order.

    Define ``apply``; or ``open``, to make something once in each process or to use the rows'
    numbers. Treat each row by itself: how many a table has may differ between two runs. To drop
    rows use ``filter``.

    >>> import pyarrow as pa, pyarrow.compute as pc, trainpipes as tp
    >>> class Lower(tp.TableStage):
    ...     column: str
    ...
    ...     def apply(self, table):
    ...         index = table.column_names.index(self.column)
    ...         return table.set_column(index, self.column, pc.utf8_lower(table[self.column]))
    >>> list(tp.from_arrow(pa.table({"text": ["A", "B"]})).then(Lower("text")))
    [{'text': 'a'}, {'text': 'b'}]
    """

    def apply(self, table: pa.Table) -> pa.Table:
        """The new rows: a table with as many rows, in the same order."""
        raise ConfigError(f"{type(self).__name__} needs apply(table), which returns a table")

    def open(self) -> Callable[[pa.Table, Rows], pa.Table]:
        """A function of a table and its ``Rows`` that returns the new table; made once in each
        process. Several threads may call it if ``thread_safe`` says so.
        """
        return lambda table, _: self.apply(table)

    @made_once
    def _opening(self) -> tuple[ForkLock, list[Callable[[pa.Table, Rows], pa.Table]]]:
        """A lock of ``open``, whose threads may need that of all stages, and what it returned."""
        return ForkLock(), []

    @property
    def _function(self) -> Callable[[pa.Table, Rows], pa.Table]:
        lock, opened = self._opening
        with lock:
            if not opened:
                function, name = self.open(), f"what {type(self).__name__}.open() returns"
                rule, way = "a function of a table and its Rows", "write def function(table, rows)"
                require(takes(function, 2), name, rule, function, way)
                opened.append(function)
        return opened[0]

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        block, function = run.block, self._function
        table = table_of(block.data, self)
        epochs = np.broadcast_to(np.asarray(block.epoch, dtype=np.int64), len(block))

        def fails(start: int, stop: int) -> bool:
            part, rows = table.slice(start, stop - start), slice(start, stop)
            try:
                function(part, Rows(block.ids[rows], epochs[rows]))
            except Exception:
                return True
            return False

        try:
            table_made = self._draw_watch.around(function)(table, Rows(block.ids, epochs))
        except Exception as error:
            row = int(block.ids[first_bad(len(block), fails)]) if len(block) else None
            blame(error, self, row)
            raise
        if not isinstance(table_made, pa.Table) or len(table_made) != len(table):
            got = (
                f"{len(table_made)} rows"
                if isinstance(table_made, pa.Table)
                else type(table_made).__name__
            )
            raise DataError(
                f"{self} must return as many rows as it is given, {len(table)}, got {got}; to drop "
                "rows use filter()",
                stage=str(self),
            )
        return run.with_block(block.with_data(table_made))


class RowStage(RunStage, per_row=True, gives="objects"):
    """A stage on each row (a dict or another object of the source) by itself; after ``batch``, on each
    item.

    One row comes out for each that goes in: use ``filter`` to drop rows, ``flat_map`` to add some.

    >>> import trainpipes as tp
    >>> class AddSuffix(tp.RowStage):
    ...     suffix: str = "!"
    ...
    ...     def apply(self, row):
    ...         return row + self.suffix
    >>> pipe = tp.from_dataset(["a", "b"]).then(AddSuffix("?"))
    >>> pipe
    from_dataset(list of 2 items)
      .add_suffix('?')
    >>> list(pipe)
    ['a?', 'b?']
    """

    def apply(self, row: Any) -> Any:
        """The new row; never None, and no list of rows."""
        raise ConfigError(f"{type(self).__name__} needs apply(row), which returns a row")

    def process(self, run: Run) -> Run:
        rows = applied(self, run, "row")
        if run.items is None and run.bounds is None:
            return run.with_block(run.block.with_data(rows))
        return run.with_items(rows)


class PushedStage(RunStage):
    """A stage on a reader's rows that its source may have carried out already: see ``is_filtered``."""


class FinishingStage(RunStage):
    """A stage that makes of batches the items of the training loop."""


def is_on_rows(stage: object) -> bool:
    """Whether a stage treats each row by itself: it may stand on either side of a shuffle."""
    return isinstance(stage, RunStage) and not isinstance(stage, FinishingStage)


def keeps_each_row(stage: Stage) -> bool:
    """Whether a stage makes a row of each by itself, the same in every epoch."""
    traits = stage.traits
    return is_on_rows(stage) and traits.keeps_rows and "epoch" not in traits.depends_on


class BatchStage(FinishingStage, per_row=True):
    """A stage on each finished batch, such as a move to a device.

    >>> import torch, trainpipes as tp
    >>> class Scale(tp.BatchStage):
    ...     by: float = 0.5
    ...
    ...     def apply(self, batch):
    ...         return {name: tensor * self.by for name, tensor in batch.items()}
    >>> pipe = tp.from_tensors(x=torch.arange(4)).batch(2).collate().then(Scale())
    >>> [batch["x"].tolist() for batch in pipe]
    [[0.0, 0.5], [1.0, 1.5]]
    """

    def apply(self, batch: Any) -> Any:
        """The new batch; never None."""
        raise ConfigError(f"{type(self).__name__} needs apply(batch), which returns a batch")

    def process(self, run: Run) -> Run:
        if run.items is None and run.bounds is None:
            raise ConfigError(f"{self} works on batches: put batch() before it")
        return run.with_items(applied(self, run, "batch"))


def applied(stage: RowStage | BatchStage, run: Run, item: str) -> list[Any]:

    rows = run.items is None and run.bounds is None

    def apply(value: Any) -> Any:
        result = stage.apply(value)
        if result is None:
            raise DataError(f"{stage} returned None for a {item}; to drop one use filter()")
        if rows and (got := _several(value, result)):
            raise DataError(
                f"{stage} must return one row for each, got {got}; to make several rows of one, or none, use "
                "flat_map()"
            )
        return result

    return each(stage, apply, run)


def _several(row: Any, result: Any) -> str:
    if isinstance(result, GeneratorType):
        return "a generator"
    rows = isinstance(result, list) and isinstance(row, Mapping)
    if not rows or not any(isinstance(inner, Mapping) for inner in result):
        return ""
    return f"a list of {len(result)} row{'s' * (len(result) != 1)}"


class RegroupStage(Stage):
    """A stage with its own position: batch, pack, shuffle, take, skip, flat_map. It cuts runs anew, so a
    shard's must come in order.
    """

    @abstractmethod
    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        """The runs of a shard from this stage, opened at a cursor; each has an item or more."""

    #: Whether its positions keep how many batches the shard has given in the pass.
    _takes_turns: ClassVar[bool] = False

    @property
    def _held_items(self) -> int:
        """Items of each shard that it holds at once, at most."""
        return int(self.options.get("buffer_size", 0))


class BatchingStage(RegroupStage):
    """A stage that cuts rows into batches."""

    drop_last = False
    #: Whether it groups batches that another stage made.
    nested: ClassVar[bool] = False

    @property
    def batch_size(self) -> int | None:
        return None


class CachedBlocks(Protocol):
    """Rows of a source's blocks, kept on this machine once they were made."""

    #: Whether rows that a stage has dropped are there as holes, for ``CacheStage.drop_holes``.
    holes: bool

    def read(
        self, wanted: Iterable[tuple[int, int, int]], reader: Reader, apply: Apply | None = None
    ) -> Block:
        """The rows ``start`` to ``stop`` of some blocks: (block, start, stop). ``apply`` makes those that
        are not kept, if that is to be done elsewhere.
        """
        ...

    def schema(self, key: str, find: Callable[[], pa.Schema]) -> pa.Schema: ...

    def describe(self) -> list[tuple[str, str]]: ...


class PackingStage(RegroupStage, keeps_rows=False):
    """A stage that makes rows of others after they are dealt: a row of several, or several of a row."""


def cuts_by_length(stage: Stage) -> bool:
    """Whether the number of items of a stage depends on the values of rows."""
    return isinstance(stage, PackingStage | BatchingStage) and not stage.traits.keeps_rows


class CountingStage(RegroupStage):
    """A stage that gives the first ``count`` items of an epoch, or ``skips`` them."""

    skips: ClassVar[bool] = False

    count: int


class CacheStage(Stage, takes="columns"):
    """A stage that marks which rows are kept on disk."""

    @property
    def on(self) -> bool:
        return True

    @abstractmethod
    def drop_holes(self) -> Stage:
        """A stage that leaves out the holes."""

    @abstractmethod
    def open_cache(
        self,
        source: RowSource,
        firsts: IntArray,
        stages: Sequence[Stage],
        apply: Apply,
        holes: bool,
        listed: Any,
        first: Callable[[], Any],
    ) -> CachedBlocks:
        """What keeps the rows that ``apply`` makes of blocks; ``firsts``: the number of each block's first
        row, ``listed`` and ``first``: what else tells apart the rows of stages that look at places or find
        types.
        """


# Those that the plan of the whole chain carries out


class RowOrder(Protocol):
    """Which rows an epoch has, by number, in its order."""

    def check(self, rows: int) -> None: ...

    def length(self, rows: int) -> int: ...

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray: ...


class ShuffleStage(RegroupStage, reorders=True):
    """A stage that orders rows: as they are read, or the items that the stages below it have made."""

    buffer_size = 0
    seed = 0
    sampler = None

    @property
    def memory(self) -> int:
        """The most bytes that the pipeline may take in a process."""
        return 0

    @property
    def order(self) -> RowOrder | None:
        """What says which rows an epoch has; None for a shuffle within a buffer."""
        return None


class ShardStage(Stage):
    """A stage that deals rows to shards; its options are those of ``sharding_filter``."""

    num_shards = 1
    split = "spans"
    tail = "even"


class BalanceStage(RegroupStage, reorders=True):
    """A stage that gives batches in another order."""


class RepeatStage(Stage):
    """A stage that makes a single epoch of several; ``times`` is None for no end."""

    @property
    def times(self) -> int | None:
        return None


class DeviceStage(Stage):
    """A stage on finished batches, carried out by the process that trains."""

    @property
    def ahead(self) -> int:
        """Batches that it begins with before they are asked for."""
        return 0

    @abstractmethod
    def place(self, item: Any) -> Any:
        """A finished batch where it is to lie."""

    def begun(self, item: Any) -> Callable[[], Any]:
        """Begin to place a batch; the returned call gives it."""
        placed = self.place(item)
        return lambda: placed


class Source(Stage):
    """A stage that gives rows: the first of a chain.

    Define ``open``, which returns a ``RowSource``, whose blocks are known in advance, or a
    ``RowStream``. ``trainpipes.Pipeline([source])`` starts a chain with it; docs/extend.md has an
    example.
    """

    def open(self) -> RowSource | RowStream:
        """The rows, in this process."""
        raise ConfigError(f"{type(self).__name__} needs open(), which returns a RowSource")

    def _open_on(self, files: Sequence[Stage]) -> RowSource | RowStream:
        """The rows of the files that the stages below list; none for most."""
        return self.open()

    def _above(self) -> Sequence[Stage]:
        """Stages on its rows that belong to it, straight above it, the first stage first."""
        return ()

    def _late(self) -> Stage | None:
        """What turns the source's keys into rows after they are dealt."""
        return None


class ListingSource(Source):
    """A source that lists files, for the source above it that reads them."""


class ReadingSource(Source):
    """A source that stands on a ``ListingSource``, and reads its files."""


#: What a state does not know: places of files, caches, devices of batches.
UNKNOWN = ListingSource | CacheStage | DeviceStage


class CombiningSource(Source):
    """A source of several pipelines."""

    @property
    def chains(self) -> Sequence[Sequence[Stage]]:
        raise NotImplementedError

    def of_chains(self, chains: Sequence[Sequence[Stage]]) -> CombiningSource:
        """This source over other chains, in the order of ``chains``."""
        raise NotImplementedError

    @property
    def _runs_user_code(self) -> bool:
        return any(stage._runs_user_code for chain in self.chains for stage in chain)

    def _traits(self) -> dict[str, Any]:
        traits = [stage.traits for chain in self.chains for stage in chain]
        reorders, in_caller = any(t.reorders for t in traits), any(t.in_caller for t in traits)
        return {"reorders": reorders, "in_caller": in_caller}


def first_of(stages: Iterable[Stage], kind: Any) -> Any:
    """The first of these kinds, or None."""
    return next((stage for stage in stages if isinstance(stage, kind)), None)


def reader_of(stage: Stage, stages: Iterable[Stage]) -> str:
    """The name of the source of which a stage is an option: see ``_above``; "" if it is none."""
    sources = (source for source in stages if isinstance(source, Source))
    return next((s.name for s in sources if type(stage) in map(type, s._above())), "")


def without(stages: Iterable[Stage], kind: Any) -> list[Stage]:
    """Those of none of these kinds."""
    return [stage for stage in stages if not isinstance(stage, kind)]


def stages_within(stages: Sequence[Stage], kind: type[Any] = CombiningSource) -> Iterator[Stage]:
    """The stages, and those of the pipelines that sources of this kind combine."""
    for stage in stages:
        yield stage
        if isinstance(stage, kind):
            for chain in stage.chains:
                yield from stages_within(chain, kind)


def put_through(stages: Sequence[Any], block: Block) -> Block:
    for stage in stages:
        with naming_bad_values(block, stage):
            block = stage.process(unplaced(block)).block
    return block
