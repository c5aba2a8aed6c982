"""How a process ends that is a worker of a ``DataLoader``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from functools import cache

from torch.utils.data import get_worker_info

__all__ = ["end_in_peace"]

#: Seconds that a worker waits at its end for the thread that sends.
PATIENCE = 0.2
#: The name that ``multiprocessing.Queue`` gives that thread.
SENDER = "QueueFeederThread"


def end_in_peace() -> None:
    """Have this worker end without pulling the interpreter from under the thread that sends its
    batches; in a process that is no worker, nothing.

    torch does not wait for that thread where a loader is left in mid-epoch. A worker that was spawned
    then takes its interpreter down below it; if the thread is just in torch, about to take the
    interpreter's lock again, the C++ runtime gives up ("terminate called without an active exception"),
    and the process that trains hears of a worker killed by signal Aborted. One that was forked ends at
    once, as here one does whose thread is still at work.
    """
    if get_worker_info() is not None:
        _register()


@cache
def _register() -> None:
    atexit.register(_leave)


def _leave() -> None:
    for thread in threading.enumerate():
        if thread.name == SENDER:
            thread.join(PATIENCE)
            if thread.is_alive():
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # closed, or nobody reads it
                        stream.flush()
                os._exit(0)
