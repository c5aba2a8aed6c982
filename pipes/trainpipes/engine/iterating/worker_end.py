"""How a process ends that is a worker of a ``DataLoader``."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import connection
from multiprocessing.util import get_temp_dir
from shutil import rmtree
from typing import Any

from torch.utils.data import get_worker_info

#: Seconds that a worker waits at its end for the thread that sends.
PATIENCE = 0.2
#: The name that ``multiprocessing.Queue`` gives that thread.
SENDER = "QueueFeederThread"


def end_in_peace() -> None:
    """Have this worker end with the process that started it, however that ends, and end without pulling
    the interpreter from under the thread that sends its batches; in a process that is no worker, nothing.

    torch's own worker asks every 5 seconds, when it is not at work, whether its parent is there. Then it
    waits until all that it has made is sent: for ever, since nobody reads, and the pipe is not broken as
    long as other workers hold the end to read from.

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
    threading.Thread(target=_end_with_parent, name="trainpipes-parent", daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the process that asked for this one: behind a server that forks, not the server."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:  # what started this worker is not multiprocessing
        return
    # The sentinel is a pipe, which others hold open that the parent has forked, and who may live on.
    watched: list[Any] = [parent.sentinel]
    with suppress(AttributeError, OSError):  # not on Linux, or not allowed
        watched.append(os.pidfd_open(parent.pid))
    connection.wait(watched)
    try:
        # Sockets by which tensors are handed over; of the parent, where that had made the folder.
        rmtree(get_temp_dir(), ignore_errors=True)
    finally:
        os._exit(0)


def _leave() -> None:
    for thread in threading.enumerate():
        if thread.name == SENDER:
            thread.join(PATIENCE)
            if thread.is_alive():
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # closed, or nobody reads it
                        stream.flush()
                os._exit(0)
