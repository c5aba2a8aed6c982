"""A pipeline run as a trainer would run it, and counted: batches, rows, tokens, padding, waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from trainpipes._internal.progress import Progress
from trainpipes.errors import DataError
from trainpipes.loader import Loader
from trainpipes.look.values import masks_of, rows_of

#: Batches of a run for which nothing says how long it is.
DEFAULT_STEPS = 100
#: Warm-up is a quarter of the batches, and no more than these: by then each of 24 shards has begun.
MOST_WARM_UP = 25


@dataclass
class Counts:
    """What has come up to a moment."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    cells: int = 0
    padding: int = 0
    targets: int | None = None
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, item: Any, is_batch: bool) -> None:
        self.steps += 1
        self.rows += (rows_of(item) or 0) if is_batch else 1
        named = item if isinstance(item, Mapping) else {}
        masks = masks_of(named)
        self.cells += sum(mask.numel() for mask in masks)
        self.tokens += sum(int((mask != 0).sum()) for mask in masks)
        self.padding = self.cells - self.tokens
        for name, labels in named.items():
            shape = getattr(labels, "shape", None)
            if str(name).endswith("labels") and any(shape == mask.shape for mask in masks):
                self.targets = (self.targets or 0) + int((labels != -100).sum())


@dataclass(frozen=True)
class Report:
    """What a run came to. Rates and the share of waiting leave out the start and the warm-up."""

    counts: Counts
    first: Counts
    warm: Counts
    step_seconds: float
    interrupted: bool

    def rate(self, name: str) -> float | None:
        """So many a second; None where the run was too short to say, or there are none."""
        seconds = self.counts.seconds - self.warm.seconds
        count = getattr(self.counts, name) - getattr(self.warm, name)
        return float(count / seconds) if seconds > 0 and getattr(self.counts, name) else None

    @property
    def wait_share(self) -> float | None:
        """The part of the time in which the loop waited; None where no step was simulated: a loop that does
        nothing always waits."""
        return self.rate("waited") if self.step_seconds else None

    @property
    def padding_share(self) -> float | None:
        """Padding as part of all cells; None where no mask tells it."""
        return self.counts.padding / self.counts.cells if self.counts.cells else None

    @property
    def target_share(self) -> float | None:
        """Targets of the loss as part of the tokens; None where there are no labels."""
        targets = self.counts.targets
        return None if targets is None else targets / max(1, self.counts.tokens)

    def to_dict(self) -> dict[str, Any]:
        shares = ("wait_share", "padding_share", "target_share", "interrupted")
        return {
            **vars(self.counts),
            "first_batch_seconds": self.first.seconds,
            "warm_up_steps": self.warm.steps,
            "warm_up_seconds": self.warm.seconds,
            **{f"{name}_per_second": self.rate(name) for name in ("steps", "rows", "tokens")},
            **{name: getattr(self, name) for name in shares},
        }


def measure(
    loader: Loader,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    epochs: int | None = None,
    step_seconds: float = 0.0,
) -> Report:
    """Run a loader and count. Ctrl-C ends the run, and the report is of what has come."""
    if steps is None and seconds is None and epochs is None:
        steps, epochs = DEFAULT_STEPS, 1
    stages = loader.pipeline.stages
    is_batch = any(s.role == "batch" or getattr(s, "makes_batches", False) for s in stages)
    counts, interrupted = Counts(), False
    begun: list[Counts] = []  # the first batches: only the end says which were warm-up
    started, waited = perf_counter(), loader.wait_seconds
    with Progress("running", steps, "batches") as progress:
        try:
            for item in _items(loader, epochs):
                counts.seconds = perf_counter() - started
                counts.waited = loader.wait_seconds - waited
                counts.add(item, is_batch)
                progress.advance()
                if len(begun) < MOST_WARM_UP:
                    begun.append(replace(counts))
                over = seconds is not None and counts.seconds - begun[0].seconds >= seconds
                if over or counts.steps == steps:
                    break
                if step_seconds:
                    time.sleep(step_seconds)
        except KeyboardInterrupt:
            if not begun:
                raise
            interrupted = True
    warm = begun[min(len(begun), max(1, counts.steps // 4)) - 1]
    return Report(counts, begun[0], warm, step_seconds, interrupted)


def _items(loader: Loader, epochs: int | None) -> Iterator[Any]:
    for _ in itertools.count() if epochs is None else range(epochs):
        item = None
        for item in loader:
            yield item
        if item is None:
            raise DataError(
                "the pipeline gives nothing: see explain() for what the stages make of the rows"
            )
