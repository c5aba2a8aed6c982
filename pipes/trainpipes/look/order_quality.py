"""The global order in numbers: how well it is shuffled, beside a random order; and whether the ranks of a
step have as much to do, ``stats(world_size=)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainpipes._internal.checks import IntArray, require
from trainpipes._internal.messages import Report
from trainpipes._internal.progress import counted
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.inputs import BlockTable, Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage
from trainpipes.look.lengths import Numbered, walk
from trainpipes.look.row_steps import Unread
from trainpipes.order.permutation import turn_order
from trainpipes.samplers import RandomSampler
from trainpipes.stages.batch import Batch
from trainpipes.stages.order import Balance
from trainpipes.stages.pack import Pack

#: Batches that are looked at where nothing says how large they are.
BATCH_SIZE = 32
#: Stages that say which rows are read, and in which order.
READING = kinds.Source | kinds.ShardStage | kinds.ShuffleStage


@dataclass(frozen=True, repr=False)
class ShuffleQuality(Report):
    """How well an order is shuffled. Prints each number beside that of a random order.

    Attributes:
        rows: rows looked at.
        epoch_rows: rows of an epoch: more than ``rows`` for a sample.
        batch_size: rows in a batch.
        files: that the rows are from; blocks where there are no files.
        neighbor_distance: mean distance in the files of rows that come next to each other, as a part of
            all rows that ``take`` and ``skip`` leave: 0 for file order, 1/3 for a random order.
        neighbors_kept: share of rows that come after their neighbor in a file: 1 for file order. Above
            0.01, batches hold stretches of files.
        files_per_batch: mean number of files that a batch has rows of.
        random_files_per_batch: the same in a random order.
    """

    rows: int
    epoch_rows: int
    batch_size: int
    files: int
    neighbor_distance: float
    neighbors_kept: float
    files_per_batch: float
    random_files_per_batch: float

    def _rows(self) -> list[tuple[str, str]]:
        n = max(1, self.epoch_rows)
        of = f"{self.rows:,}" + f" of {n:,}" * (self.rows < self.epoch_rows)
        files = f"{self.files:,} file{'s'[: self.files != 1]}"
        share, near = f"{self.neighbors_kept:<10.4f}", f"{self.neighbor_distance:<10.3f}"
        return [
            ("rows", f"{of} of {files}, batches of {self.batch_size}"),
            ("neighbor distance", f"{near}random: 0.333"),
            ("neighbors kept", f"{share}random: {min(1.0, 2 / n):.4f}"),
            ("files in a batch", f"{self.files_per_batch:<10.1f}random: {self.random_files_per_batch:.1f}"),
        ]  # fmt: skip


def shuffle_quality(
    order: Record | Sequence[int] | npt.NDArray[Any],
    *,
    files: Sequence[int] | npt.NDArray[Any] | None = None,
    batch_size: int | None = None,
    epoch: int = 0,
) -> ShuffleQuality:
    """Measure the order in which a pipeline reads its rows, or any order. Reads no rows.

    Rows that stages drop or make do not count.

    Args:
        order: a pipeline; or numbers of rows, counted over all files, in the order in which they come.
        files: with numbers, the rows of each file; a single file if left out.
        batch_size: rows in a batch; the pipeline's own if left out, else 32.
        epoch: of the pipeline.

    Raises:
        ConfigError: the pipeline's rows have no numbers (a stream, a mix), or the files have fewer rows.

    >>> print(shuffle_quality(range(1000), files=[250] * 4))
    rows                1,000 of 4 files, batches of 32
    neighbor distance  0.001     random: 0.333
    neighbors kept     1.0000    random: 0.0020
    files in a batch    1.1       random: 4.0
    """
    if isinstance(order, Record):
        quality = order_quality(order, batch_size=batch_size, epoch=epoch)
        rule = "a pipeline over rows of files or of memory, or numbers of rows"
        way = "give the numbers of its rows as they come"
        require(quality is not None, "shuffle_quality(order)", rule, order.stages[0], way)
        assert quality is not None
        return quality
    numbers = np.asarray(order, dtype=np.int64)
    most = int(numbers.max(initial=-1)) + 1
    lengths = np.array([most] if files is None else files, dtype=np.int64)
    require(numbers.ndim == 1, "shuffle_quality(order)", "a list of numbers", numbers.shape)
    total = int(lengths.sum())
    outside = numbers[(numbers < 0) | (numbers >= total)].tolist()
    rule, way = f"row numbers from 0 to {total - 1}", "give files= the rows of each file"
    require(not outside, "shuffle_quality(order)", rule, outside[:3], way)
    return _measured(numbers, lengths, lengths, batch_size or BATCH_SIZE, len(numbers))


def order_quality(
    pipeline: Record, batches: int | None = None, batch_size: int | None = None, epoch: int = 0
) -> ShuffleQuality | None:
    """How batches are shuffled as they are read; None where rows have no numbers. Reads no row."""
    chain, source = plan_of(pipeline).chain, plan_of(pipeline).inputs.source
    if chain.mixes or not isinstance(source, RowSource):
        return None
    stages_left: list[Stage] = []
    for stage in takewhile(
        lambda s: not isinstance(s, kinds.BatchingStage | kinds.PackingStage), chain.stages
    ):
        in_file_order = not any(isinstance(s, kinds.ShuffleStage) for s in stages_left)
        if isinstance(stage, READING) or (isinstance(stage, kinds.CountingStage) and in_file_order):
            stages_left.append(stage._fresh())
    size = batch_size or (chain.batch_size if chain.batch_size > 1 else BATCH_SIZE)
    chain = Plan.of([*stages_left, Batch(size), Numbered()], source, quiet=True).chain
    after = (s for s in chain.after if not kinds.is_on_rows(s) or isinstance(s, Numbered))
    plan = Plan(Inputs(replace(chain, before=(), after=tuple(after)), Unread(source)))
    items = counted(islice(walk(plan, epoch), batches), "measuring the shuffle", batches, "batches")
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *items])
    files, lengths = source.file_of_block, source.lengths
    used = BlockTable(lengths, chain.skip_rows, chain.stop_rows).lengths
    sampler = chain.shuffle.sampler if chain.shuffle is not None else None
    if chain.drawn is not None and sampler is not None and not isinstance(sampler, RandomSampler):
        # Rows that it does not name are not there: the others are numbered without them.
        rows = int(used.sum())
        named = np.unique(chain.drawn.index(epoch, 0, chain.drawn.length(rows), rows))
        named += chain.skip_rows
        numbers = np.searchsorted(named, numbers)
        blocks = np.searchsorted(np.cumsum(lengths), named, side="right")
        lengths = used = np.bincount(blocks, minlength=len(lengths))
    if files is not None:
        lengths, used = (np.bincount(files, weights=n).astype(np.int64) for n in (lengths, used))
    return _measured(numbers, lengths, used, size, plan.inputs.epoch_rows or 0)


def _measured(
    numbers: IntArray, lengths: IntArray, used: IntArray, batch_size: int, epoch_rows: int
) -> ShuffleQuality:
    """``used``: of the rows of each file, those that ``take`` and ``skip`` leave."""
    n = len(numbers)
    file = np.searchsorted(np.cumsum(lengths), numbers, side="right")
    in_file = used if n < epoch_rows else np.bincount(file, minlength=len(lengths))
    apart = np.abs(np.diff(numbers)) if n > 1 else np.zeros(1)
    full, rest = divmod(n, batch_size)
    batches = max(1, full + (rest > 0))
    touched = np.unique(np.arange(n) // batch_size * len(lengths) + file)
    expected = full * _touched(in_file, batch_size) + _touched(in_file, rest)
    return ShuffleQuality(
        n, max(n, epoch_rows), batch_size, int((in_file > 0).sum()),
        neighbor_distance=float(apart.mean() / max(1, used.sum())),
        neighbors_kept=float((apart == 1).mean()),
        files_per_batch=len(touched) / batches,
        random_files_per_batch=expected / batches,
    )  # fmt: skip


def _touched(in_file: IntArray, size: int) -> float:
    """Files that ``size`` rows, drawn at random, are of."""
    n, none = int(in_file.sum()), np.ones(len(in_file))
    for drawn in range(size):
        none *= np.maximum(0.0, n - in_file - drawn) / max(1, n - drawn)
    return float((1.0 - none).sum())


@dataclass(frozen=True)
class Steps:
    """How even the steps of some ranks are. A step takes as long as its slowest rank.

    Attributes:
        world_size: ranks.
        steps: looked at, all ranks with a batch.
        tokens: part of the cells that are tokens, 0 to 1, where each rank takes as long as the step's
            largest batch: all tokens / (ranks x cells of the largest batches).
        cells: of a step's batches, the largest / the mean, on average; 1 is even.
        attention: the same of the sum of the squares of the documents' lengths.
        balanced: the same with ``balance()`` after ``batch``; None where a stage balances already, or none
            cuts batches.
        cost: of the balanced ones, the ``cost`` of ``balance``; None for its default.
    """

    world_size: int
    steps: int
    tokens: float
    cells: float
    attention: float
    balanced: Steps | None = None
    cost: str | None = None

    def __str__(self) -> str:
        steps, ranks = (
            f"{number:,} {noun}{'s' * (number != 1)}"
            for number, noun in ((self.steps, "step"), (self.world_size, "rank"))
        )
        text = f"{steps} of {ranks}: {self.tokens:.1%} of ranks x largest is tokens; {self._ratios}"
        if self.balanced is None:
            return text
        option = "" if self.balanced.cost is None else f'cost="{self.balanced.cost}"'
        with_it = f"with .balance({option}): {self.balanced.tokens:.1%}; {self.balanced._ratios}"
        return f"{text}\n{with_it}"

    @property
    def _ratios(self) -> str:
        return f"largest / mean {self.cells:.2f} (cells), {self.attention:.2f} (attention)"


def mask_of_rows(batch: Any, chain: Chain) -> list[npt.NDArray[Any]]:
    """A mask ``[rows, longest]`` of rows that are not padded yet: numbers of documents from 1, and 0."""
    rows = [batch] if isinstance(batch, Mapping) else batch
    # Stages that cut batches by lengths, or order them, know the column.
    cutting = (s for s in chain.after if isinstance(s, kinds.BatchingStage | kinds.BalanceStage))
    columns = [column for stage in cutting if (column := stage.options.get("column"))]
    column = columns[-1] if columns else "input_ids"
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Mapping) and ("segment_ids" in row or column in row) for row in rows
    ):
        raise ConfigError(
            "stats(world_size) must be asked of batches with an attention_mask or segment_ids, or of rows "
            f"with {column!r}, got {type(batch).__name__}; ask the pipeline before collate()"
        )
    documents = [
        np.asarray(row["segment_ids"]) if "segment_ids" in row else np.ones(_length(row[column]))
        for row in rows
    ]
    mask = np.zeros((len(rows), max(map(len, documents), default=0)), np.int64)
    for row, of_row in zip(mask, documents, strict=True):
        row[: len(of_row)] = of_row
    return [mask]


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else int(value)


def work_of(masks: Sequence[torch.Tensor | npt.NDArray[Any]]) -> tuple[int, int, int]:
    """Cells, tokens, and the sum of the squares of documents' lengths of a batch."""
    cells = tokens = squares = 0
    for mask in masks:
        numbers = np.asarray(mask).astype(np.int64)
        rows, most = len(numbers), int(numbers.max(initial=0)) + 1
        of_row = (np.arange(rows)[:, None] * most + numbers).ravel()
        sizes = np.bincount(of_row, minlength=rows * most).reshape(rows, most)[:, 1:]
        cells += numbers.size
        tokens += int(sizes.sum())
        squares += int((sizes**2).sum())
    return cells, tokens, squares


def steps_of(works: Sequence[tuple[int, int, int, int]], world_size: int, chain: Chain) -> Steps:
    """How even steps are, by the number, cells, tokens and squares of the first batches of an epoch."""
    table = np.array(works, dtype=np.int64).reshape(-1, 4)
    numbers, costs = table[:, 0], table[:, 1:]
    plain = _steps(numbers, costs, world_size)
    if plain is None:
        raise ConfigError(
            f"stats(world_size) must be at most the batches that are looked at, got {world_size:,} with "
            f"{len(works):,}; ask for fewer ranks or, if an epoch has them, more batches"
        )
    batch = chain.batch
    if batch is None or chain.groups or chain.takes_turns:
        return plain
    # Batches of a budget have about as many cells; only attention differs.
    is_packed, of_budget = kinds.first_of(chain.stages, Pack), batch.batch_size is None
    cost = costs[:, 2 if is_packed or of_budget else 0]
    order = _balanced(numbers, cost, chain.num_shards)
    balanced = _steps(numbers, costs[order], world_size)
    if balanced is not None and of_budget and not is_packed:
        balanced = replace(balanced, cost="attention")
    return replace(plain, balanced=balanced)


def _steps(numbers: IntArray, costs: IntArray, world_size: int) -> Steps | None:
    """Of whole steps; None where there is none."""
    step = (numbers - numbers[:1]) // world_size
    whole = np.flatnonzero(np.bincount(step) == world_size)
    if not len(whole):
        return None
    of_steps = costs[np.isin(step, whole)].reshape(-1, world_size, 3)
    largest, mean = of_steps.max(1), of_steps.mean(1)
    ratios = (largest / np.maximum(mean, 1e-9)).mean(0)
    tokens = of_steps[:, :, 1].sum() / max(1, world_size * largest[:, 0].sum())
    return Steps(world_size, len(whole), float(tokens), float(ratios[0]), float(ratios[2]))


def _balanced(numbers: IntArray, cost: IntArray, num_shards: int) -> IntArray:
    """Which batch comes at each place with ``balance()``, int64 ``[batches]``."""
    turns, shards = numbers // num_shards, numbers % num_shards
    window, seed = Balance.window, Balance.seed
    order = np.arange(len(numbers))
    for part in np.unique(turns // window):
        for shard in np.unique(shards):
            places = np.flatnonzero((shards == shard) & (turns // window == part))
            if len(places):
                first = int(turns[places[0]])
                moved = turn_order(cost[places], first, window, seed, "balance", 0)
                order[places] = places[moved]
    return order
