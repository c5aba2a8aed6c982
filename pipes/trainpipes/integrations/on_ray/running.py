"""Tasks that run on a Ray cluster: how many may, how far they are, and how they are ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainpipes.integrations.on_ray.messages import Job, Rows, StopFlag, Tell, flag_of

__all__ = ["TICK", "MostInFlight", "RowCounts", "end_tasks"]

#: Tasks in flight for each that the cluster has room for: more than one, so that a worker need not wait for
#: the driver, and an autoscaler sees that more nodes are wanted.
IN_FLIGHT = 2
#: Tasks in flight at least: a cluster may have no nodes for work before there is some.
LEAST_IN_FLIGHT = 8
#: Seconds between two looks at how far the tasks are.
TICK = 0.5
#: Seconds that tasks which are asked to end are waited for before they are cancelled, and then before their
#: processes are killed.
PATIENCE = 5.0


class MostInFlight:
    """How many tasks may be in flight; asks the cluster now and then, which may grow.

    Args:
        cluster_cpus: gives the cores of the cluster.
        cpus: of a task.
    """

    def __init__(self, cluster_cpus: Callable[[], int], cpus: float) -> None:
        self._cluster_cpus, self._each = cluster_cpus, cpus
        self._most, self._next = 0, 0.0

    def __call__(self) -> int:
        now = time.monotonic()
        if now >= self._next:
            room = int(self._cluster_cpus() / self._each)
            self._most = max(LEAST_IN_FLIGHT, IN_FLIGHT * room)
            self._next = now + 10 * TICK
        return self._most


class RowCounts:
    """Rows that running tasks have done, as the actor knows them, and those of tasks that have ended."""

    def __init__(self, tell: Tell) -> None:
        import ray

        self._tell = tell
        self.actor = ray.remote(num_cpus=0)(Rows).remote()
        self._told: dict[int, int] = {}  # of tasks that run
        self._ended: set[int] = set()
        self._asked: Any = None

    def look(self) -> None:
        """Tell what has come since, without waiting."""
        import ray

        with suppress(ray.exceptions.RayError):  # the actor's node is gone: rows count as tasks end
            if self._asked is None:
                self._asked = self.actor.get.remote(list(self._ended))
            elif ray.wait([self._asked], timeout=0)[0]:
                asked, self._asked = self._asked, None
                found = ray.get(asked)
                for number in found.keys() - self._ended:
                    self._set(number, found[number])

    def close(self) -> None:
        """End the actor, whose process else stays as long as a worker keeps the job."""
        import ray

        if ray.is_initialized():
            with suppress(Exception):
                ray.kill(self.actor)

    def end(self, number: int, rows: int) -> None:
        """A task has ended."""
        self._set(number, rows)
        del self._told[number]
        self._ended.add(number)

    def _set(self, number: int, rows: int) -> None:
        before = self._told.get(number, 0)
        self._told[number] = rows
        if rows != before:
            self._tell(rows - before)


def end_tasks(job: Job, references: list[Any]) -> None:
    """End the tasks of a job, and wait until they have ended.

    They are asked to, and only those that go on are cancelled: Ray may abort this process where a task is
    cancelled at the moment that it ends (2.60: "Tried to complete task that was not pending").
    """
    import ray

    if not references or not ray.is_initialized():
        return
    flag = None
    with suppress(Exception):
        flag = ray.remote(num_cpus=0)(StopFlag).options(name=flag_of(job)).remote()
    _, references = ray.wait(
        references, num_returns=len(references), timeout=job.every + PATIENCE if flag else 0
    )
    for force in (False, True):
        if not references:
            break
        for reference in references:
            with suppress(Exception):
                ray.cancel(reference, force=force)
        _, references = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    if flag is not None:
        with suppress(Exception):
            ray.kill(flag)
