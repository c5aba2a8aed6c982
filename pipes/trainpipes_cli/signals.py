"""Stopped from outside: Ctrl-C, SIGTERM, and a terminal that was closed end the command as an exception does,
so that what it has half written is removed.

Python drops an exception that comes in a callback of its own, of which importing a package as large as torch
has many, and says "Exception ignored in". A signal that is lost like that is sent again.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "let_signals_stop"]

#: Exit code after Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
#: Seconds after which a signal that was lost comes again.
AGAIN = 0.05


@contextmanager
def let_signals_stop() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit`` while the block runs, with 128 and their number. One that
    is ignored, as SIGHUP is under ``nohup``, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = [(number, signal.signal(number, _stop)) for number in numbers]
    hook, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before:
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _send_again(lost: Any) -> None:
    number = 0
    if issubclass(lost.exc_type, KeyboardInterrupt):
        number = signal.SIGINT
    elif issubclass(lost.exc_type, SystemExit) and isinstance(lost.exc_value.code, int):
        number = lost.exc_value.code - 128
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        main = threading.main_thread().ident
        timer = threading.Timer(AGAIN, signal.pthread_kill, [main, number])
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(lost)
