"""A bar that says how far a long job is, and nothing for a short one.

It is shown as ``loader.progress()`` is: by rich, else by tqdm, else as a line, in a notebook below the cell;
and is gone when the job ends. Where stderr is no terminal a line goes to the logger ``trainpipes`` at level
INFO now and then, for those who have asked for it. Other ranks than 0 and worker processes show nothing, nor
does any process with ``TRAINPIPES_PROGRESS=0`` in its environment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TextIO, TypeVar

from trainpipes.amount import amount
from trainpipes.progress_displays import Display, Shown, display_for, take_screen

__all__ = ["JobReport", "Progress", "counted"]

T = TypeVar("T")

#: Seconds after which a job counts as long.
PATIENCE = 1.0


class Progress:
    """Counts how much of a job is done. Threads may share one; an ``advance`` costs less than 1 µs.

    Nothing draws by itself: it is drawn in the thread that advances, after a second and then a few times a
    second, and the other threads do not wait for that. Of two jobs at a time the first one is shown.

    Args:
        job: what is done, as in "reading footers".
        total: how many there are; None where nobody knows.
        unit: of what, in the plural; "bytes" are told in MB.
        stream: where to show it; stderr if None.

    >>> with Progress("reading footers", total=3, unit="files") as progress:
    ...     for _ in range(3):
    ...         progress.advance()
    """

    def __init__(
        self, job: str, total: int | None, unit: str, stream: TextIO | None = None
    ) -> None:
        self._job = job
        self._total = total or None
        self._unit = unit
        self._stream = stream
        self._display: Display | None = None
        self._quiet = False
        self._counting, self._drawing = threading.Lock(), threading.Lock()
        self._done = self._before = 0
        self._started = time.monotonic()
        self._next = self._started + PATIENCE

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._drawing:
            self._quiet = True
            if self._display is not None:
                self._display.clear()
                take_screen(self, give_back=True)

    def advance(self, count: int = 1) -> None:
        """``count`` more are done."""
        with self._counting:
            self._done += count
        now = time.monotonic()
        if now >= self._next and not self._quiet and self._drawing.acquire(blocking=False):
            try:
                self._draw(now)
            finally:
                self._drawing.release()

    def skip(self, count: int) -> None:
        """``count`` were done before: they do not count for the rate."""
        self._done += count
        self._before += count

    def _draw(self, now: float) -> None:
        if self._quiet:
            return
        if self._display is None:
            self._quiet = not take_screen(self)
            if self._quiet:
                return
            self._display = display_for(self._stream)
        self._display.show(self._shown(now - self._started))
        self._next = time.monotonic() + self._display.every

    def _shown(self, seconds: float) -> Shown:
        done = self._done
        rate = (done - self._before) / max(seconds, 1e-9)
        text = f"{amount(round(rate)) if self._unit == 'bytes' else f'{rate:,.0f}'}/s"
        if self._total and rate:
            text += f", {max(0.0, self._total - done) / rate:.0f} s left"
        return Shown(self._job, done, self._total, text, self._unit)


class JobReport:
    """Shows one job after the other: what a function is given that takes ``progress=``.

    Args:
        name: of what all of them are about.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._job = ""
        self._progress: Progress | None = None
        self._done = 0

    def __call__(self, job: str, done: int, total: int | None) -> None:
        if job != self._job:
            self.close()
            self._job, self._done = job, done
            self._progress = Progress(f"{job} {self._name}", total, "rows").__enter__()
            self._progress.skip(done)
        assert self._progress is not None
        self._progress.advance(done - self._done)
        self._done = done

    def close(self) -> None:
        """Take away what is shown."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)


def counted(
    items: Iterable[T], job: str, total: int | None, unit: str, size: int | None = 1
) -> Iterator[T]:
    """The items, with progress.

    Args:
        items: what is gone through.
        job: what is done, as in "measuring padding".
        total: how many there are in all; None where nobody knows.
        unit: of what, in the plural.
        size: how many one item counts; None for its length.
    """
    with Progress(job, total, unit) as progress:
        for item in items:
            yield item
            progress.advance(len(item) if size is None else size)  # type: ignore[arg-type]
