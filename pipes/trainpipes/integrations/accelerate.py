"""A loader for training loops of Accelerate, which its checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch

from trainpipes._internal.checks import need, require
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError
from trainpipes.loader import Loader
from trainpipes.loader.steps import take_steps
from trainpipes.look.lengths import batches_left, no_length
from trainpipes.pipeline.chain import Pipeline
from trainpipes.stages.device import map_tensors
from trainpipes.state.format import BatchSizes

need("accelerate", "trainpipes.integrations.accelerate", oldest="1.15")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import gather_object, send_to_device  # noqa: E402

__all__ = ["AccelerateLoader", "loader"]


def loader(
    pipe: Pipeline,
    accelerator: Accelerator,
    *,
    allow_changes: Collection[str] = (),
    global_batches: int | None = None,
    **options: Any,
) -> AccelerateLoader:
    """A loader for a training loop of Accelerate:

        train = trainpipes.integrations.accelerate.loader(pipe, accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)

    ``accelerator.save_state`` saves its position, and ``load_state`` restores it, on any number of processes.
    Make the loaders in the same order before either. Batches come on the accelerator's device; at the last
    batch of an epoch, accumulated gradients are applied.

    With ``sharding_filter(tail="uneven")``, for evaluation, the last step is filled up with repeated rows,
    and ``gather_for_metrics`` drops these: every row counts once. Where processes share a rank, each of them
    gathers its rows.

    Args:
        pipe: makes batches.
        accelerator: the ``Accelerator``.
        allow_changes: options that may differ from the pipeline that was saved, as for
            ``Loader.load_state_dict``.
        global_batches: batches of an optimizer step over all processes, for training: sets the accelerator's
            gradient_accumulation_steps, and each epoch has whole steps. A run is the same on any number of
            processes that divides it.
        options: of ``trainpipes.Loader``.

    Raises:
        ConfigError: ``pipe`` makes no batches, ``Loader`` has no such option, other processes read the
            pipeline than the accelerator has, they cannot share ``global_batches``, or DeepSpeed has read
            another number of batches.
    """
    good, way = isinstance(accelerator, Accelerator), "write loader(pipe, accelerator)"
    require(good, "loader(accelerator)", "an accelerate.Accelerator", accelerator, way)
    if isinstance(pipe, Record):
        pipe._need_batches("loader(pipe)")
    batches = AccelerateLoader(Loader(pipe, **options), accelerator, allow_changes)
    if global_batches is not None:
        option, before = "gradient_accumulation_steps", accelerator.gradient_accumulation_steps
        plugin = accelerator.deepspeed_plugin  # "auto" in it is the accelerator's
        is_read = plugin is not None and not plugin.is_auto(option)
        before = plugin.get_value(option, 1) if is_read else before
        accelerator.gradient_accumulation_steps = take_steps(
            batches.loader, global_batches, option, before, is_read
        )
    accelerator.register_for_checkpointing(batches)
    return batches


class AccelerateLoader(DataLoaderStateMixin):
    """What ``loader`` returns: each rank's batches, with the position in checkpoints of accelerate.

    Attributes:
        loader: the ``trainpipes.Loader``.
        end_of_dataloader: whether the batch at hand is the last of its epoch.
        remainder: rows of the last step of all ranks that ``gather_for_metrics`` keeps; 0 for all.
    """

    def __init__(
        self, loader: Loader, accelerator: Accelerator, allow_changes: Collection[str] = ()
    ) -> None:
        self.loader = loader
        self.allow_changes = allow_changes
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        processes, world = accelerator.num_processes, iteration_of(loader).ranks()[1]
        good = processes == 1 or not accelerator.split_batches
        rule = "off: a pipeline's batches are those of a process"
        way = f"leave it out, and for batches of n rows write .batch(n // {processes})"
        require(good, "split_batches", rule, True, way)
        parallel = accelerator.parallelism_config
        parts = 1 if parallel is None else parallel.non_data_parallel_size
        replicas = processes // parts
        if world != replicas and (parts > 1 or loader.pipeline._ranks is None):
            ranks = "rank=..., world_size=..."
            if parts > 1:
                mesh = 'mesh=accelerator.torch_device_mesh["dp"]'
                ranks = mesh if replicas > 1 else "rank=0, world_size=1"
            raise ConfigError(
                "as many ranks must read the pipeline as there are replicas of the model, got "
                f"{world} ranks and {replicas} replicas; make the Accelerator first, on CPUs as "
                f"Accelerator(cpu=True), or write loader(pipe.distributed({ranks}), accelerator)"
            )
        shared = 1 < world < processes
        good = not (shared and plan_of(loader).chain.uneven and accelerator.even_batches)
        rule = (
            '"even" where processes share a rank, as gather_for_metrics() gathers the rows of each'
        )
        way = "leave it out, which loses no row where the ranks divide the batches"
        require(good, "sharding_filter(tail)", rule, "uneven", way)

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        """Batches on the device, while Accelerate knows that this loader is at work, and how far."""
        batches = iter(self.loader)
        steps = self._steps_of_all(batches)
        self.begin()
        self.remainder, batch, accelerator = 0, None, self._accelerator
        try:
            for number in count(1) if steps is None else range(1, steps + 1):
                before, batch = batch, next(batches, None)
                if number == steps:
                    batch = self._last_step(batch, before)
                elif batch is None:
                    return
                placed = batch
                if accelerator.device_placement:
                    placed = send_to_device(
                        batch, accelerator.device, accelerator.dataloader_config.non_blocking
                    )
                self.end_of_dataloader = number == steps or (steps is None and batches.is_last())
                yield placed
        finally:
            self.end()

    def _steps_of_all(self, batches: EpochIterator) -> int | None:
        """Steps that all ranks take in this pass, if one may have to be filled up."""
        plan, (_, world) = plan_of(self.loader), iteration_of(self.loader).ranks()
        if not (plan.chain.uneven and world > 1 and self._accelerator.even_batches):
            return None
        state = batches.state_dict()
        plan, sizes = plan_of(self.loader), BatchSizes.parse(state["batch_sizes"])
        left = batches_left(plan, state["batches"], sizes=sizes)
        rule = "off for batches that are not counted in advance"
        way = "or let ranks end apart by DataLoaderConfiguration(even_batches=False)"
        way += ", and call accelerator.reduce() after the loop"
        require(left is not None, 'sharding_filter(tail="uneven")', rule, no_length(plan), way)
        return math.ceil((left or 0) / world)

    def _last_step(self, batch: Any, before: Any) -> Any:
        """This rank's last batch, as long as all others'. Called by all ranks."""
        rows_of_rank = 0 if batch is None else _rows_in(batch)
        everyone: list[tuple[int, bool]] = gather_object(
            [(rows_of_rank, batch is None and before is None)]
        )
        rows = [number for number, _ in everyone]
        most, total = max(rows), sum(rows)
        if any(lacking for _, lacking in everyone):  # fewer batches than ranks
            shown = None if batch is None else send_to_device(batch, "cpu")
            before = next(other for other in gather_object([shown]) if other is not None)
        good = rows == [max(0, min(most, total - most * rank)) for rank in range(len(rows))]
        rule = "of full batches on the first ranks (rows of each)"
        way = "resume an evaluation on as many processes, or start it anew"
        require(good, "the last step", rule, rows, way)
        batch = before if batch is None else batch
        rule = "of as many rows on each rank for collate(ragged=...), whose rows cannot be repeated"
        way = "let ranks end apart by DataLoaderConfiguration(even_batches=False)"
        require(len({*rows}) == 1 or not _offsets_in(batch), "the last step", rule, rows, way)
        self.remainder = 0 if total == most * len(rows) else total
        return _filled(batch, most)

    @property
    def dataset(self) -> NoReturn:
        """What ``skip_first_batches`` and ``prepare_data_loader`` would make another loader of."""
        rule = "iterated itself, got one in skip_first_batches() or prepare_data_loader()"
        way = "leave these out: after accelerator.load_state(folder) it goes on where it was saved"
        raise ConfigError(f"a loader of trainpipes.integrations.accelerate must be {rule}; {way}")

    # Where it stands

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, as ``Loader.full_state_dict`` says. Of a pass left while another loader
        is at work, as an evaluation of a few batches, it is the start of the next.
        """
        iteration, at_work = iteration_of(self.loader), self.gradient_state.active_dataloader
        last, endless = iteration.last, plan_of(self.loader).chain.endless
        # Also of one that has ended: others may have left it, and all ranks must do the same.
        is_over = last is not None and (last.left or last.ended) and not endless
        if is_over and at_work not in (None, self):
            epoch = int(iteration.passes.now.upcoming)
            return self.loader.pipeline.state_at(0, epoch=epoch)
        return self.loader.full_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken."""
        self.loader.load_state_dict(state, allow_changes=self.allow_changes)
        # A save comes after a step; from now on steps may be of other numbers of batches.
        self._accelerator.step = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; without it, the next."""
        self.loader.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0. After ``load_state``, begin the loop over epochs with it."""
        return int(self.loader.state_dict()["epoch"])

    def __len__(self) -> int:
        plan, (_, world) = plan_of(self.loader), iteration_of(self.loader).ranks()
        whole = batches_left(plan)
        if plan.chain.uneven and whole is not None and self._accelerator.even_batches:
            return math.ceil(whole / world)
        return len(self.loader)


def _rows_in(batch: Any) -> int:
    """Rows of a batch, by its first tensor, array or list, or by offsets of lists."""
    counts: list[int] = []

    def note(part: Any) -> Any:
        if not _is_rows(part):
            return None
        counts.append(len(part))
        return part

    map_tensors(_offsets_in(batch) or batch, note)
    rule = "of tensors, arrays or lists of rows"
    way = "end the pipeline with pad_collate() or collate()"
    require(counts, "a batch that is filled up", rule, batch, way)
    return counts[0]


def _offsets_in(batch: Any) -> dict[str, Any]:
    """Where the rows of lists begin, as ``collate(ragged=...)`` has it beside their numbers."""
    names = [f"{name}_offsets" for name in batch] if isinstance(batch, Mapping) else []
    return {name: batch[name] for name in names if name in batch}


def _filled(batch: Any, rows: int) -> Any:
    """A batch with its rows repeated up to a number.

    >>> import torch
    >>> _filled({"x": torch.arange(3), "name": ["a", "b", "c"]}, 5)
    {'x': tensor([0, 1, 2, 0, 1]), 'name': ['a', 'b', 'c', 'a', 'b']}
    """
    have = _rows_in(batch)
    places = [row % have for row in range(rows)]

    def fill(part: Any) -> Any:
        if not _is_rows(part):
            return None
        if len(part) != have:
            return part
        return [part[place] for place in places] if isinstance(part, list) else part[places]

    if have == rows:
        return batch
    return map_tensors(dict(batch) if isinstance(batch, Mapping) else batch, fill)


def _is_rows(part: Any) -> bool:
    """Whether this has an item for each row, unlike ``default_collate``'s list of columns."""
    if not isinstance(part, list):
        return isinstance(part, torch.Tensor | np.ndarray) and part.ndim > 0
    firsts = {value.shape[:1] if isinstance(value, torch.Tensor) else None for value in part}
    return None in firsts or len(firsts) != 1
