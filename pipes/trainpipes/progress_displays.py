"""How far training or another long job is, as a bar: by rich, else by tqdm, else as a line; in a notebook as
HTML; in a log.

A display is given the same from time to time, and does nothing by itself: no thread draws it, so that nothing
is drawn while the training loop has Python's lock. One is on the screen at a time, of one process among all.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

import torch.distributed as dist
from torch.utils.data import get_worker_info

from trainpipes.amount import amount

__all__ = ["Display", "Shown", "display_for", "may_show", "process_number", "take_screen"]

log = logging.getLogger("trainpipes")

#: Seconds between two lines, on a terminal and in a log.
EVERY_SHOWN = 0.2
EVERY_LOGGED = 10.0
#: Values of the environment's TRAINPIPES_PROGRESS that turn all of it off.
OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Shown:
    """What is shown.

    Attributes:
        job: such as "epoch 3".
        done: batches so far, those before a resume included.
        total: batches in all; None where that is not known.
        text: rates, in words.
        unit: what is counted, if not batches.
    """

    job: str
    done: int
    total: int | None
    text: str
    unit: str = "batches"

    @property
    def share(self) -> float | None:
        """How much is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def line(self) -> str:
        """All of it in a line."""
        share = "" if self.share is None else f"{self.share:.0%}, "
        of = "" if self.total is None else f" of {self._many(self.total)}"
        unit = "" if self.unit == "bytes" else f" {self.unit}"
        return f"{self.job}: {share}{self._many(self.done)}{of}{unit}{', ' * bool(self.text)}{self.text}"

    def _many(self, count: int) -> str:
        return amount(count) if self.unit == "bytes" else f"{count:,}"


class Display(Protocol):
    """Something that shows how far a loop is.

    Attributes:
        every: seconds from one time that it is given something to the next.
    """

    every: float

    def show(self, shown: Shown) -> None:
        """Draw it as it is now."""
        ...

    def close(self, shown: Shown) -> None:
        """Draw it as it is at the end, and leave the terminal as it was."""
        ...

    def clear(self) -> None:
        """Take it away, in place of ``close``."""
        ...


_screen = threading.Lock()
_holder: weakref.ref[object] | None = None


def take_screen(owner: object, *, give_back: bool = False) -> bool:
    """Whether this is what is shown now: what was asked for first, and is not yet at its end.

    Args:
        owner: what is to be shown; if it is gone, the next one may be.
        give_back: whether it is at its end.
    """
    global _holder
    if not give_back and not may_show():  # asks for no lock, which a forked worker may find taken
        return False
    with _screen:
        shown = None if _holder is None else _holder()
        if give_back:
            _holder = None if shown is owner else _holder
            return False
        if shown is not None and shown is not owner:
            return False
        _holder = weakref.ref(owner)
        return True


def may_show() -> bool:
    """Whether this process shows anything: rank 0, and no worker of another process."""
    if os.environ.get("TRAINPIPES_PROGRESS", "").lower() in OFF or process_number():
        return False
    ranked = "RANK" in os.environ or (dist.is_available() and dist.is_initialized())
    if get_worker_info() is not None or multiprocessing.current_process().daemon:
        return False  # of a DataLoader, or of ours
    return ranked or multiprocessing.parent_process() is None  # ranks may be started by mp.spawn


def process_number() -> int:
    """The number of this process among all; those that share a data-parallel rank differ in it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def display_for(stream: TextIO | None = None) -> Display:
    """The display for where this process writes to.

    Args:
        stream: a terminal, or something else; stderr if None.
    """
    if (shell := _notebook()) is not None:
        return _Notebook(shell)
    stream = sys.stderr if stream is None else stream
    if not getattr(stream, "isatty", lambda: False)():
        return _Log()
    if find_spec("rich") is not None:
        return _Rich(stream)
    return _Tqdm(stream) if find_spec("tqdm") is not None else _Line(stream)


def _notebook() -> Any:
    """IPython's module for showing things in a notebook; None where this is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython import display

    return display


class _Log:
    """A line in the log ``trainpipes`` now and then, at level INFO: nothing, unless one has asked for it."""

    every = EVERY_LOGGED

    def show(self, shown: Shown) -> None:
        if shown.text:  # not at once
            log.info(shown.line)

    def close(self, shown: Shown) -> None:
        log.info(shown.line)

    def clear(self) -> None:
        """Nothing is there."""


class _Line:
    """A line that is written over."""

    every = EVERY_SHOWN

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0

    def show(self, shown: Shown) -> None:
        line = shown.line
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def close(self, shown: Shown) -> None:
        self.show(shown)
        self._stream.write("\n")
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write("\r" + " " * self._width + "\r")
        self._stream.flush()


class _Tqdm:
    """A bar of tqdm."""

    every = EVERY_SHOWN

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def show(self, shown: Shown) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=shown.job, total=shown.total, initial=shown.done, file=self._stream,
                dynamic_ncols=True, leave=None, unit="B" if shown.unit == "bytes" else f" {shown.unit}",
                unit_scale=shown.unit == "bytes",
            )  # fmt: skip
        bar = self._bar
        bar.n, bar.total = shown.done, shown.total
        bar.set_description_str(shown.job, refresh=False)
        if shown.unit == "batches":  # of others it tells the rate itself
            bar.set_postfix_str(shown.text, refresh=False)
        bar.refresh()

    def close(self, shown: Shown) -> None:
        self.show(shown)
        self._bar.leave = True
        self._bar.close()

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()


class _Rich:
    """A bar of rich: what the loop prints stands above it."""

    #: Seconds; to draw it takes some 3 ms.
    every = 0.5

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._task: Any = None

    def show(self, shown: Shown) -> None:
        if self._bar is None:
            self._start(shown)
        text = shown.line.removeprefix(f"{shown.job}: ")
        self._bar.update(
            self._task, description=shown.job, completed=shown.done, total=shown.total, text=text
        )
        self._bar.refresh()

    def _start(self, shown: Shown) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            *([TimeRemainingColumn(compact=True)] if shown.unit == "batches" else []),
            console=Console(file=self._stream),
            auto_refresh=False,
            # What goes to a file is to go there still.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(shown.job, completed=shown.done, total=shown.total, text="")
        self._bar.start()

    def close(self, shown: Shown) -> None:
        self.show(shown)
        self._bar.stop()

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.live.transient = True
            self._bar.stop()


class _Notebook:
    """A bar below a notebook's cell."""

    every = 0.5

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, shown: Shown) -> None:
        value = "" if shown.share is None else f' value="{shown.share:.4f}"'
        html = self._display.HTML(
            f'<progress{value} style="width:12em"></progress> <code>{escape(shown.line)}</code>'
        )
        if self._handle is None:
            self._handle = self._display.display(html, display_id=True)
        else:
            self._handle.update(html)

    def close(self, shown: Shown) -> None:
        self.show(shown)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update(self._display.HTML(""))
