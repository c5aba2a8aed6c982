"""What was measured in a run of a pipeline alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TrialReport"]


@dataclass(frozen=True)
class TrialReport:
    """What a run of a pipeline came to.

    Attributes:
        steps: batches of this rank, or rows where nothing batches them.
        rows: in them.
        cells: B * L of all columns of token ids; 0 where there are none.
        tokens: of these, those that are no padding.
        learnt_share: targets of the loss as part of the tokens of the first batches; None where nothing says
            what is learnt.
        first_seconds: from the start to the first batch.
        wait_seconds: that the loop waited for the batches after it.
        longest_wait_seconds: for one of these.
        step_seconds: that the loop took for itself after it, as ``simulate_step`` asked.
        later_rows: rows of the batches after the first one.
        later_tokens: tokens in these.
        stages: seconds of threads in each stage, in the order of the stages, without loading.
        loading_seconds: of threads, that first calls took more than later ones: imports, tokenizers.
        memory_start: bytes in memory before, of this process.
        memory_peak: the most of it and its workers together.
        rank: of the run.
        world_size: ranks in all.
        epochs: that were begun.
        epoch_steps: of each rank in an epoch; None where it is not known or has no end.
        ended: why it ended: "steps", "epochs" or "interrupted".
        threads: that worked ahead; None for as many as there are cores.
        num_workers: worker processes.
        simulated: whether a step was simulated.
        advice: what stands out, with what to write.
    """

    steps: int
    rows: int
    cells: int
    tokens: int
    learnt_share: float | None
    first_seconds: float
    wait_seconds: float
    longest_wait_seconds: float
    step_seconds: float
    later_rows: int
    later_tokens: int
    stages: dict[str, float]
    loading_seconds: float
    memory_start: int
    memory_peak: int
    rank: int
    world_size: int
    epochs: int
    epoch_steps: int | None
    ended: str
    threads: int | None
    num_workers: int
    simulated: bool
    advice: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.first_seconds + self.later_seconds

    @property
    def later_seconds(self) -> float:
        """After the first batch."""
        return self.wait_seconds + self.step_seconds

    @property
    def rows_per_second(self) -> float | None:
        """After the first batch; None where there is one only."""
        return self._rate(self.later_rows)

    @property
    def tokens_per_second(self) -> float | None:
        """After the first batch, without padding; None where there are none."""
        return self._rate(self.later_tokens) if self.tokens else None

    @property
    def steps_per_second(self) -> float | None:
        """After the first batch."""
        return self._rate(self.steps - 1)

    def _rate(self, count: int) -> float | None:
        enough = self.steps > 1 and self.later_seconds > 0
        return count / self.later_seconds if enough else None

    @property
    def padding_share(self) -> float | None:
        """Padding as part of all cells; None where there are no token ids."""
        return (self.cells - self.tokens) / self.cells if self.cells else None

    @property
    def wait_share(self) -> float | None:
        """The part of the time after the first batch in which the loop waited for data; None where no step
        was simulated: a loop that does nothing always waits."""
        if not self.simulated or not self.later_seconds:
            return None
        return self.wait_seconds / self.later_seconds

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return {
            "steps": self.steps, "rows": self.rows, "tokens": self.tokens, "cells": self.cells,
            "epochs": self.epochs, "epoch_steps": self.epoch_steps, "ended": self.ended,
            "seconds": self.seconds, "first_batch_seconds": self.first_seconds,
            "rows_per_second": self.rows_per_second, "tokens_per_second": self.tokens_per_second,
            "steps_per_second": self.steps_per_second, "padding_share": self.padding_share,
            "learnt_share": self.learnt_share, "wait_share": self.wait_share,
            "wait_seconds": self.wait_seconds, "longest_wait_seconds": self.longest_wait_seconds,
            "simulated_seconds": self.step_seconds,
            "stage_thread_seconds": self.stages, "loading_thread_seconds": self.loading_seconds,
            "memory_start_bytes": self.memory_start,
            "memory_peak_bytes": self.memory_peak, "rank": self.rank, "world_size": self.world_size,
            "threads": self.threads, "num_workers": self.num_workers, "advice": list(self.advice),
        }  # fmt: skip
