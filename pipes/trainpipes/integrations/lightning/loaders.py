"""Loaders for Lightning's loops: for training, and for evaluation.

A training loader keeps states by Lightning's numbers of batches: that of the last batch *trained on* is
known, however many were fetched ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy

from trainpipes._internal.checks import require
from trainpipes._internal.messages import warn_once
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.errors import ConfigError, StateError
from trainpipes.integrations.callers import of_data_module
from trainpipes.loader import Loader
from trainpipes.loader.steps import take_steps
from trainpipes.look.lengths import batches_left, ends_apart

#: States that are kept: Lightning fetches one batch ahead, and training on one more may fail.
KEPT = 4


def begun(loader: Loader) -> EpochIterator:
    """An iterator of a loader whose position the data module keeps."""
    token = of_data_module.set(True)
    try:
        return iter(loader)
    finally:
        of_data_module.reset(token)


class TrainingLoader:
    """What Lightning's training loop iterates: it notes the state after each batch that was trained on."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        #: Whether a batch was given or a state loaded.
        self.in_use = False
        self._trainer: Any = None
        #: This rank's state after a batch, by the batch's number, from 1.
        self._after: dict[int, dict[str, Any]] = {}
        self._begun = (0, 0)  # batches trained on and epochs, when Lightning last took an iterator
        self._ended = False  # whether the last iterator has come to its end
        self._nothing_left = False  # of the epoch that Lightning resumes

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Begins when Lightning takes the first batch, not when it asks for an iterator."""
        batches = self._begin()
        for batch in batches:
            if self._after:
                number = max(self._after) + 1
                self._after[number] = batches.state_dict()
                self._after.pop(number - KEPT, None)
            yield batch
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the module's state has it. Lightning takes objects with this method for resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load Lightning's state of a ``Loader`` that was used without the module."""
        if state:
            self.resume(state, ())

    # What Lightning counts

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _place(self) -> tuple[int, int]:
        """Batches that were trained on, over all epochs and resumed runs, and the epoch."""
        epochs = self._trainer.fit_loop.epoch_progress
        return int(self._batches.total.processed), int(epochs.current.processed)

    @property
    def _at_end(self) -> bool:
        """Whether the last batch of an epoch was the last to be trained on."""
        current = self._batches.current
        return bool(self._batches.is_last_batch) and current.processed == current.ready > 0

    def follow(self, trainer: Any, global_batches: int | None = None) -> None:
        """Go by a trainer's counts, from here on; its steps have so many batches over all ranks."""
        self._settle()
        if global_batches is not None:
            self._take_steps(trainer, global_batches)
        self._trainer, epochs = trainer, trainer.fit_loop.epoch_progress.total
        # With ``max_steps`` Lightning would take one more batch for an epoch that had ended.
        ended = self._batches.is_last_batch and epochs.processed == epochs.started
        self._nothing_left = bool(ended and trainer.fit_loop.restarting)

    def _take_steps(self, trainer: Any, global_batches: int) -> None:
        option, way = "accumulate_grad_batches", "leave the GradientAccumulationScheduler out"
        changes = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)
        rule = f"as global_batches={global_batches} sets it"
        require(not changes, option, rule, "one that changes", way)
        before, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        is_read = isinstance(trainer.strategy, DeepSpeedStrategy)
        batches = take_steps(self.loader, global_batches, option, before, is_read)
        rule = f"divisible by the {batches} batches of a step on a rank"
        require(
            isinstance(limit, float) or limit % batches == 0, "limit_train_batches", rule, limit
        )
        trainer.accumulate_grad_batches = batches

    def resume(self, state: dict[str, Any], allow_changes: Collection[str]) -> None:
        self.loader.load_state_dict(state, allow_changes=allow_changes)
        self._after = {}
        self.in_use = True

    def align(self) -> None:
        """Have Lightning count the batches taken before a resume as this number of ranks would have taken
        them, so that those left complete the epoch.
        """
        iteration, step = iteration_of(self.loader), self.loader._step
        taken, world, current = iteration.upcoming().m, iteration.ranks()[1], self._batches.current
        left = batches_left(iteration.plan, taken, step)
        known = left is not None or step > 0
        if not (known and self._trainer.fit_loop.restarting and (taken or self._at_end)):
            return
        if left is not None:
            done = len(self) - (left // world if taken else 0)
        elif self._endless:  # where Lightning's epoch began is not known
            done = current.processed // (step // world) * (step // world)
        else:
            done = taken // world if taken else current.processed
        more = done - current.processed
        for event in ("ready", "started", "processed", "completed"):
            setattr(current, event, getattr(current, event) + more)

    def full_state_dict(self, timeout: float) -> dict[str, Any]:
        """The state of the last batch trained on, for any number of ranks."""
        if self._trainer is None:
            return self.loader.full_state_dict(timeout=timeout)
        after, trained = self._after, self._place[0]
        if after and trained not in after:
            raise StateError(
                f"the position after batch {trained}, the last that Lightning trained on, must be known, "
                f"got {min(after)} to {max(after)}; take batches by training_step(batch, batch_idx)"
            )
        state = after[trained] if after else self.loader.state_dict()
        if self._at_end and state["batches"] and not self._endless:
            return self.loader.pipeline.state_at(0, epoch=state["epoch"] + 1)
        return self.loader._whole(state, None, timeout)

    @property
    def _endless(self) -> bool:
        return plan_of(self.loader).chain.endless

    def _begin(self) -> Any:
        trainer = self._trainer
        if trainer is None:
            self.in_use = True
            return begun(self.loader)
        place = trained, epoch = self._place
        if self._after and self._ended and self._begun[1] == epoch:
            self._ended = False  # the shorter of several loaders, once more in the same epoch
            return begun(self.loader)
        self._settle()
        if self._nothing_left and trainer.fit_loop.restarting:
            return ()
        if trainer.ckpt_path is not None and trained and not self.in_use:
            raise StateError(
                "the checkpoint has no position of this PipelineDataModule (or of one with another class "
                "name); call data.load_state_dict({'train': state}), or load the model without ckpt_path"
            )
        if trainer.overfit_batches > 0 and not iteration_of(self.loader).upcoming().m:
            self.loader.load_state_dict(self.loader.pipeline.state_at(0))
        batches = begun(self.loader)
        self.in_use, self._ended, self._begun = True, False, place
        self._after = {trained: batches.state_dict()}
        return batches

    def _settle(self) -> None:
        """Have the next iterator begin right: an epoch of which no batch was trained on begins once more."""
        if self._after:
            trained = self._place[0]
            if max(self._after) > trained and (self._endless or trained <= self._begun[0]):
                self.loader.load_state_dict(self._after[trained])
        self._after = {}


class EvaluationLoader:
    """What validates, tests or predicts: each pass from the pipeline's start."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        self.loader.load_state_dict(self.loader.pipeline.state_at(0))
        return begun(self.loader)

    def check(self, stage: str, in_step: bool) -> None:
        """Warn if it would leave rows out. ``in_step``: whether ranks must take as many steps, as where a
        forward pass is a collective."""
        iteration, option = iteration_of(self.loader), f"PipelineDataModule({stage})"
        world, chain = iteration.ranks()[1], iteration.plan.chain
        way = f"leave .repeat() out, or say Trainer(limit_{stage}_batches=...)"
        require(not chain.endless, option, "a pipeline with an end", self.loader.pipeline, way)
        whole = batches_left(iteration.plan, 0)
        left = f"the last {(whole or 0) % world} of {whole} batches"
        if whole is None:
            left = "what some ranks have more than others"
        if in_step and ends_apart(iteration.plan, world):
            batches = "an unknown number of batches" if whole is None else f"{whole} batches"
            raise ConfigError(
                f"{option} must have as many batches on each rank, since forward passes of this strategy "
                f'are collectives, got {batches} on {world} ranks and tail="uneven"; write '
                '.sharding_filter(tail="even"), which leaves out the last few'
            )
        if not chain.uneven and not in_step and world > 1 and (whole is None or whole % world):
            way = 'for every row once write .sharding_filter(tail="uneven")'
            said = f"{option} leaves out {left} on {world} ranks: {way}"
            warn_once(said, key=(stage, self.loader.pipeline))
