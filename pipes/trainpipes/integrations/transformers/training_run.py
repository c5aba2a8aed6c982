"""Where one ``train()`` stands in its data: epochs and steps, as the Trainer counts them."""

from __future__ import annotations

import math
from typing import Any

from trainpipes.integrations.transformers.checkpoint_file import SavedPosition
from trainpipes.loader import Loader

__all__ = ["EpochBatches", "TrainingRun"]


class EpochBatches(int):
    """The number of batches in an epoch, as the training loop asks for it: whether batch n was the last one,
    which is when gradients that wait are stepped, and which part of the epoch is done.

    The loop counts the batches of a resumed epoch from the resume on, and does not know the number of those
    of unknown count before the end.

    Args:
        number: how many there are; where that is not known, how many the Trainer takes them for.
        known: whether it is.
        done: batches of the epoch that were trained on before the run.
        passed: epochs that the loop's count lags behind.
    """

    known: bool
    done: int
    passed: int
    #: Batches that the loop has taken.
    taken: int
    #: The last one, once that is known.
    last: int | None

    def __new__(cls, number: int, known: bool, done: int, passed: int) -> EpochBatches:
        found = super().__new__(cls, number)
        found.known, found.done, found.passed = known, done, passed
        found.taken, found.last = 0, None
        return found

    def took(self, batches: int, asked: int) -> None:
        """Count batches that the loop has got."""
        self.taken += batches
        if batches < asked and self.last is None:
            self.last = self.taken

    def __eq__(self, batches: object) -> bool:
        if not isinstance(batches, int):
            return NotImplemented
        if self.last is not None:
            return int(batches) == self.last
        return self.known and int(batches) + self.done == int(self)

    __hash__ = int.__hash__

    def __rtruediv__(self, batches: float) -> float:
        return self.passed + (batches + self.done) / int(self)


class TrainingRun:
    """One ``train()``.

    Args:
        loader: gives the batches. It is told where to start.
        saved: the position to start from, if the run is resumed from one.
        step: optimizer steps that were done before the run; with ``epoch``, of no use beside ``saved``.
        epoch: whole epochs that were.

    Attributes:
        epoch: the first epoch of the run, as the Trainer counts.
        resumed: whether it starts from such a position.
        step: optimizer steps that were done before the run.
        left: batches of the first epoch that each rank has yet to train on; None where that is not known.
        batches: those of the epoch at hand.
    """

    def __init__(
        self, loader: Loader, saved: SavedPosition | None, step: int = 0, epoch: int = 0
    ) -> None:
        self.loader = loader
        self.resumed = saved is not None
        self.step = step if saved is None else saved.step
        self.batches = EpochBatches(0, False, 0, 0)
        if saved is not None:
            loader.load_state_dict(saved.loader)
        state = self._start(epoch if saved is None else saved.loader["epoch"] - saved.first_epoch)
        self._begins_epoch = not state["m"]
        self._first_epoch = state["epoch"] - self.epoch if saved is None else saved.first_epoch
        plan, (_, world) = loader._session.plan, loader._session.ranks()
        self._done = state["m"] // world
        self.left: int | None = None
        if plan.counts.known and not plan.chain.endless:
            length = int(plan.counts.batches_in_pass) // world
            self.left = (int(plan.counts.batches_in_pass) - state["m"]) // world
            if not self.left and state["m"]:  # the loader goes on with the next one
                self.epoch += 1
                self.left = length
            self._done = length - self.left
        #: The epoch of the data in which the run starts, until the first batch is there.
        self._starts_in: int | None = state["epoch"] if self.left is None else None
        self._passed = 0
        self._before_step = self.step, state
        self._taken_by_step = 0

    def _start(self, epoch: int) -> dict[str, Any]:
        self.epoch = epoch
        self.loader.set_epoch(epoch)
        return self.loader.state_dict()

    def call_first(self, epoch: int) -> None:
        """Say how the Trainer calls the first epoch, where the position was not in the checkpoint."""
        self._first_epoch = self._start(epoch)["epoch"] - epoch

    def steps_and_epochs(
        self, max_steps: int, updates: int, accumulation: int, by_epochs: bool
    ) -> tuple[int, int]:
        """Optimizer steps of the whole training, and the epoch after its last one.

        Args:
            max_steps: what the Trainer makes of its arguments, as if all was trained by the ranks that
                there are now.
            updates: optimizer steps of a whole epoch.
            accumulation: batches of a step.
            by_epochs: whether the arguments say epochs, not steps.
        """
        assert self.left is not None
        rest = math.ceil(self.left / accumulation)
        if by_epochs and (self.resumed or not self._begins_epoch):
            after_this = max_steps - (self.epoch + 1) * updates
            max_steps = self.step + max(0, rest + after_this)
        todo = max_steps - self.step
        if todo <= 0:
            return max_steps, self.epoch
        return max_steps, self.epoch + 1 + math.ceil(max(0, todo - rest) / updates)

    def begin(self, epoch: int, number: int) -> EpochBatches:
        """The batches of an epoch that begins.

        Args:
            epoch: as the loop counts.
            number: of batches, as the Trainer takes it.
        """
        done = self._done if epoch == self.epoch else 0
        self.batches = EpochBatches(number, self.left is not None, done, self._passed)
        return self.batches

    def before(self, step: int) -> None:
        """The loop is about to take the batches of its next step, after so many."""
        self._before_step = step, self.loader.state_dict()
        self._taken_by_step = 0

    def took(self, batches: int, asked: int) -> None:
        """The loop has taken batches."""
        self._taken_by_step += batches
        self.batches.took(batches, asked)
        if batches and self._starts_in is not None:
            self._passed = self.batches.passed = self._moved_on(self._starts_in)
            if self._passed:
                self.batches.done = 0
            self._starts_in = None

    def _moved_on(self, epoch: int) -> int:
        """How many epochs the data has gone on by, since nothing was left of the one that was loaded."""
        state = self.loader.state_dict()
        ended = state["m"] == 0
        return int(state["epoch"]) - epoch - int(ended)

    def position(self, step: int, timeout: float) -> SavedPosition:
        """Where the run stands after so many optimizer steps. Where batches are not counted all ranks ask for
        it together. Batches of a step that is not done do not count."""
        before, state = self._before_step
        if before != step or not self._taken_by_step:
            state = self.loader.state_dict()
        return SavedPosition(step, self._first_epoch, self.loader._whole(state, None, timeout))
