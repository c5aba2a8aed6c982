"""Worker processes for ``map(method="process")`` and ``Loader(num_workers=)``, each fed by a thread of the
parent. They start with the first rows, and end with the pipeline or their parent; those of ``map`` after an
idle minute, too. One that dies is replaced, and its rows are done again.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ref

from trainpipes._internal.activity import doing
from trainpipes._internal.locks import Living, get, start
from trainpipes._internal.messages import is_worth_a_line
from trainpipes._internal.pool import waits
from trainpipes.engine.calling.row_call import Answer
from trainpipes.engine.processes.process_worker import (
    Call,
    Message,
    pickled,
    receive,
    send,
    unpickled,
    work,
)
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError, how_ended
from trainpipes.interfaces.at_work import NO_ROW
from trainpipes.interfaces.quarantine import Failed

#: Seconds without rows after which the processes end.
IDLE = 60.0
#: Seconds that a task takes or more, if there are rows: handing one over takes about 0.5 ms.
TASK = 5e-3
#: Seconds until a process that should end is killed.
PATIENCE = 5.0

#: The process that imported this; its fork server does not serve its forks.
HOME = os.getpid()

#: Workers that may die at one row before it is taken for the cause.
TRIES = 3

log = logging.getLogger("trainpipes")

NO_PICKLE = (pickle.PicklingError, AttributeError, TypeError)


@dataclass(eq=False)
class Task:
    """Rows to call the function for; nobody does once nobody waits for the answer.

    Args:
        message: the rows, their random words, and what is known instead of calling the function.
        deaths: the rows and stages at which workers died.
    """

    answer: ref[SimpleQueue[Answer]]
    message: Message
    deaths: list[tuple[int, int]] = field(default_factory=list)


class ProcessPool:
    """Worker processes that answer one call. A fork of ``pid`` can't use them."""

    def __init__(
        self,
        call: Call,
        workers: int,
        method: Any = None,
        timeout: float | None = None,
        idle: float | None = None,
    ) -> None:
        self.pid = os.getpid()
        self._call = call
        self._count = workers
        self.timeout, self._idle = timeout, IDLE if idle is None else idle
        if method is None:  # not fork, which copies locks of other threads
            there = "forkserver" in multiprocessing.get_all_start_methods()
            method = "forkserver" if there and self.pid == HOME else "spawn"
        self._context: Any = method
        if isinstance(method, str):
            self._context = multiprocessing.get_context(method)
        forks = self._context.get_start_method() == "fork"
        self._payload: Call | bytes | None = call if forks else None
        #: close() does without: the garbage collector may call it anywhere.
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._last_submit = 0.0
        self._deaths = 0
        #: Rows of a task, at least: as the last one took.
        self.least_rows = 1
        self.closed = False
        _pools.add(self)

    def start(self) -> None:
        """Start the missing processes, without waiting for them."""
        with self._lock:
            self._start_missing()

    def submit(self, items: Sequence[Any], words: Any) -> Callable[[], Answer]:
        """Returns a function that waits for the answer; to drop it is to cancel."""
        try:
            message = pickled((items, words, {}))
        except NO_PICKLE as error:
            holder = f"a {type([*self._call.objects(items), None][0]).__name__} "
            raise _no_pickle(self._call.said, "rows", holder, error) from error
        answer: SimpleQueue[Answer] = SimpleQueue()
        with self._lock:
            self._start_missing()
            self._last_submit = time.monotonic()
            self._tasks.put(Task(ref(answer), message))
        if self.closed:  # meanwhile
            self._answer_waiting(([], self.gone()))

        def wait() -> Answer:
            with waits():
                return get(answer)

        return wait

    def _start_missing(self) -> None:
        """The lock is held."""
        if self.closed:
            raise self.gone()
        if self._payload is None:
            try:
                self._payload = bytes(ForkingPickler.dumps(self._call))
            except NO_PICKLE as error:
                raise _no_pickle(self._call.said, "the function", "", error) from error
        while len(self._workers) < self._count:
            numbers = {worker.number for worker in self._workers}
            number = next(n for n in range(self._count) if n not in numbers)
            worker = _Worker(self, number, self._call, self._context, self._payload)
            self._workers.append(worker)  # first: a fork closes the connections of those here
            try:
                worker.start_process()
            except BaseException:
                self._workers.remove(worker)
                raise
            start(worker)

    def next_task(self, worker: _Worker) -> Task | None:
        while not self.closed:
            try:
                task = self._tasks.get(timeout=self._idle)
                if task is not None:
                    return task
            except Empty:
                with self._lock:
                    if self._tasks.empty() and time.monotonic() - self._last_submit >= self._idle:
                        self._workers.remove(worker)  # so that new rows start another
                        return None
        self._answer_waiting(([], self.gone()))
        self._tasks.put(None)  # wakes the next worker
        return None

    def lost(self, worker: _Worker, error: BaseException, task: Task | None = None) -> None:
        """A worker's process has died: give ``task`` to another, or ``error`` to all if none is left."""
        with self._lock:
            self._workers.remove(worker)
            if task is not None:
                self._tasks.put(task)
                try:
                    self._start_missing()
                except TrainpipesError as problem:
                    error = problem
            if not self._workers:
                self._answer_waiting(([], error))

    def does_again(self, task: Task, death: _Died) -> bool:
        """Whether another worker is to have a task whose worker died at a row: unless the row is taken for
        the cause and may not be left out.
        """
        if self.closed:
            return False
        place = death.place
        task.deaths.append(place)
        with self._lock:
            self._deaths = count = self._deaths + 1
        if is_worth_a_line(count):
            log.warning(
                "%s: %s%s; its rows are done again by another one (%s such so far)",
                self._call.said, str(death), self._call.where(*place), f"{count:,}",
            )  # fmt: skip
        if task.deaths.count(place) < death.tries:
            return True
        if place[0] == NO_ROW or not self._call.leaves_out(place[1]):
            return False
        items, words, failed = unpickled(task.message)
        failed[place] = Failed(
            f"{death.tries} workers died one after the other as they called the function for it: {death}"
        )
        task.message = pickled((items, words, failed))
        return True

    def _answer_waiting(self, reply: Answer) -> None:
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                answer = None if task is None else task.answer()
                if answer is not None:
                    answer.put(reply)

    def gone(self) -> TrainpipesError:
        return _of_no_row(WorkerError, self._call.said, "its worker processes were ended")

    def close(self) -> None:
        self.closed = True
        for worker in list(self._workers):
            worker.hang_up()
        self._tasks.put(None)

    def join(self) -> None:
        for worker in list(self._workers):
            if worker.is_alive():
                worker.join(3 * PATIENCE)

    def forget(self) -> None:
        """In a fork: close its copies of the connections, which would hide the parent's end."""
        for worker in self._workers:
            worker.connection.close()


class _Worker(threading.Thread):
    """One worker process and the thread that gives it rows."""

    def __init__(
        self, owner: ProcessPool, number: int, call: Call, context: Any, payload: Call | bytes
    ) -> None:
        super().__init__(name="trainpipes-map", daemon=True)
        self._owner = owner
        self.number = number
        self._does, self._said = call, call.said
        self._context = context
        self._payload = payload
        self._place = context.RawArray("q", [NO_ROW, 0])
        self._process: Any = None
        self._exit_code: int | None = None
        self._ready = False
        self.connection, self._its_end = socket.socketpair()

    def start_process(self) -> None:
        if self._context.get_start_method() == "forkserver":
            preload(self._context, "__main__", work.__module__)
        args = self._its_end, self._payload, self._place, self.number
        process = self._context.Process(target=work, args=args, name="trainpipes-map", daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise self._not_ready("the server of worker processes has ended") from error
        finally:
            self._its_end.close()
        self._process = process

    def run(self) -> None:
        while (task := self._owner.next_task(self)) is not None:
            answer = task.answer()
            if answer is None:  # nobody waits for it any more
                continue
            died = _of_no_row(WorkerError, self._said, "its worker processes have died")
            if self._ready and connection.wait([self._process.sentinel], 0):
                self._owner.lost(self, died, task)
                break
            try:
                with doing(self._does.while_waiting):
                    reply = self._call(task.message)
            except _Died as death:
                if self._owner.does_again(task, death):
                    self._owner.lost(self, died, task)
                    break
                wrong = self._died_at_row(death) if self._ready else self._not_ready(str(death))
                reply = self._does.died_at(wrong, *death.place)
            except BaseException as error:
                self._end_process()
                reply = [], error
            if self._process is None:
                self._owner.lost(self, died if self._ready else reply[1] or died)
            answer.put(([], self._owner.gone()) if self._owner.closed else reply)
            if self._process is None:
                break
            del answer, reply, task
        self._end_process()

    def _call(self, message: Message) -> Answer:
        try:
            problem = None if self._ready else unpickled(self._receive())
            if problem is None:
                self._ready = True
                began = time.perf_counter()
                send(self.connection, message)
                answer = self._receive(self._owner.timeout)
                took = time.perf_counter() - began
        except (EOFError, OSError):
            how = self._end_process()
            if not self._ready and (self._exit_code or 0) >= 0:  # it ended by itself
                return [], self._not_ready(how)
            raise _Died(how, self._at_work()) from None
        if problem is not None:
            self._end_process()
            if isinstance(problem, BaseException):
                raise problem
            raise _of_no_row(ConfigError, self._said, problem)
        results, error, noticed = unpickled(answer)
        self._does.hear(noticed)
        if results:
            self._owner.least_rows = int(TASK * len(results) / took)
        return results, error

    def _died_at_row(self, death: _Died) -> TrainpipesError:
        which = "third" if death.tries == TRIES else "second"
        text = f"{death} while the function was called for a row, the {which} one at this row; "
        way = 'num_workers=0 shows what it does there, on_error="skip" leaves such rows out'
        return WorkerError(f"{self._said}: {text}{way}", stage=self._said)

    def _receive(self, timeout: float | None = None) -> Message:
        place = self._at_work()
        while not (ready := connection.wait([self.connection, self._process.sentinel], timeout)):
            if place == self._at_work():  # it has been at this row since the last look
                self._process.kill()
                self._end_process()
                raise _Died(f"a worker process was ended after {timeout:g} s (timeout)", place, 2)
            place = self._at_work()
        if self.connection not in ready:
            raise EOFError
        return receive(self.connection)

    def _at_work(self) -> tuple[int, int]:
        row, stage = self._place
        return row, stage

    def hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _end_process(self) -> str:
        self.connection.close()
        process, self._process = self._process, None
        if process is None:
            return ""
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join(PATIENCE)
        self._exit_code = process.exitcode
        return f"worker process {process.pid} {how_ended(process.exitcode)}"

    def _not_ready(self, how: str) -> TrainpipesError:
        cure = (
            'a program that is a script runs its pipeline below `if __name__ == "__main__":`, since workers '
            "import the script"
        )
        return _of_no_row(WorkerError, self._said, f"{how} before it was ready; {cure}")


class _Died(Exception):
    """A worker process died, at a row of a stage, which is the cause after so many tries."""

    def __init__(self, how: str, place: tuple[int, int], tries: int = TRIES) -> None:
        super().__init__(how)
        self.place, self.tries = place, tries


def _of_no_row(kind: type[TrainpipesError], said: str, text: str) -> TrainpipesError:
    error = kind(f"{said}: {text}", stage=said)
    error._trainpipes = said, None
    return error


def _no_pickle(said: str, what: str, holder: str, error: Exception) -> ConfigError:
    way_out = "define it at the top of a module, or " if not holder else ""
    return ConfigError(
        f"{said}: {what} must pickle to reach a worker process, and {holder}does not ({error}); {way_out}use "
        'method="thread"',
        stage=said,
    )


def preload(context: Any, *modules: str) -> None:
    """Import what workers need once, in the fork server, unless the program has set its preload."""
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload([*modules])


_pools: Living[ProcessPool] = Living()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool.forget()


@atexit.register
def _at_exit() -> None:
    for end in (ProcessPool.close, ProcessPool.join):
        for pool in list(_pools):
            end(pool)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
