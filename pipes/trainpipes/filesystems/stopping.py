"""Tasks that end because another one failed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class TaskStopped(BaseException):
    """Raised in a task that is to end because another one failed."""


_here = threading.local()


def check_stop() -> None:
    """Raise ``TaskStopped`` in a task that is to end."""
    check = getattr(_here, "check", None)
    if check is not None:
        check()


def set_stop_check(check: Callable[[], None] | None) -> None:
    _here.check = check
