"""What Lightning's loops say of how far training is: all that is read of them, and set in them."""

from __future__ import annotations

from typing import Any

__all__ = ["Progress"]


class Progress:
    """How far a trainer is.

    Args:
        trainer: that fits.
    """

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
        """The epoch that is trained on."""
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
        """Whether the epoch that Lightning goes on with had ended before the checkpoint was saved. With
        ``max_steps`` it runs such an epoch once more, and would take one batch for it."""
        total = self._epochs.total
        return (
            self.restarts and total.processed == total.started and bool(self._batches.is_last_batch)
        )

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint in which batches had been trained on."""
        return self.trainer.ckpt_path is not None and self.trained > 0

    @property
    def repeats_batches(self) -> bool:
        """Whether every epoch trains on the same batches."""
        return bool(self.trainer.overfit_batches > 0)

    @property
    def evaluates_all(self) -> bool:
        """Whether evaluation is to see all batches."""
        trainer = self.trainer
        limits = {"test": trainer.limit_test_batches, "predict": trainer.limit_predict_batches}
        fn = trainer.state.fn
        limit = limits.get(fn and fn.value, trainer.limit_val_batches)
        return isinstance(limit, float) and limit == 1.0  # 1 is one batch

    def count_as(self, taken: int) -> None:
        """Count a resumed epoch's batches as this number of ranks would have taken them.

        Args:
            taken: batches of the epoch that a rank has had.
        """
        if self.restarts:
            current = self._batches.current
            more = taken - current.processed
            for event in ("ready", "started", "processed", "completed"):
                setattr(current, event, getattr(current, event) + more)
