"""A pipeline run as a trainer would run it, and counted: batches, rows, tokens, padding, waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpipes import Loader

__all__ = ["DEFAULT_STEPS", "Counts", "Report", "measure"]

#: Batches of a run for which nothing says how long it is.
DEFAULT_STEPS = 100
#: Warm-up is a quarter of the batches, and no more than these: by then each of 24 shards has begun.
MOST_WARM_UP = 25
#: What stands beside token ids, after the same prefix, and is 0 where there is padding.
MASKS = ("attention_mask", "input_mask", "segment_ids")


@dataclass
class Counts:
    """What has come up to a moment.

    Attributes:
        steps: batches, or rows where nothing batches them.
        rows: in them.
        tokens: token ids that are no padding.
        cells: tokens and padding, of columns whose mask says which is which.
        padding: of these.
        targets: tokens that the loss counts; None where there are no labels.
        seconds: since the start.
        waited: of these, for batches.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    cells: int = 0
    padding: int = 0
    targets: int | None = None
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, item: Any, is_batch: bool) -> None:
        """Count one more item."""
        self.steps += 1
        self.rows += _rows(item) if is_batch else 1
        if isinstance(item, Mapping):
            self._add_tokens(item)
        elif isinstance(item, list):
            for row in item:
                if isinstance(row, Mapping):
                    self._add_tokens(row)

    def _add_tokens(self, values: Mapping[str, Any]) -> None:
        for name, ids in values.items():
            prefix = name.removesuffix("input_ids").removesuffix("token_ids")
            if prefix == name or ids is None:
                continue
            size = math.prod(ids.shape) if hasattr(ids, "shape") else len(ids)
            mask = next((values[prefix + end] for end in MASKS if prefix + end in values), None)
            known = getattr(mask, "shape", None) == getattr(ids, "shape", ())
            tokens = int((mask != 0).sum()) if known else size
            self.tokens += tokens
            self.cells += size if known else 0
            self.padding += size - tokens
            labels = values.get(f"{prefix}labels")
            if getattr(labels, "shape", None) == getattr(ids, "shape", ()):
                self.targets = (self.targets or 0) + int((labels != -100).sum())


@dataclass(frozen=True)
class Report:
    """What a run came to. Rates and the share of waiting leave out the start and the warm-up.

    Attributes:
        counts: all that has come.
        first: the same at the first batch.
        warm: at the end of the warm-up.
        step_seconds: that the loop took for itself after each batch.
        interrupted: whether Ctrl-C ended it.
    """

    counts: Counts
    first: Counts
    warm: Counts
    step_seconds: float
    interrupted: bool = False

    def rate(self, name: str) -> float | None:
        """So many a second; None where the run was too short to say."""
        seconds = self.counts.seconds - self.warm.seconds
        if self.counts.steps == self.warm.steps or seconds <= 0:
            return None
        return float((getattr(self.counts, name) - getattr(self.warm, name)) / seconds)

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
        counts = self.counts
        return None if counts.targets is None else counts.targets / max(1, counts.tokens)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return {
            "steps": self.counts.steps, "rows": self.counts.rows, "tokens": self.counts.tokens,
            "seconds": self.counts.seconds, "first_batch_seconds": self.first.seconds,
            "warm_up_steps": self.warm.steps, "warm_up_seconds": self.warm.seconds,
            "steps_per_second": self.rate("steps"), "rows_per_second": self.rate("rows"),
            "tokens_per_second": self.rate("tokens") if self.counts.tokens else None,
            "wait_share": self.wait_share, "padding_share": self.padding_share,
            "target_share": self.target_share, "interrupted": self.interrupted,
        }  # fmt: skip


@dataclass
class _Run:
    """Counts that are kept for the first batches, one by one, since only the end says which were warm-up."""

    counts: Counts = field(default_factory=Counts)
    kept: list[Counts] = field(default_factory=list)

    def report(self, step_seconds: float, interrupted: bool) -> Report:
        warm = min(len(self.kept), max(1, self.counts.steps // 4))
        return Report(self.counts, self.kept[0], self.kept[warm - 1], step_seconds, interrupted)


def measure(
    loader: Loader,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    epochs: int | None = None,
    step_seconds: float = 0.0,
) -> Report:
    """Run a loader and count. Ctrl-C ends the run, and the report is of what has come.

    Args:
        loader: over the pipeline.
        steps: batches; where an epoch has fewer, the next one follows.
        seconds: after the first batch; as with ``steps``.
        epochs: whole epochs. Where nothing says how long, 100 batches, or an epoch if that is shorter.
        step_seconds: that the loop sleeps after each batch, as long as a trainer would take.

    Raises:
        DataError: an epoch gives nothing.
    """
    from trainpipes._internal.progress import Progress

    if steps is None and seconds is None and epochs is None:
        steps, epochs = DEFAULT_STEPS, 1
    stages = loader.pipeline.stages
    is_batch = any(s.role == "batch" or getattr(s, "makes_batches", False) for s in stages)
    run, interrupted = _Run(), False
    counts = run.counts
    started, waited = perf_counter(), loader.wait_seconds
    with Progress("running", steps, "batches") as progress:
        try:
            for item in _items(loader, epochs):
                counts.seconds = perf_counter() - started
                counts.waited = loader.wait_seconds - waited
                counts.add(item, is_batch)
                if len(run.kept) < MOST_WARM_UP:
                    run.kept.append(replace(counts))
                progress.advance()
                if counts.steps == steps:
                    break
                if seconds is not None and counts.seconds - run.kept[0].seconds >= seconds:
                    break
                if step_seconds:
                    time.sleep(step_seconds)
        except KeyboardInterrupt:
            if not counts.steps:
                raise
            interrupted = True
    return run.report(step_seconds, interrupted)


def _items(loader: Loader, epochs: int | None) -> Iterator[Any]:
    from trainpipes import DataError

    for _ in count() if epochs is None else range(epochs):
        item = None
        for item in loader:
            yield item
        if item is None:
            raise DataError(
                "the pipeline gives nothing: see explain() for what the stages make of the rows"
            )


def _rows(batch: Any) -> int:
    """Rows of a batch: the length of the first of its values that has two dimensions, or else one."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if not isinstance(batch, tuple):
        return len(batch) if hasattr(batch, "__len__") else 1
    sized = [one for one in batch if hasattr(one, "__len__") and getattr(one, "ndim", 2)]
    first = next((one for one in sized if getattr(one, "ndim", 1) > 1), sized[0] if sized else ())
    return _rows(first) if isinstance(first, Mapping) else len(first) if sized else 1
