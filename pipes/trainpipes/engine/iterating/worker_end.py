"""How a worker of a plain ``DataLoader`` ends: with the process that started it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import connection
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes._internal.locks import start

#: Seconds that a worker's end waits for its sending thread.
SENDING = 0.2
#: The name that ``multiprocessing.Queue`` gives that thread.
SENDER = "QueueFeederThread"


def end_in_peace() -> None:
    """In a worker: end with the process that started it, but not before the thread that sends
    batches.

    torch's own worker, when its parent is gone, waits forever until its batches are sent. And where a
    loader is left in mid-epoch, a spawned worker ends before its sending thread, and the C++ runtime
    aborts ("terminate called without an active exception").

    A worker leaves the group of processes it was started in: torchrun sends SIGTERM to the whole group of
    a rank, which may want to finish its step.
    """
    if get_worker_info() is not None:
        _register()


@cache
def _register() -> None:
    with suppress(PermissionError):  # it leads a session, and so a group
        os.setpgid(0, 0)
    atexit.register(_leave)
    start(threading.Thread(target=_end_with_parent, name="trainpipes-parent", daemon=True))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:  # not started by multiprocessing
        return
    # The sentinel is a pipe, which other children of the parent may hold open.
    watched: list[Any] = [parent.sentinel]
    with suppress(AttributeError, OSError):  # not on Linux, or not allowed
        watched.append(os.pidfd_open(parent.pid))
    connection.wait(watched)
    os._exit(0)


def _leave() -> None:
    for thread in threading.enumerate():
        if thread.name == SENDER:
            thread.join(SENDING)
            if thread.is_alive():
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # closed, or nobody reads it
                        stream.flush()
                os._exit(0)
