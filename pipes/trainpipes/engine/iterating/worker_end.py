from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling

from trainpipes._internal.locks import start
from trainpipes.engine.iterating.worker_message import WorkerMemory
from trainpipes.errors import WorkerError, how_ended

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


#: Seconds after an error to see that a worker has died.
PATIENCE = 1.0
#: Seconds that a function may run on in a worker that should end.
GRACE = 0.5


class WorkerDeath(Exception):
    """A worker process has died.

    Args:
        said: which one, how, and at which batch.
        way: what to do if workers die there again and again.
        at_start: whether it ended by itself before it made a batch, as all others would.
    """

    def __init__(self, said: str, way: str, at_start: bool) -> None:
        super().__init__(said)
        self.said, self.way, self.at_start = said, way, at_start

    def error(self) -> WorkerError:
        return WorkerError(f"{self.said}; {self.way}")


class WorkerWatch:
    """A thread that ends all workers where one dies: that one may hold a lock that they share."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._pid = os.getpid()
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
        batches._worker_result_queue._writer.close()
        self._workers: list[BaseProcess] = list(batches._workers)
        self._died: list[int] = []
        self._thread = threading.Thread(
            target=_watch, args=(self._workers, self._died), name="trainpipes-watch", daemon=True
        )
        start(self._thread)

    @property
    def is_well(self) -> bool:
        return not connection.wait([worker.sentinel for worker in self._workers], 0)

    def death(self, memory: WorkerMemory, num_shards: int) -> WorkerDeath | None:
        """The worker that has died, if one has."""
        ended_one = connection.wait([worker.sentinel for worker in self._workers], PATIENCE)
        if ended_one and self._thread.ident is not None:  # it was started
            self._thread.join(PATIENCE)
        # One that says that all is well, in the middle of it, is not in the thread's list.
        ended = (n for n, worker in enumerate(self._workers) if not worker.is_alive())
        worker = next(iter((*self._died, *ended)), None)
        if worker is None:
            return None
        m = memory.made_by(worker)
        at = (
            "between two batches, or before its first one"
            if m is None
            else f"while it made batch {m} of shard {m % num_shards}"
        )
        process = self._workers[worker]
        again = "loader.load_state_dict(loader.state_dict()) goes on after the last batch that came"
        said = f"worker {worker} of the Loader (process {process.pid}) {how_ended(process.exitcode)} {at}"
        way = f"{again}, with fewer workers if memory ran out; num_workers=0 shows what a function does there"
        if process.exitcode == -signal.SIGBUS:  # num_workers=0 would end the trainer
            way = (
                "look at df /dev/shm, and give it more room (docker run --shm-size=8g) or make smaller "
                "batches; write a new file and rename it, in place of cutting one that is read, and keep it "
                f"on a disk of the machine; then {again}"
            )
        return WorkerDeath(said, way, m is None and (process.exitcode or 0) > 0)

    def end(self) -> None:
        batches, workers = self._batches, self._workers
        ended, batches._shutdown = batches._shutdown, True
        if ended or self._pid != os.getpid():  # a fork: the workers are its parent's
            return
        try:
            if not self._died:  # a dead worker may hold the event's lock
                batches._workers_done_event.set()
                for queue in batches._index_queues:
                    queue.put(None)
                until = time.monotonic() + GRACE
                for worker in workers:
                    worker.join(max(0.0, until - time.monotonic()))
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()


def _watch(workers: Sequence[BaseProcess], died: list[int]) -> None:
    alive = dict(enumerate(workers))
    while alive and not died:
        ended = connection.wait([worker.sentinel for worker in alive.values()])
        for n, worker in list(alive.items()):
            if worker.sentinel in ended:
                worker.join()
                del alive[n]
                if worker.exitcode:
                    died.append(n)
    for worker in alive.values():
        worker.kill()
