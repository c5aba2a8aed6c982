"""A pipeline run as a trainer would run it, and counted; the help of commands imports none of it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from trainpipes._internal.progress import Progress
from trainpipes.errors import DataError
from trainpipes.interfaces.stage_kinds import BatchingStage
from trainpipes.loader import Loader
from trainpipes.look.values import masks_of, rows_of

#: Batches of a run for which nothing says how long it is.
DEFAULT_STEPS = 100
#: Warm-up is a quarter of the batches, and no more than these: by then each of 24 shards has begun.
MOST_WARM_UP = 25


def measure(
    loader: Loader,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    step_seconds: float = 0.0,
) -> dict[str, Any]:
    """Run a loader and count; Ctrl-C ends the run."""
    if steps is None and epochs is None:
        steps, epochs = DEFAULT_STEPS, 1
    stages = loader.pipeline.stages
    is_batch = any(isinstance(s, BatchingStage) or s.traits.makes_batches for s in stages)
    total: Counter[str] = Counter()
    begun: list[Counter[str]] = []  # the first batches: only the end says which were warm-up
    started, waited, interrupted = perf_counter(), loader.wait_seconds, False
    with Progress("running", steps, "batches") as progress:
        try:
            for item in itertools.islice(_items(loader, epochs), steps):
                total["seconds"] = perf_counter() - started  # type: ignore[assignment]
                total["waited"] = loader.wait_seconds - waited  # type: ignore[assignment]
                _count(item, is_batch, total)
                progress.advance()
                if len(begun) < MOST_WARM_UP:
                    begun.append(total.copy())
                time.sleep(step_seconds)
        except KeyboardInterrupt:
            if not begun:
                raise
            interrupted = True
    warm = begun[min(len(begun), max(1, total["steps"] // 4)) - 1]
    return {**report(total, begun[0], warm, step_seconds), "interrupted": interrupted}


def _items(loader: Loader, epochs: int | None) -> Iterator[Any]:
    for _ in itertools.count() if epochs is None else range(epochs):
        item = None
        for item in loader:
            yield item
        if item is None:
            raise DataError(
                "the pipeline gives nothing: see explain() for what becomes of the rows"
            )


def _count(item: Any, is_batch: bool, total: Counter[str]) -> None:
    named = item if isinstance(item, Mapping) else {}
    masks = masks_of(named)
    shapes = [mask.shape for mask in masks]
    total["steps"] += 1
    total["rows"] += (rows_of(item) or 0) if is_batch else 1
    total["cells"] += sum(mask.numel() for mask in masks)
    total["tokens"] += sum(int((mask != 0).sum()) for mask in masks)
    labels = (value for name, value in named.items() if str(name).endswith("labels"))
    for value in labels:
        if getattr(value, "shape", None) in shapes:
            total["targets"] += int((value != -100).sum())
        elif getattr(value, "ndim", 0) > 1:  # a text of its own, which may have a shape by chance
            total["apart"] += 1


def report(
    total: Mapping[str, Any], first: Mapping[str, Any], warm: Mapping[str, Any], step_seconds: float
) -> dict[str, Any]:
    """The figures of a run; rates leave out the start and the warm-up."""
    seconds = total["seconds"] - warm["seconds"]

    def rate(name: str) -> float | None:
        return (total[name] - warm[name]) / seconds if seconds > 0 and total[name] else None

    cells, tokens = total["cells"], total["tokens"]
    targets = None if total.get("apart") else total.get("targets")
    return {
        **{name: total[name] for name in ("steps", "rows", "tokens", "cells", "seconds", "waited")},
        "rows": total["rows"] or None,  # of batches that hold none that can be counted
        "padding": cells - tokens,
        "targets": targets,
        "first_batch_seconds": first["seconds"],
        "warm_up_steps": warm["steps"],
        "warm_up_seconds": warm["seconds"],
        **{f"{name}_per_second": rate(name) for name in ("steps", "rows", "tokens")},
        "wait_share": rate("waited") if step_seconds else None,
        "padding_share": (cells - tokens) / cells if cells else None,
        "target_share": None if targets is None else targets / max(1, tokens),
    }
