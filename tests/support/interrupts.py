"""Ctrl-C at each place of a call where Python looks for signals, and a second one thereafter.

CPython runs handlers after calls, at the start of functions and where loops go back. Other threads are not
interrupted, as signals reach the main one only.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trainpipes

#: Of a file: where it is looked at, beside the library.
STANDARD = ("/concurrent/futures/", "/threading.py", "/queue.py", "/contextlib.py")
OURS = str(Path(trainpipes.__file__).parent)
#: A function, by its file and name, and where in it.
Place = tuple[str, str, int]
#: Instructions after which handlers run.
AFTER = ("CALL", "RESUME", "JUMP_BACKWARD")
#: Seconds until a call hangs.
PATIENCE = 60.0


class Hangs(BaseException):
    """A call has not ended in time."""


@cache
def opcodes(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


@cache
def _is_looked_at(code: CodeType, rooms: tuple[str, ...]) -> bool:
    name = code.co_filename
    return name.startswith(tuple(f"{OURS}/{room}" for room in rooms)) or any(
        part in name for part in STANDARD
    )


def _is_of_ours(frame: FrameType | None, rooms: tuple[str, ...]) -> bool:
    """Whether a frame is looked at, and not one of pytest's hooks, which keep what is raised there."""
    while frame is not None and any(part in frame.f_code.co_filename for part in STANDARD):
        frame = frame.f_back
    return frame is not None and _is_looked_at(frame.f_code, rooms)


def _trace(
    look: Callable[[Place], None], rooms: tuple[str, ...], only: str | None
) -> Callable[..., Any]:
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_qualname != (only or code.co_qualname) or not _is_looked_at(code, rooms):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = before.get(frame)
            before[frame] = frame.f_lasti
            if last is not None and opcodes(code).get(last, "").startswith(AFTER):
                look((code.co_filename, code.co_qualname, frame.f_lasti))
        elif event == "return":
            before.pop(frame, None)
        return trace

    return trace


@contextmanager
def watched(
    look: Callable[[Place], None],
    rooms: tuple[str, ...],
    again: int | None = None,
    only: str | None = None,
) -> Iterator[None]:
    """Look at each place within, or in functions of one name only, until that raises; ``again``: so many
    calls later, raise once more."""
    left = 0 if again is None else again
    raised = False

    def first(place: Place) -> None:
        nonlocal raised
        try:
            look(place)
        except BaseException:
            raised = True
            raise

    def second(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if raised and event in ("call", "c_return") and _is_of_ours(frame, rooms):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks in settrace only
    if again is not None:
        sys.setprofile(second)
    sys.settrace(_trace(first, rooms, only))
    try:
        yield
    finally:
        sys.settrace(None)
        sys.setprofile(None)


@contextmanager
def ends_in_time(seconds: float = PATIENCE) -> Iterator[None]:
    """Raise ``Hangs`` in a call that waits for ever; pytest's own timeout would end all tests."""

    def hang(*_: Any) -> None:
        raise Hangs

    before, main = signal.signal(signal.SIGUSR1, hang), threading.main_thread().ident
    timer = threading.Timer(seconds, signal.pthread_kill, [main, signal.SIGUSR1])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def places_of(work: Callable[[], Any], rooms: tuple[str, ...] = ("",)) -> list[Place]:
    """Each place that a call passes, in the order of the first times."""
    passed: dict[Place, None] = {}
    with watched(lambda place: passed.setdefault(place), rooms):
        work()
    return list(passed)


def is_interrupted(
    work: Callable[[], Any],
    at: Place,
    rooms: tuple[str, ...] = ("",),
    error: type[BaseException] = KeyboardInterrupt,
    again: int | None = None,
) -> bool:
    """Call it, interrupted the first time that it passes a place; whether it was, and said nothing else.
    What is raised as a generator closes, Python only reports.
    """
    came = False

    def interrupt(place: Place) -> None:
        nonlocal came
        if place == at:
            came = True
            raise error

    with (
        ends_in_time(),
        suppress(error, KeyboardInterrupt),
        watched(interrupt, rooms, again, at[1]),
    ):
        work()
    return came
