"""Loaders for Lightning's loops: for training, and for evaluation.

A training loader keeps states by Lightning's numbers of batches: that of the last batch *trained on* is
known, however many were fetched ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from trainpipes._internal.checks import require
from trainpipes._internal.messages import warn_once
from trainpipes.errors import StateError
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline

#: States that are kept: Lightning fetches one batch ahead, and training on one more may fail.
KEPT = 4


class Progress:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._epochs = trainer.fit_loop.epoch_progress
        self._batches = trainer.fit_loop.epoch_loop.batch_progress

    @property
    def trained(self) -> int:
        """Batches that were trained on, over all epochs and resumed runs."""
        return int(self._batches.total.processed)

    @property
    def epoch(self) -> int:
        return int(self._epochs.current.processed)

    @property
    def at_end(self) -> bool:
        """Whether the last batch of an epoch was the last to be trained on."""
        current = self._batches.current
        return bool(self._batches.is_last_batch) and current.processed == current.ready > 0

    @property
    def restarts(self) -> bool:
        """Whether Lightning goes on within an epoch of a checkpoint."""
        return bool(self.trainer.fit_loop.restarting)

    @property
    def has_ended_epoch(self) -> bool:
        """Whether the checkpoint's epoch had ended: with ``max_steps`` Lightning would take one more batch
        for it.
        """
        total = self._epochs.total
        ended = self.restarts and total.processed == total.started
        return ended and bool(self._batches.is_last_batch)

    def count_as(self, taken: int) -> None:
        """Count a resumed epoch's batches as this number of ranks would have taken them."""
        current = self._batches.current
        more = taken - current.processed
        for event in ("ready", "started", "processed", "completed") if self.restarts else ():
            setattr(current, event, getattr(current, event) + more)


class TrainingLoader:
    def __init__(self, loader: Loader, pipeline: Pipeline) -> None:
        self.loader = loader
        self.pipeline = pipeline
        #: Whether a batch was given or a state loaded.
        self.in_use = False
        self._progress: Progress | None = None
        #: This rank's state after a batch, by the batch's number, from 1.
        self._after: dict[int, dict[str, Any]] = {}
        self._first = 1  # the number of the first batch since Lightning has asked for an iterator
        self._epoch = 0  # that Lightning was in then
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
        """Nothing: the module's state has it. Lightning takes for resumable what has this method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what Lightning kept of a ``Loader`` that was used without the module."""
        if state:
            self.resume(state, ())

    def follow(self, progress: Progress) -> None:
        """Go by what a trainer counts, from here on."""
        self._settle()
        self._progress = progress
        self._nothing_left = progress.has_ended_epoch

    def resume(self, state: dict[str, Any], allow_changes: Collection[str]) -> None:
        self.loader.load_state_dict(state, allow_changes=allow_changes)
        self._after = {}
        self.in_use = True

    def align(self) -> None:
        """Have Lightning count the batches taken before a resume so that those left complete the epoch."""
        progress, iteration = self._progress, self.loader._iteration
        assert progress is not None
        try:
            length = len(self)
        except TypeError:
            return
        taken = iteration.upcoming().m
        if taken:
            whole = len(self.pipeline.distributed(rank=0, world_size=1))
            progress.count_as(length - (whole - taken) // iteration.ranks()[1])
        elif progress.at_end:
            progress.count_as(length)

    def whole_state(self, timeout: float) -> dict[str, Any]:
        """The state of the last batch trained on, for any number of ranks."""
        progress, after = self._progress, self._after
        if not after or progress is None:
            state = self.loader.state_dict()
        elif progress.trained in after:
            state = after[progress.trained]
        else:
            raise StateError(
                f"the position after batch {progress.trained}, the last that Lightning trained on, must be "
                f"known, got {min(after)} to {max(after)}; take batches by training_step(batch, batch_idx)"
            )
        if progress is not None and progress.at_end and state["m"] and not self._endless:
            return self.pipeline.state_at(0, epoch=state["epoch"] + 1)
        return self.loader._whole(state, None, timeout)

    @property
    def _endless(self) -> bool:
        return self.loader._iteration.plan.chain.endless

    def _begin(self) -> Any:
        progress, iteration = self._progress, self.loader._iteration
        if progress is None:
            self.in_use = True
            return iter(self.loader)
        if self._after and self._ended and self._epoch == progress.epoch:
            self._ended = False  # the shorter of several loaders, once more in the same epoch
            return iter(self.loader)
        self._settle()
        if self._nothing_left and progress.restarts:
            return ()
        if progress.trainer.ckpt_path is not None and progress.trained and not self.in_use:
            raise StateError(
                "the checkpoint has no position of this PipelineDataModule (or of one with another class "
                "name); call data.load_state_dict({'train': state}), or load the model without ckpt_path"
            )
        if progress.trainer.overfit_batches > 0 and not iteration.upcoming().m:
            self.loader.load_state_dict(self.pipeline.state_at(0))
        batches = iter(self.loader)
        self.in_use, self._ended = True, False
        self._first, self._epoch = progress.trained + 1, progress.epoch
        self._after = {progress.trained: batches.state_dict()}
        return batches

    def _settle(self) -> None:
        """Have the next iterator begin right: an epoch of which no batch was trained on begins once more."""
        progress, after = self._progress, self._after
        if progress is not None and after:
            trained = progress.trained
            if max(after) > trained and (self._endless or trained < self._first):
                self.loader.load_state_dict(after[trained])
        self._after = {}


class EvaluationLoader:
    """What validates, tests or predicts: each pass from the pipeline's start."""

    def __init__(self, loader: Loader, pipeline: Pipeline) -> None:
        self.loader = loader
        self.pipeline = pipeline

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        self.loader.load_state_dict(self.pipeline.state_at(0))
        return iter(self.loader)

    def check(self, stage: str) -> None:
        """Warn if it would leave rows out."""
        iteration, option = self.loader._iteration, f"PipelineDataModule({stage})"
        world, chain = iteration.ranks()[1], iteration.plan.chain
        way = f"leave .repeat() out, or say Trainer(limit_{stage}_batches=...)"
        require(not chain.endless, option, "a pipeline with an end", self.pipeline, way)
        try:
            whole = len(self.pipeline.distributed(rank=0, world_size=1))
            left = f"the last {whole % world} of {whole} batches" if whole % world else ""
        except TypeError:
            left = "what some ranks have more than others" if world > 1 else ""
        if left and not chain.ragged:
            way = 'for every row once write .sharding_filter(tail="ragged")'
            said = f"{option} leaves out {left} on {world} ranks: {way}"
            warn_once(said, key=(stage, self.pipeline))
