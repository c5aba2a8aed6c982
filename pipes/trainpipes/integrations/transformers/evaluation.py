"""Batches of an evaluation: every row once, and as many steps on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils._pytree import tree_map
from transformers.trainer_pt_utils import find_batch_size

from trainpipes.errors import ConfigError
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.stages.order import ShardingFilter


def every_row(pipe: Pipeline) -> Pipeline:
    """A pipeline that leaves no batch out where ranks do not divide their number."""
    if pipe._iteration.plan.chain.endless:
        raise ConfigError(
            f"the pipeline of eval_dataset must have an end, got\n{pipe}\nleave .repeat() out"
        )
    stages = [
        stage.replaced(tail="ragged") if isinstance(stage, ShardingFilter) else stage
        for stage in pipe.stages
    ]
    return Pipeline(stages, pipe._ranks, pipe._members)


class EvaluationLoader(DataLoaderStateMixin):
    """Gives each rank its batches, then ones to fill in while others have more; ``gatherer`` drops their
    rows.
    """

    def __init__(
        self, loader: Loader, accelerator: Accelerator, prepare: Callable[[Any], Any]
    ) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._prepare = prepare
        self._sizes = [0]  # rows of each rank's batch
        self._given = 0  # rows of this rank's, also where it fills in
        self._filler: Any = None
        self._steps: int | None = None
        #: Rows of all ranks that were given, once all were.
        self.rows: int | None = None

    def __len__(self) -> int:
        if self._steps is not None:
            return self._steps
        plan, (_, world) = self.loader._iteration.plan, self.loader._iteration.ranks()
        len(self.loader)  # says why it is not known
        return math.ceil(plan.counts.batches_in_pass / world)

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        batches = iter(self.loader)
        steps = rows = 0
        self.begin()
        try:
            upcoming = self._step(next(batches, None))
            while upcoming is not None:
                batch, self._sizes, self._given = upcoming
                steps, rows = steps + 1, rows + sum(self._sizes)
                upcoming = self._step(next(batches, None))
                self.end_of_dataloader = upcoming is None
                yield batch
        finally:
            self.end()
        self._steps, self.rows = steps, rows

    def _step(self, batch: Any) -> tuple[Any, list[int], int] | None:
        """A batch or a filler, each rank's rows, and this one's; None at the end of all ranks."""
        batch = None if batch is None else self._prepare(batch)
        sizes = [0 if batch is None else _rows(batch)]
        if self._accelerator.num_processes > 1:
            own = torch.tensor(sizes, device=self._accelerator.device)
            sizes = self._accelerator.gather(own).tolist()
        if not any(sizes):
            return None
        if batch is None and self._filler is None:  # there are more ranks than batches
            alone = self.loader.pipeline.distributed(rank=0, world_size=1)
            batch = self._prepare(next(iter(Loader(alone, threads=0))))
        self._filler = self._filler if batch is None else batch
        return self._filler, sizes, _rows(self._filler)

    def gatherer(self, repeated: int) -> Callable[[Any], Any]:
        """A function that gathers the rows of all ranks in the order of batches, without fillers."""
        return lambda values: tree_map(lambda value: self._gather(value, repeated), values)

    def _gather(self, value: Any, repeated: int) -> Any:
        accelerator, sizes = self._accelerator, self._sizes
        if not isinstance(value, torch.Tensor):
            return value
        rows = sizes[accelerator.process_index]
        if value.dim() == 1 and len(value) == repeated:
            value = value[:1].expand(self._given) if len(value) != self._given else value
        elif value.dim() == 0 or len(value) != self._given:
            return accelerator.gather(value)  # not by rows
        value = value[:rows]
        if len(sizes) == 1:
            return value
        most = max(sizes)
        whole = value.new_zeros((most, *value.shape[1:]))
        whole[:rows] = value
        parts = accelerator.gather(whole).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _rows(batch: Any) -> int:
    return find_batch_size(batch) or 1
