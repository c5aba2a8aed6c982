"""Stopped from outside: Ctrl-C, SIGTERM, and a terminal that was closed end the command as an exception does,
so that what it has half written is removed.

Two things lose exceptions. Packages as large as torch, while they are imported, catch them in C, or abort: as
long as the library is not there nothing can be half written, and the process ends at once. And Python drops
those that come in a callback of its own, and says "Exception ignored in": that signal is sent again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "let_signals_stop", "stop_like_ctrl_c"]

#: Exit code after Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
#: Signals that stop the command.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds after which a signal that was lost comes again.
AGAIN = 0.05


@contextmanager
def let_signals_stop() -> Iterator[None]:
    """Let SIGINT raise ``KeyboardInterrupt`` while the block runs, and SIGTERM and SIGHUP ``SystemExit`` with
    128 and their number. One that is ignored, as SIGHUP is under ``nohup``, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, _stop)) for number in numbers]
    hook, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before:
            signal.signal(number, handler)


#: Signals that came while they are to stop the command as Ctrl-C does; None at other times.
_came: list[int] | None = None


@contextmanager
def stop_like_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP raise ``KeyboardInterrupt``, too, while the block runs, so that what handles
    Ctrl-C handles them; gives the list of those that came. One that nothing handled leaves the block as
    ``SystemExit``."""
    global _came
    came: list[int] = []
    _came = came
    try:
        yield came
    except KeyboardInterrupt:
        if came and came[0] != signal.SIGINT:
            raise SystemExit(128 + came[0]) from None
        raise
    finally:
        _came = None


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if not _library_is_there() and _imports(frame):
        if number == signal.SIGINT:
            os.write(2, b"error: stopped\n")
        os._exit(128 + number)
    if _came is not None:
        _came.append(number)
    if number == signal.SIGINT or _came is not None:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _library_is_there() -> bool:
    spec = getattr(sys.modules.get("trainpipes"), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _send_again(lost: Any) -> None:
    number = 0
    if issubclass(lost.exc_type, KeyboardInterrupt):
        number = signal.SIGINT
    elif issubclass(lost.exc_type, SystemExit) and isinstance(lost.exc_value.code, int):
        number = lost.exc_value.code - 128
    if number in SIGNALS:
        main = threading.main_thread().ident
        timer = threading.Timer(AGAIN, signal.pthread_kill, [main, number])
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(lost)
