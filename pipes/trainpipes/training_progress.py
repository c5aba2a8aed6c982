"""``loader.progress()``: the batches of a loader, and how far the loop is that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from trainpipes.checks import whole_number
from trainpipes.forecast.estimate import is_measured
from trainpipes.progress_displays import (
    Display,
    Shown,
    display_for,
    may_show,
    process_number,
    take_screen,
)

if TYPE_CHECKING:
    from trainpipes.loader import Loader

__all__ = ["TrainingProgress", "training_progress"]

#: Seconds that rates are of.
LATELY = 5.0


class TrainingProgress(Iterator[Any]):
    """Gives the batches of a loader, one by one, and shows how far the loop is.

    The state is that of the loader. What is shown ends with the loop, whether it comes to its end, is left
    by ``break`` or by an error; where this object is kept, ``close()`` ends it.
    """

    def __init__(self, batches: Any, meter: _Meter, scale: _Scale, display: Display | None) -> None:
        self._batches = batches
        self._meter = meter
        self._scale = scale
        self._display = display
        self._due = 0.0

    def __repr__(self) -> str:
        return (
            "TrainingProgress(iterate it for the batches of a Loader; it shows how far the loop is)"
        )

    def __iter__(self) -> TrainingProgress:
        return self

    def __next__(self) -> Any:
        if self._display is None:
            return next(self._batches)
        asked = perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        now = perf_counter()
        self._meter.add(batch, asked, now)
        if now >= self._due:
            self._meter.look(batch, now)
            if take_screen(self):
                self._display.show(self._shown())
            self._due = perf_counter() + self._display.every
        return batch

    def __del__(self) -> None:
        self.close()

    def is_last(self) -> bool:
        """Whether the batch given last is the last of its epoch."""
        return bool(self._batches.is_last())

    def state_dict(self) -> dict[str, Any]:
        """The state after the batch given last, as the loader's own."""
        state: dict[str, Any] = self._batches.state_dict()
        return state

    def close(self) -> None:
        """Show no more; batches go on to come."""
        display, self._display = getattr(self, "_display", None), None
        if display is not None and self._meter.batches:
            self._meter.end(perf_counter())
            display.close(self._shown())
        take_screen(self, give_back=True)

    def _shown(self) -> Shown:
        return self._scale.shown(self._meter.batches, self._meter.text())


@dataclass(frozen=True)
class _Scale:
    """What batches are counted by.

    Attributes:
        first: batches of this rank before the first one, where a run goes on.
        total: of a pass, or None.
        epoch: the number of the first epoch, or of the pass.
        job: what that is a number of.
        length: batches of this rank in each of several epochs that follow each other; None if they do not.
    """

    first: int
    total: int | None
    epoch: int
    length: float | None
    job: str = "epoch"

    def shown(self, batches: int, text: str) -> Shown:
        done = self.first + batches
        if self.length is None or self.total is not None:
            return Shown(f"{self.job} {self.epoch}", done, self.total, text)
        epochs, within = divmod(done - 1, self.length)
        job = f"epoch {self.epoch + int(epochs)}"
        return Shown(job, int(within) + 1, round(self.length), text)


class _Meter:
    """Counts batches, their rows and tokens, and the time that the loop waits for them."""

    def __init__(self, batched: bool, collated: bool) -> None:
        self.batches = 0
        self._batched, self._collated = batched, collated
        self._rows = self._cells = 0
        self._waited = self._began = 0.0
        #: Of batches that were looked at: tokens, and all cells.
        self._seen = (0, 0)
        self._past: deque[tuple[float, int, int, float]] = deque()

    def add(self, batch: Any, asked: float, given: float) -> None:
        if not self.batches:  # rates begin with the first batch that is asked for
            self._began = asked
            self._past.append((asked, 0, 0, 0.0))
        self.batches += 1
        self._waited += given - asked
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.ndim:
            self._rows += ids.shape[0] if self._batched else 1
            self._cells += ids.numel()
        else:
            self._rows += _rows_in(batch, self._collated) if self._batched else 1

    def look(self, batch: Any, now: float) -> None:
        """Count the tokens of one batch, as a sample, and forget what is long past."""
        if isinstance(batch, Mapping):
            found = (batch.get(name) for name in ("segment_ids", "attention_mask"))
            mask = next((m for m in found if isinstance(m, torch.Tensor)), None)
            # On a device, counting would wait for all that it has to do.
            if mask is not None and mask.device.type == "cpu":
                tokens, cells = self._seen
                self._seen = tokens + int(torch.count_nonzero(mask)), cells + mask.numel()
        self._past.append((now, self._rows, self._cells, self._waited))
        while len(self._past) > 2 and now - self._past[1][0] > LATELY:
            self._past.popleft()

    def end(self, now: float) -> None:
        """Rates are of all batches from here on."""
        self._past = deque([(self._began, 0, 0, 0.0), (now, self._rows, self._cells, self._waited)])

    def text(self) -> str:
        """Rates of late, in words; nothing after the first batch, which is always waited for."""
        (before, rows, cells, waited), (now, *last) = self._past[0], self._past[-1]
        seconds = now - before
        if self.batches < 2 or seconds <= 0:
            return ""
        said = [f"{_short((last[0] - rows) / seconds)} rows/s"]
        if last[1]:
            tokens, looked = self._seen
            part = tokens / looked if looked else 1.0
            said.append(f"{_short((last[1] - cells) * part / seconds)} tokens/s")
        said.append(f"{min(1.0, (last[2] - waited) / seconds):.0%} waiting for data")
        return ", ".join(said)


def _rows_in(batch: Any, collated: bool) -> int:
    """How many rows a batch has: a list of rows, or one of columns where something has collated them."""
    if isinstance(batch, pa.Table | pa.RecordBatch):
        return int(batch.num_rows)
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), ())
    elif collated and isinstance(batch, list | tuple) and batch and hasattr(batch[0], "shape"):
        batch = batch[0]
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return len(batch) if isinstance(batch, list | tuple) else 1


def _short(number: float) -> str:
    """A number in few digits.

    >>> [_short(n) for n in (3.2, 950, 12_345, 4_567_890, 2e9)]
    ['3.2', '950', '12,345', '4.57 M', '2.00 G']
    """
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"


def training_progress(loader: Loader, total: int | None) -> TrainingProgress:
    """See ``Loader.progress``."""
    if total is not None:
        whole_number(total, 1, "progress(total)", "batches in all")
    session = loader._session
    plan = session.plan
    collated = any(stage.role == "finish" for stage in plan.chain.after)
    meter = _Meter(loader.pipeline._batching() is not None, collated)
    batches = iter(loader)
    rank, world = session.ranks()
    if rank or process_number() or not may_show():
        return TrainingProgress(batches, meter, _Scale(0, None, 0, None), None)
    display = display_for()
    state = batches.state_dict()
    first, epoch, length = state["m"] // world, state["epoch"], None
    if plan.chain.endless:
        if plan.counts.known and plan.counts.batches_in_epoch:
            length = plan.counts.batches_in_epoch / world
    elif total is None and plan.counts.known:
        total = len(loader)
    elif total is None and plan.inputs.epoch_rows is not None:
        # No row is read only to say how many batches there are.
        measured = any(is_measured(stage) for stage in plan.chain.stages)
        total = None if measured else loader.estimate_len()
    job = "epoch" if plan.chain.times in (None, 1) else "pass"
    scale = _Scale(first, total, epoch, length, job)
    return TrainingProgress(batches, meter, scale, display)
