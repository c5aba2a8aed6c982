"""Whether the ranks of a step have as much to do, by the global sequence: ``stats(world_size=)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainpipes._internal.checks import IntArray
from trainpipes.engine.planning.chain import Chain
from trainpipes.errors import ConfigError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.order.permutation import turn_order
from trainpipes.stages.balance import Balance
from trainpipes.stages.pack import Pack

__all__ = ["Steps", "mask_of_rows", "steps_of", "work_of"]


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
