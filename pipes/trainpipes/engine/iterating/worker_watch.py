"""Notices at once that a worker process of a ``Loader`` has died, and says how."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data._utils import signal_handling

from trainpipes._internal.text import how_ended
from trainpipes.engine.iterating.worker_message import WorkerMemory
from trainpipes.errors import WorkerError

#: Seconds after an error in which a worker is seen to have died.
PATIENCE = 1.0
#: Seconds that a function may go on in a worker that is to end.
GRACE = 0.5


class WorkerWatch:
    """A thread that waits for the end of workers. Where one dies it ends the others: a lock that they share
    may be held for ever, and a message half sent. Then nobody is left who could send, and who waits for a
    message is told so.

    torch would ask every 5 seconds, or raise from a signal's handler, wherever the program just is.

    Args:
        batches: torch's iterator over the messages of workers.
    """

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
        self._thread.start()

    @property
    def is_well(self) -> bool:
        """Whether no worker has ended."""
        return not connection.wait([worker.sentinel for worker in self._workers], 0)

    def error(self, memory: WorkerMemory, num_shards: int) -> WorkerError | None:
        """After an error: what to raise in its place, because a worker has died.

        Args:
            memory: that the workers share with this process.
            num_shards: of the pipeline.
        """
        if connection.wait([worker.sentinel for worker in self._workers], PATIENCE):
            self._thread.join(PATIENCE)
        # One that says that all is well, in the middle of it, is not in the thread's list.
        ended = (n for n, worker in enumerate(self._workers) if not worker.is_alive())
        worker = next(iter((*self._died, *ended)), None)
        if worker is None:
            return None
        m = memory.made_by(worker)
        at = (
            "before its first batch"
            if m is None
            else f"while it made batch {m} of shard {m % num_shards}"
        )
        process = self._workers[worker]
        return WorkerError(
            f"worker {worker} of the Loader (process {process.pid}) {how_ended(process.exitcode)} {at}; "
            "loader.load_state_dict(loader.state_dict()) goes on after the last batch that came, with fewer "
            "workers if memory ran out; num_workers=0 shows what a function does there"
        )

    def end(self) -> None:
        """Have the workers end; kill those that are still there after a moment."""
        batches, workers = self._batches, self._workers
        ended, batches._shutdown = batches._shutdown, True
        if (
            ended or self._pid != os.getpid()
        ):  # they are those of the process that has forked this one
            return
        try:
            if not self._died:  # who has died may hold the event's lock
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
