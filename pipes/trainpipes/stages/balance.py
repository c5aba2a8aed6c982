"""``balance``: gives batches that cost about the same to all ranks of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from trainpipes._internal.checks import ColumnName, Ge, IntArray, Seed
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import Array
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError, SchemaError, shown
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.held import Held, Turn, opened
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import BalanceStage, OpenBelow, first_of
from trainpipes.order.permutation import turn_order
from trainpipes.stages.pack import Pack

#: Costs that have a name; any other text is a column.
CELLS, TOKENS, ATTENTION = NAMED = ("cells", "tokens", "attention")
#: Batches of a run, at most.
RUN_BATCHES = 64


class Balance(BalanceStage, depends_on={"row"}, versioned="cost"):
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
        return self._resolved(_reorders=reorders, _packed=first_of(below, Pack) is not None)

    @property
    def _held_items(self) -> int:
        return self.window

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
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
