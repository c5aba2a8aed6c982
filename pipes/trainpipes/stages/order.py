"""Which rows and batches come, in which order: ``shuffle``, ``sharding_filter``, ``repeat``, ``take``,
``skip``; and ``balance``, for even steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import KW_ONLY
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal import checks
from trainpipes._internal.checks import ColumnName, Ge, IntArray, Seed
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import Array
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, innermost
from trainpipes.errors import ConfigError, DataError, SchemaError, shown
from trainpipes.interfaces import read_columns, stage_kinds
from trainpipes.interfaces.held import Held, Turn, in_epochs, opened
from trainpipes.interfaces.options import identify, instead
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.order.permutation import turn_order
from trainpipes.samplers import BatchSampler, RandomSampler, RowSampler
from trainpipes.samplers.torch_samplers import TorchOrder, draws_globally, reorders
from trainpipes.stages.pack import Pack

#: Parts of a buffer that the first ones hold, so that the first item does not wait for a whole buffer.
GROWTH = (16, 16, 8, 4, 2)
#: Items of a buffer that are not worth waiting less for: the first ones would hardly move.
LEAST_ITEMS = 256
#: Items of a run that a buffer gives.
RUN_ITEMS = 1024


class Shuffle(stage_kinds.ShuffleStage):
    """Shuffle the order of row groups, and rows within buffers.

    A new order every epoch, the same for the same seed in any process and on any number of ranks. A
    buffer holds up to twice ``buffer_size`` rows for each part of the data that is open.

    After another shuffle, ``mix``, ``pack``, ``flat_map`` or ``batch``, it shuffles their items: each
    shard has a buffer of ``buffer_size`` rows or batches, all of the same epoch, and gives it in a random
    order before it fills the next buffer. The first buffers of an epoch are smaller, if they
    have more than 256 items. Of each source of a mix
    a row comes before any of that source's next epoch.

    ``scope="global"`` and ``sampler`` need a source that can be read by row number: ``from_dataset``,
    ``from_arrow``, ``from_tensors``, ``from_memmap``, ``from_hf`` of a ``Dataset``, ``read_lance``,
    ``read_images``, ``read_bytes``, a ``Format`` with ``random_access``, local, uncompressed files of
    ``read_arrow``, ``read_numpy`` and ``read_webdataset``, or ``concat``, ``zip`` and ``windows`` of these.

    Args:
        buffer_size: the fewest rows that a batch is drawn from, but for the first ones of an epoch, whose
            buffers are smaller.
        seed: for the order. Global seeds are neither read nor changed.
        max_bytes: the most memory for the pipeline in a process, such as ``"4GB"``, estimated from
            file footers; large rows make buffers smaller. 1 GiB if left out. It shapes the order,
            so a resume needs the same value.
        scope: "buffer", or "global" for a permutation of all rows, without a buffer.
        sampler: chooses the rows of each epoch and their order: one of ``trainpipes.samplers``, one
            of your own (``RowSampler``), or a torch sampler that has a length and gives row
            numbers. A torch sampler draws with another seed each epoch; a ``DistributedSampler``
            stands for the order over all its replicas.

    >>> import trainpipes as tp
    >>> pipe = tp.from_iterable(lambda: range(6)).shuffle(6, seed=0)
    >>> list(pipe), list(pipe)
    ([5, 0, 4, 2, 1, 3], [5, 0, 1, 2, 4, 3])
    """

    buffer_size: checks.Count = 40_960
    _: KW_ONLY
    seed: checks.Seed = 0
    max_bytes: int | str = 1 << 30
    scope: Literal["buffer", "global"] = "buffer"
    sampler: Any = None

    def check(self) -> None:
        self._set(max_bytes=checks.byte_count(self.max_bytes, "shuffle(max_bytes)"))
        sampler = self.sampler
        plain = (self.buffer_size, self.max_bytes) == (40_960, 1 << 30)
        rule = '"buffer" where buffer_size or max_bytes is given'
        self._require(plain or self.scope == "buffer", "scope", rule)
        if sampler is None:
            return
        alone = plain and self.scope == "buffer" and not self.seed
        self._require(alone, "sampler", "given without buffer_size, max_bytes, scope and seed")
        of_torch = isinstance(sampler, Sampler) and hasattr(sampler, "batch_size")
        rows = not of_torch and not isinstance(sampler, BatchSampler)
        way = "give its sampler here, and .batch(batch_size) after it"
        self._require(rows, "sampler", "a sampler of rows", way)
        good = isinstance(sampler, Sized) and isinstance(sampler, Iterable)
        rule = "one of trainpipes.samplers, or one of torch's that has a length"
        way = instead(sampler)
        self._require((good and not way) or isinstance(sampler, RowSampler), "sampler", rule, way)

    @made_once
    def order(self) -> RowSampler | TorchOrder | None:
        """The order of all rows; None where they are shuffled within a buffer."""
        if self.sampler is None:
            return RandomSampler(seed=self.seed) if self.scope == "global" else None
        return self.sampler if isinstance(self.sampler, RowSampler) else TorchOrder(self.sampler)

    @property
    def memory(self) -> int:
        return int(self.max_bytes)

    #: How many shuffles come before this stage, where it shuffles items of other stages.
    _again: ClassVar[int | None] = None

    def _traits(self) -> dict[str, Any]:
        return {"reorders": self.sampler is None or reorders(self.sampler)}

    def open(self, below: stage_kinds.OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        number, epoch, (at, used) = at.get("buffer", 0), innermost(at)["epoch"], opened(at)
        held = Held(self, below(at), alone=True)
        return self._shuffled(held, used, number, epoch)

    def _shuffled(self, held: Held, used: int, number: int, epoch: int) -> Iterator[Run]:
        while held.fill(1):
            if held.epoch != epoch:  # its first buffers are small, too
                epoch, number = held.epoch, 0
            part = self.buffer_size // dict(enumerate(GROWTH)).get(number, 1)
            size = min(self.buffer_size, max(LEAST_ITEMS, part))
            held.fill(size)
            run, count = held.waiting(), min(size, held.rows)
            stands, salt = run.cursors.place(count)["epoch"], f"shuffle {self._again}"
            numbers = number, number + 1 if stands == epoch else 0
            order, cursors = held.window(count, count, used, salt, True, numbers)
            order = in_epochs(run.part(0, count), order, self)
            for first in range(used, count, RUN_ITEMS):
                stop = min(first + RUN_ITEMS, count)
                yield run.moved(order[first:stop], cursors(first, stop))
            used, number, epoch = 0, numbers[1], stands

    @property
    def _runs_user_code(self) -> bool:
        return self.sampler is not None and draws_globally(self.sampler)

    def identity(self) -> dict[str, Any]:
        if self.sampler is not None:
            return {"stage": self.name, "sampler": identify(self.order)}
        identity = super().identity()
        if self.order is not None:
            del identity["buffer_size"], identity["max_bytes"]
        return identity


class ShardingFilter(stage_kinds.ShardStage):
    """Deal the batches of an epoch to logical shards, and these to ranks and workers.

    Batch m of the one global sequence belongs to shard ``m % num_shards``; rank r of R takes every
    m with ``m % R == r``. The sequence is the same on any number of ranks, and a state of
    R ranks resumes on another number. Ranks that do not divide ``num_shards`` share shards, and read more.

    Args:
        num_shards: S, the number of logical shards. Many world sizes divide 24, 48, 96, 240 and
            960.
        split: "spans" cuts the epoch into contiguous ranges, read side by side; "stride" deals
            batches in file order, or rows where a stage leaves some out, and every consumer reads
            all rows: for evaluation.
        tail: "even" ends an epoch at the same step on all ranks, and leaves out the last few
            batches; "uneven" delivers all, so that ranks may end a step or more apart: for
            evaluation without collectives in the loop. A state saved at such an end needs the same
            number of ranks.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(list(range(8))).sharding_filter(num_shards=2).batch(2)
    >>> [list(pipe.distributed(rank=rank, world_size=2)) for rank in range(2)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """

    free = frozenset({"tail"})

    num_shards: Annotated[int, checks.Ge(1, 2**20)] = 24
    _: KW_ONLY
    split: Literal["spans", "stride"] = "spans"
    tail: Literal["even", "uneven"] = "even"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "balance": "rows"}  # which states have had from the start


class Repeat(stage_kinds.RepeatStage):
    """Start the next epoch where an epoch ends, each in its own order.

    With ``.repeat().batch()``, a batch may hold rows of two epochs, and none is short; with
    ``.batch().repeat()``, each epoch ends with its own last batch. An endless pipeline that is
    iterated again goes on where it stands.

    Args:
        times: epochs that an ``iter()`` gives; None for no end.

    Raises:
        DataError: the stages before it give nothing in a whole epoch.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).repeat(2).batch(2))
    [[0, 1], [2, 0], [1, 2]]
    >>> list(tp.from_iterable(lambda: range(3)).batch(2).repeat(2))
    [[0, 1], [2], [0, 1], [2]]
    """

    times: checks.Count | None = None


class _Counted(stage_kinds.CountingStage, asks_inputs=True):
    """``take`` and ``skip`` by counting items, where the plan cannot leave out blocks."""

    count: checks.Natural

    def open(self, below: stage_kinds.OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        # Below, the state before the run at hand; items of the epoch before it, and of it, used up.
        state, passed, skip = at, 0, 0
        if "below" in at:
            state, passed, skip = at["below"], at["passed"], at["row"]
        low, high = (self.count, checks.LARGEST) if self.skips else (0, self.count)
        rolls = self._inputs.chain.rolling  # into the next epoch
        epoch = innermost(state)["epoch"]
        runs = below(state)
        while (rolls or passed + skip < high) and (run := next(runs, None)) is not None:
            its_epoch = run.cursors.place(0)["epoch"]
            if its_epoch != epoch:
                epoch, passed, state = its_epoch, 0, run.cursors.state(0)
                yield run.part(0, 0)  # many such epochs without an item are an error
            first, last = max(skip, low - passed), min(len(run), high - passed)
            base = {"below": state, "passed": passed}
            passed, state = passed + len(run), run.cursors.state(len(run))
            skip = max(0, skip - len(run))
            if first < last:
                counted = run.pick(np.arange(first, last, dtype=np.int64))
                rows = np.arange(first, last + 1, dtype=np.int64)
                yield Run(
                    counted.block, Cursors.counting(base, rows), counted.bounds, counted.items
                )
                del counted, run  # their memory is free for the next run


class Take(_Counted):
    """Give the first ``count`` items of each epoch.

    Directly after the source rows are counted in file order; after ``batch``, batches over all
    ranks.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(9)).take(2))
    [0, 1]
    """


class Skip(_Counted):
    """Leave out the first ``count`` items of each epoch, counted as ``take`` counts them.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(4)).skip(2))
    [2, 3]
    """

    skips = True


#: Costs that have a name; any other text is a column.
CELLS, TOKENS, ATTENTION = NAMED = ("cells", "tokens", "attention")
#: Batches of a run, at most.
RUN_BATCHES = 64


class Balance(stage_kinds.BalanceStage, depends_on={"row"}, versioned="cost"):
    """Give batches in an order in which those of a step cost about the same on all ranks.

    A step takes as long as its slowest rank. Each shard sorts ``window`` batches by their cost, and all
    shards give the batch of the same rank at the same turn; which rank comes is drawn. No rank asks
    another one, and the order is the same on any number of ranks.

    Stands after ``batch`` and before ``pad_collate`` or ``collate``. ``bucket_by_length`` does this by
    itself. A window is held as columns, for each shard.

    Args:
        window: batches of a shard that are sorted together; more are more even, and take more memory.
        cost: the cost of a batch: "cells", rows x longest row; "tokens", the sum of lengths; "attention", the
            sum of the squares of the documents' lengths, also of those that ``pack`` put into a row; the
            name of a column of numbers, which are added; or a function of the rows' lengths, int64
            ``[rows]``, that returns a number. "attention" after ``pack``, else "cells", if left out.
        column: gives a row's length, by lists or integers.
        seed: for the order, which is drawn anew every epoch if the chain shuffles.
        version: names a function in checkpoints; see ``map``.

    Raises:
        DataError: a cost is negative, or no number.
        SchemaError: a column is not there, or tells no lengths.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"ids": [1] * n} for n in (9, 1, 2, 8)])
    >>> shards = rows.sharding_filter(2).batch(1)
    >>> [[len(row["ids"]) for row in batch] for batch in shards]
    [[9], [2], [1], [8]]
    >>> [[len(row["ids"]) for row in batch] for batch in shards.balance(2, column="ids")]
    [[9], [8], [1], [2]]
    """

    _takes_turns = True

    window: Annotated[int, Ge(2)] = 64
    _: KW_ONLY
    cost: Any = None
    column: ColumnName = "input_ids"
    seed: Seed = 0
    version: str | None = None

    def check(self) -> None:
        good = (
            self.cost is None or callable(self.cost) or (isinstance(self.cost, str) and self.cost)
        )
        named = ", ".join(map(repr, NAMED))
        self._require(
            good, "cost", f"one of {named}, the name of a column, or a function of lengths"
        )

    _reorders: ClassVar[bool] = False  # whether batches come in another order every epoch
    _packed: ClassVar[bool] = False

    def _resolve(self, below: Sequence[Stage]) -> Self:
        reorders = any(stage.traits.reorders for stage in below)
        return self._resolved(
            _reorders=reorders, _packed=stage_kinds.first_of(below, Pack) is not None
        )

    @property
    def _held_items(self) -> int:
        return self.window

    def open(self, below: stage_kinds.OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        turn, (at, used) = Turn.of(at), opened(at)
        return self._windows(Held(self, below(at)), used, turn)

    def _windows(self, held: Held, used: int, turn: Turn) -> Iterator[Run]:
        # All shards' windows end at the same turns.
        while held.fill(self.window - turn.number % self.window):
            count = min(self.window - turn.number % self.window, held.rows)
            run = held.waiting()
            epoch = turn.epoch if self._reorders else 0
            costs = self._costs(run.part(0, count))
            order = turn_order(costs, turn.number, self.window, self.seed, "balance", epoch)
            later = turn.after(count)
            cursors = held.close_window(count, count, used, [turn.kept, later.kept])
            for first in range(used, count, RUN_BATCHES):
                stop = min(first + RUN_BATCHES, count)
                yield run.moved(order[first:stop], cursors(first, stop))
            used, turn = 0, later

    # What batches cost

    def _costs(self, run: Run) -> Array:
        """Of each batch, ``[batches]``."""
        if run.bounds is None or run.items is not None:
            rule = "takes rows that batch() has cut, got those of a function, of collate() or of batches"
            raise ConfigError(f"{self} {rule}: put it straight after batch()")
        cost = self.cost or (ATTENTION if self._packed else CELLS)
        block, bounds = run.block, run.bounds
        if cost not in NAMED and isinstance(cost, str):
            numbers = self._numbers(block, cost).astype(np.float64)
            costs = np.add.reduceat(numbers, bounds[:-1])
        elif cost == ATTENTION:
            costs = np.add.reduceat(self._squares(block), bounds[:-1])
        else:
            lengths = read_columns.lengths_of(block, self.column, self)
            if callable(cost):
                return self._called(lengths, run)
            summed = np.add if cost == TOKENS else np.maximum
            costs = summed.reduceat(lengths, bounds[:-1])
            costs = costs * np.diff(bounds) if cost == CELLS else costs
        self._refuse_bad(costs, run)
        return costs

    def _numbers(self, block: Block, name: str) -> Array:
        columns = read_columns.names_of(block, self)
        if name not in columns:
            words = ", ".join(map(repr, NAMED))
            raise SchemaError(
                f"{self}: cost must be one of {words}, or a column of numbers ({', '.join(columns)}), got "
                f"{name!r}{nearest(name, [*NAMED, *columns])}",
                stage=str(self),
            )
        column = read_columns.read(read_columns.cells(block, name, self), name, self, block.ids)
        if (
            isinstance(column, read_columns.Even)
            and column.values.ndim == 1
            and column.values.dtype.kind in "iufb"
        ):
            return column.values
        raise DataError(
            f"{self}: cost must be a column of numbers, one a row, got {name!r}, which holds others; where a "
            f"row's values are a list, its length counts by column={name!r}",
            stage=str(self),
        )

    def _squares(self, block: Block) -> IntArray:
        """The sum of the squares of the lengths of each row's documents, int64 ``[rows]``."""
        if "segment_ids" not in read_columns.names_of(block, self):
            return read_columns.lengths_of(block, self.column, self) ** 2
        segments, lengths = read_columns.numbers_of(block, "segment_ids", self)
        ends = np.cumsum(lengths)
        begins = np.ones(len(segments), dtype=np.bool_)
        np.not_equal(segments[1:], segments[:-1], out=begins[1:])
        begins[(ends - lengths)[lengths > 0]] = True
        first = np.flatnonzero(begins)
        sizes = np.diff(np.append(first, len(segments)))
        sizes[segments[first] == 0] = 0  # padding
        row = np.searchsorted(ends, first, side="right")
        squares = np.zeros(len(lengths), dtype=np.int64)
        np.add.at(squares, row, sizes.astype(np.int64) ** 2)
        return squares

    def _called(self, lengths: IntArray, run: Run) -> Array:
        assert run.bounds is not None
        costs = np.empty(len(run), dtype=np.float64)
        function = self._draw_watch.around(self.cost)
        for number, (first, stop) in enumerate(pairwise(run.bounds.tolist())):
            try:
                cost = function(lengths[first:stop])
            except Exception as error:
                read_columns.blame(error, self, int(run.block.ids[first]))
                raise
            try:
                costs[number] = float(cost)
            except (TypeError, ValueError, OverflowError):
                raise self._bad_cost(cost, run, number) from None
        self._refuse_bad(costs, run)
        return costs

    def _refuse_bad(self, costs: Array, run: Run) -> None:
        bad = np.flatnonzero(~(costs >= 0) | (costs == math.inf))
        if len(bad):
            raise self._bad_cost(costs[bad[0]].item(), run, int(bad[0]))

    def _bad_cost(self, cost: Any, run: Run, batch: int) -> Exception:
        rule = f"the cost of a batch must be a number of 0 or more, got {shown(cost)}"
        return read_columns.at_row(
            f"{self}: {rule}; give another cost", self, run.row_ids(batch)[0]
        )
