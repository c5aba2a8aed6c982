"""Workers that answer one call, each fed by a thread of this process: worker processes, or actors of Ray.
They start with the first rows, and end with the pipeline or this process. One that dies is replaced, and its
rows are done again.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from weakref import ref

from trainpipes._internal.activity import doing
from trainpipes._internal.locks import InterruptibleLock, LateThread, Living, get, start_all
from trainpipes._internal.messages import is_worth_a_line
from trainpipes._internal.pool import is_of_pool, waits
from trainpipes.engine.calling import Answer
from trainpipes.engine.processes.channel import Message, pickled, unpickled
from trainpipes.engine.processes.process_worker import Call
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError
from trainpipes.interfaces.quarantine import Failed
from trainpipes.interfaces.watched_calls import NO_ROW, Known, Place

#: Seconds without rows after which the workers end.
IDLE = 60.0
#: Seconds that a task takes or more, if there are rows: handing one over takes about 0.5 ms.
TASK = 5e-3
#: Seconds until a process that should end is killed.
PATIENCE = 5.0
#: Workers that may die at one row before it is taken for the cause.
TRIES = 3

log = logging.getLogger("trainpipes")

#: What is said where no worker can be started; and of what a system has no more, by its errors.
NO_WORKER, NO_MORE = "a worker cannot be started", (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

NO_PICKLE = (pickle.PicklingError, AttributeError, TypeError)


@dataclass(eq=False)
class Task:
    """Rows to call the function for; nobody does once nobody waits for the answer.

    Args:
        message: the rows, their random words, and what is known instead of calling the function.
        deaths: the places at which workers died.
    """

    answer: ref[SimpleQueue[Answer]]
    message: Message
    deaths: list[Place] = field(default_factory=list)


class Worker(Protocol):
    """Where calls are answered: a process, or an actor of Ray. One thread feeds it.

    Attributes:
        is_ready: whether it has been ready for rows.
    """

    is_ready: bool

    def begin(self) -> None:
        """Start it, without waiting for it."""
        ...

    def has_died(self) -> bool:
        """Whether it has died since its last answer."""
        ...

    def ask(self, task: Task) -> tuple[list[Any], BaseException | None, Any]:
        """Results, the error after them, and what the call noticed. Raises Died, or any other error
        that ends the worker.
        """
        ...

    def end(self) -> object:
        """End it."""
        ...

    def hang_up(self) -> None:
        """Have its thread wake up; any thread may call this."""
        ...

    def forget(self) -> None:
        """In a fork of this process: let go of what it shares with it."""
        ...


class _Waiting:
    """A lock for a thread of a pool: who has it may be starting a process, and a fork waits for threads that
    work, not for those that wait.
    """

    def __init__(self, lock: InterruptibleLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with waits():
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class WorkerPool:
    """Workers that answer one call. A fork of ``pid`` can't use them.

    Args:
        worker: makes one by its number, without starting it.
        timeout: seconds that a call for a row may take, at least.
        idle: seconds without rows after which the workers end.
    """

    def __init__(
        self,
        call: Call,
        workers: int,
        worker: Callable[[int], Worker],
        timeout: float | None = None,
        idle: float | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.call = call
        self._count, self._worker = workers, worker
        self.timeout, self._idle = timeout, IDLE if idle is None else idle
        #: close() does without: the garbage collector may call it anywhere.
        self._lock = InterruptibleLock()
        self._feeders: list[_Feeder] = []
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._last_submit = 0.0
        self._deaths = 0
        #: Rows of a task, at least: as the last one took.
        self.least_rows = 1
        self.closed = False
        _pools.add(self)

    def start(self) -> None:
        """Start the missing workers, without waiting for them."""
        with self._locked:
            self._start_missing()

    def submit(self, items: Sequence[Any], words: Any) -> Callable[[], Answer]:
        """Returns a function that waits for the answer; to drop it is to cancel."""
        try:
            message = pickled((items, words, {}))
        except NO_PICKLE as error:
            holder = f"a {type([*self.call.objects(items), None][0]).__name__} "
            raise no_pickle(self.call, "rows", holder, error) from error
        answer: SimpleQueue[Answer] = SimpleQueue()
        with self._locked:
            self._start_missing()
            self._last_submit = time.monotonic()
            self._tasks.put(Task(ref(answer), message))
        if self.closed:  # meanwhile
            self._answer_waiting(([], self.gone()))

        def wait() -> Answer:
            if self.is_elsewhere:
                return [], self.gone()
            with waits():
                return get(answer)

        return wait

    @property
    def _locked(self) -> AbstractContextManager[Any]:
        """The lock, in any thread; Ctrl-C, which comes to none of a pool, does not leave it locked."""
        return _Waiting(self._lock) if is_of_pool() else self._lock

    def _start_missing(self) -> None:
        """The lock is held."""
        if self.closed or self.is_elsewhere:
            raise self.gone()
        while len(self._feeders) < self._count:
            numbers = {feeder.number for feeder in self._feeders}
            number = next(n for n in range(self._count) if n not in numbers)
            try:
                self._start_one(number)
            except OSError as error:
                raise self.short(NO_WORKER, error) from error

    def _start_one(self, number: int) -> None:
        feeder = _Feeder(self, number, self._worker(number))
        to_start, has_begun = deque[LateThread]([feeder]), False
        try:
            self._feeders.append(feeder)  # first: a fork closes the connections of those here
            feeder.worker.begin()
            has_begun = True
            start_all(to_start)
        except BaseException as error:
            if has_begun and not isinstance(error, RuntimeError):
                start_all(to_start)  # Ctrl-C may have come before that
            else:  # there is no thread for it
                with suppress(ValueError):  # or it came before all else
                    self._feeders.remove(feeder)
                feeder.worker.end()
            raise

    def short(self, what: str, error: Exception) -> TrainpipesError:
        text = (
            f"{what} ({type(error).__name__}: {error}); ask for fewer workers, or raise what limits them: "
            "memory, processes, open files (ulimit -a) or /dev/shm"
        )
        return of_no_row(WorkerError, self.call.said, text)

    def next_task(self, feeder: _Feeder) -> Task | None:
        while not self.closed:
            try:
                task = self._tasks.get(timeout=self._idle)
                if task is not None:
                    return task
            except Empty:
                with self._lock:
                    if self._tasks.empty() and time.monotonic() - self._last_submit >= self._idle:
                        self._feeders.remove(feeder)  # so that new rows start another
                        return None
        self._answer_waiting(([], self.gone()))
        self._tasks.put(None)  # wakes the next one
        return None

    def lost(self, feeder: _Feeder, error: BaseException, task: Task | None = None) -> None:
        """A worker has died: give ``task`` to another, or ``error`` to all if none is left."""
        with self._lock:
            self._feeders.remove(feeder)
            if task is not None:
                self._tasks.put(task)
                try:
                    self._start_missing()
                except Exception as problem:  # whoever waits for the task is to get it
                    ours = isinstance(problem, TrainpipesError)
                    error = problem if ours else self.short(NO_WORKER, problem)
            if not self._feeders:
                self._answer_waiting(([], error))

    def does_again(self, task: Task, death: Died) -> bool:
        """Whether another worker is to have a task whose worker died at a row: unless the row is taken for
        the cause and may not be left out.
        """
        if self.closed:
            return False
        task.deaths.append(death.place)
        with self._lock:
            self._deaths = count = self._deaths + 1
        is_again = self._is_for_another(task, death)
        if is_again and is_worth_a_line(count):
            log.warning(
                "%s: %s%s; its rows are done again by another one (%s such so far)",
                self.call.said, str(death), self.call.where(death.place), f"{count:,}",
            )  # fmt: skip
        return is_again

    def _is_for_another(self, task: Task, death: Died) -> bool:
        place = death.place
        deaths = task.deaths.count(place)
        # At two deaths in the same rows its stage gets the halves of these, and of each half at the first.
        twice = any(p.rows > 1 and task.deaths.count(p) > 1 for p in task.deaths if p.row != NO_ROW)
        if place.rows > 1 and place.row != NO_ROW and twice:
            self._tell(task, place, Known.HALVES)
            return True
        if deaths < death.tries:
            return True
        if place.row == NO_ROW or deaths > death.tries or not self.call.leaves_out(place.stage):
            return False
        why = f"{death.tries} workers died one after the other as they called the function for it: {death}"
        self._tell(task, place, Failed(why))
        return True

    def _tell(self, task: Task, place: Place, known: Failed | Known) -> None:
        """Have the next worker know of a place."""
        items, words, failed = unpickled(task.message)
        failed[place] = known
        task.message = pickled((items, words, failed))

    def _answer_waiting(self, reply: Answer) -> None:
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                answer = None if task is None else task.answer()
                if answer is not None:
                    answer.put(reply)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that has the workers."""
        return self.pid != os.getpid()

    def gone(self) -> TrainpipesError:
        text = "its workers were ended"
        if self.is_elsewhere:
            text = "this process is a fork of the one that has its workers; begin another iterator here"
        return of_no_row(WorkerError, self.call.said, text)

    def close(self) -> None:
        self.closed = True
        for feeder in list(self._feeders):
            feeder.worker.hang_up()
        self._tasks.put(None)

    def join(self) -> None:
        for feeder in list(self._feeders):
            if feeder.is_alive():
                feeder.join(3 * PATIENCE)

    def forget(self) -> None:
        """In a fork: close its copies of the connections, which would hide the parent's end."""
        self._lock = InterruptibleLock()  # a thread that stayed behind may hold it
        for feeder in self._feeders:
            feeder.worker.forget()


class _Feeder(LateThread):
    """The thread that gives one worker its rows."""

    def __init__(self, owner: WorkerPool, number: int, worker: Worker) -> None:
        super().__init__(name="trainpipes-map", daemon=True)
        self._owner = owner
        self.number, self.worker = number, worker

    def run(self) -> None:
        owner, call = self._owner, self._owner.call
        while (task := owner.next_task(self)) is not None:
            answer = task.answer()
            if answer is None:  # nobody waits for it any more
                continue
            died = of_no_row(WorkerError, call.said, "its workers have died")
            reply: Answer | None = None  # None: another worker is to do the task
            gone = True
            try:
                if not self.worker.has_died():
                    reply, gone = self._reply(task)
            except BaseException as error:
                reply = [], error
                if isinstance(error, OSError) and error.errno in NO_MORE:
                    died = owner.short("an answer cannot be taken", error)
                    reply = [], died
            if gone:
                with suppress(Exception):
                    self.worker.end()
                if reply is None:
                    owner.lost(self, died, task)
                    break
                owner.lost(self, died if self.worker.is_ready else reply[1] or died)
            assert reply is not None
            answer.put(([], owner.gone()) if owner.closed else reply)
            if gone:
                break
            del answer, reply, task
        self.worker.end()

    def _reply(self, task: Task) -> tuple[Answer | None, bool]:
        """The answer, or None if another worker is to do the task; and whether this one is gone."""
        owner, call = self._owner, self._owner.call
        try:
            with doing(call.while_waiting):
                return self._ask(task), False
        except Died as death:
            if owner.does_again(task, death):
                return None, True
            if death.unready:
                return ([], death.unready), True
            return call.died_at(self._died_at(death), str(death), death.place), True

    def _ask(self, task: Task) -> Answer:
        began = time.perf_counter()
        results, error, noticed = self.worker.ask(task)
        took = time.perf_counter() - began
        self._owner.call.hear(noticed)
        if results:
            self._owner.least_rows = int(TASK * len(results) / took)
        return results, error

    def _died_at(self, death: Died) -> TrainpipesError:
        said = self._owner.call.said
        which = "third" if death.tries == TRIES else "second"
        way = "num_workers=0 shows what it does there"
        if death.place.row == NO_ROW:
            text = f"{death} while it was called, the {which} one for the same rows; {way}"
        else:
            text = f"{death} while the function was called for a row, the {which} one at this row; {way}"
            text += ', on_error="skip" leaves such rows out'
        return WorkerError(f"{said}: {text}", stage=said)


class Died(Exception):
    """A worker died, at a row of a stage, which is the cause after so many tries; before that, ``unready``
    says why it was never ready.
    """

    def __init__(
        self,
        how: str,
        place: Place,
        tries: int = TRIES,
        unready: TrainpipesError | None = None,
    ) -> None:
        super().__init__(how)
        self.place, self.tries, self.unready = place, tries, unready


def of_no_row(kind: type[TrainpipesError], said: str, text: str) -> TrainpipesError:
    error = kind(f"{said}: {text}", stage=said)
    error._trainpipes = said, None
    return error


def no_pickle(call: Call, subject: str, holder: str, error: Exception) -> ConfigError:
    way_out = "define it at the top of a module, or " if not holder else ""
    return ConfigError(
        f"{call.said}: {subject} must pickle to reach a worker process, and {holder}does not ({error}); "
        f"{way_out}{call.without}",
        stage=call.said,
    )


_pools: Living[WorkerPool] = Living()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool.forget()


@atexit.register
def end_all() -> None:
    """End the workers of all pools, at the end of this process."""
    for end in (WorkerPool.close, WorkerPool.join):
        for pool in list(_pools):
            end(pool)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
