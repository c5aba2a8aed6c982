"""Threads that work ahead of the thread that trains.

Whoever waits for a task that nobody has begun does it itself: so a pool without threads, in a
forked child, still gets everything done.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from trainpipes._internal import locks
from trainpipes._internal.activity import BYTES, TURN, doing, label_here
from trainpipes._internal.checks import wrong

T = TypeVar("T")
R = TypeVar("R")
#: Most threads by default.
MOST_THREADS = 8
#: Most threads of a pool that wait for servers, beside those that work.
MOST_WAITING = 8
#: Seconds that a fork, or the interpreter's end, waits for running tasks.
PATIENCE = 30.0
ELSEWHERE = "an iterator that another process has begun cannot go on in a fork of it; begin another one here"


def default_threads() -> int:
    """Cores of this process, shared with the machine's other ranks, at most 8, or ``TRAINPIPES_THREADS``."""
    asked = os.environ.get("TRAINPIPES_THREADS", "").strip()
    if asked.isdecimal():
        return int(asked)
    if asked:
        rule, way = "an integer of 0 or more", "unset it for one thread a core"
        raise wrong("the environment's TRAINPIPES_THREADS", rule, asked, way)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MOST_THREADS, (cores or 1) // max(1, int(ranks) if ranks.isdigit() else 1)))


class Priority(IntEnum):
    """What a pool does first: the lower number."""

    MAKING = 0  #: items
    READING_AHEAD = 1  #: windows; one thread stays free for items


class Future:
    """A task of a pool, and its result. ``tell``: called with it once it is done."""

    __slots__ = ("_result", "_tell", "_work", "begun", "error", "finished")

    def __init__(
        self, work: Callable[[], Any], tell: Callable[[Future], None] | None = None
    ) -> None:
        self._work: Callable[[], Any] | None = work
        self._tell = tell
        self.finished = locks.Flag()
        self._result: Any = None
        self.begun = 0  # in which of its pool's processes; 0 if not
        self.error: BaseException | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._result = work()
        except BaseException as error:
            self.error = error
        finally:
            self.finished.set()
            if self._tell is not None:
                self._tell(self)

    @property
    def done(self) -> bool:
        return self.finished.is_set()

    def result(self, wait: bool = False) -> Any:
        """The result; runs the task here unless another thread has begun."""
        if wait:
            locks.wait_for(self.finished)
        else:
            self.run()
        if self.error is not None:
            raise self.error
        return self._result


@dataclass(eq=False)
class Pool:
    """Threads that do tasks by priority, started when there is something to do.

    Args:
        shares: whether whoever waits may work too; not where functions are made for a single thread.
        within: whether tasks of other pools wait for tasks of this pool.
        name: of its threads.
        waiting: the label of a thread that waits for a task.
        pauses: whether a fork waits for tasks that run; not where these are long.
    """

    threads: int
    shares: bool = True
    within: bool = False
    name: str = "trainpipes"
    waiting: str = TURN
    pauses: bool = True

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection within may close this pool
        self._tasks_come = locks.Bell()  # for threads of the pool
        self._changed = locks.Bell()  # for those that fork, or wait for that
        self._tasks: tuple[deque[Future], ...] = tuple(deque() for _ in Priority)
        self._alive: list[threading.Thread] = []
        self._to_start: deque[locks.LateThread] = deque()  # of these
        self._running = self._reading_ahead = 0
        self._waiting = 0  # for a server, of those that run
        self._forking, self._process = 0, 1  # of those that run, too; a fork is another one
        self._paused = self._closed = False
        _pools.add(self)

    def submit(self, work: Callable[[], Any], priority: Priority = Priority.MAKING) -> Future:
        future = Future(work)
        self.begin(future, priority)
        return future

    def begin(self, future: Future, priority: Priority = Priority.MAKING) -> None:
        with self._lock:
            self._tasks[priority].append(future)
            self._wake()
        self._start()

    def _wake(self) -> None:
        """Have a thread look for a task, perhaps a new thread, which ``_start`` starts without the lock."""
        if self._tasks_come.ring(1):  # a thread that was woken before may not look for this task
            return
        if self._closed or len(self._alive) >= self.threads + self._waiting:
            return
        name = f"{self.name}-{len(self._alive)}"
        thread = locks.LateThread(target=self._work, name=name, daemon=True)
        self._to_start.append(thread)
        self._alive.append(thread)

    def _start(self) -> None:
        """Start new threads, also those that Ctrl-C kept from it."""
        locks.start_all(self._to_start)

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._paused or (priority := self._next_task()) is None:
                    if self._closed:
                        return
                    self._sleep()
                # Garbage collection may have closed the pool.
                if not self._tasks[priority]:
                    continue
                future = self._tasks[priority].popleft()
                mine = not future.begun
                future.begun = self._process
                self._running += 1
                self._reading_ahead += priority is Priority.READING_AHEAD
            if mine:
                _own.pool = self
                future.run()
            del future  # and its result
            with self._lock:
                self._running -= 1
                self._reading_ahead -= priority is Priority.READING_AHEAD
                if self._paused:
                    self._changed.ring()

    def _sleep(self) -> None:
        """Until tasks come, without the lock; in threads of the pool, which get no signals."""
        sleeper = self._tasks_come.sleeper()
        self._lock.release()
        sleeper.acquire()
        self._lock.acquire()

    def _wait_until(
        self, ready: Callable[[], bool], then: Callable[[], None] | None = None
    ) -> None:
        """And do something at once; after a time in any case."""
        end = monotonic() + PATIENCE
        while True:
            with self._lock:
                if ready() or monotonic() > end:
                    if then is not None:
                        then()
                    return
                sleeper = self._changed.sleeper()
            sleeper.acquire(timeout=locks.TICK)
            with self._lock:
                self._changed.forget(sleeper)

    def _next_task(self) -> Priority | None:
        if self._running - self._waiting >= self.threads:
            return None
        for priority in Priority:
            tasks = self._tasks[priority]
            ahead = max(1, self.threads - 1) + self._waiting
            if tasks and (priority is Priority.MAKING or self._reading_ahead < ahead):
                return priority
        return None

    def result(self, future: Future) -> Any:
        if not future.done:
            mine = False
            with self._lock:
                alone = self._closed or not self._alive
                if not future.begun and (self.shares or alone):
                    future.begun, mine = self._process, True
                elif not future.begun:
                    self._put_first(future)
                elif future.begun != self._process and not future.done:
                    raise RuntimeError(ELSEWHERE)
            if not mine:
                self._start()
                with waits() if self.within else doing(self.waiting):  # a task may fork
                    return future.result(wait=True)
        return future.result()

    def _put_first(self, future: Future) -> None:
        for tasks in self._tasks:
            if future in tasks:
                tasks.remove(future)
        self._tasks[Priority.MAKING].appendleft(future)
        self._tasks_come.ring(1)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for tasks in self._tasks:
                tasks.clear()
            self._tasks_come.ring()

    # Forks, and the interpreter's end

    @property
    def is_alive(self) -> bool:
        return bool(self._alive)

    def pause(self) -> None:
        """Wait until nothing runs, before a fork: a child must not inherit a held lock."""
        with self._lock:
            self._paused = True
        self._wait_until(lambda: self._running - self._waiting <= self._forking)

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._tasks_come.ring()
            self._changed.ring()

    def forget(self) -> None:
        """In a child: the threads stayed behind."""
        self._lock, self._tasks_come, self._changed = threading.RLock(), locks.Bell(), locks.Bell()
        self._tasks = tuple(deque() for _ in Priority)  # the parent does its own
        self._alive, self._running, self._waiting, self._forking = [], 0, 0, 0
        self._process += 1
        self._to_start, self._reading_ahead, self._paused = deque(), 0, False

    def join(self, end: float | None = None) -> None:
        """Close, and wait for the threads: a thread that outlives the interpreter would abort the process."""
        self.close()
        end = monotonic() + PATIENCE if end is None else end
        for thread in self._alive:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, end - monotonic()))

    def begin_wait(self) -> None:
        """A task of this thread waits and holds no lock: a fork need not wait for it."""
        with self._lock:
            self._running -= 1
            if self._paused:
                self._changed.ring()

    def end_wait(self) -> None:
        self._wait_until(lambda: not self._paused, partial(self._count, running=1))

    def begin_server_wait(self) -> bool:
        """The same for a server, while another thread may work. Returns whether that is so."""
        with self._lock:
            if self._waiting >= MOST_WAITING:
                return False
            self._waiting += 1
            if self._paused:
                self._changed.ring()
            if self._next_task() is not None:
                self._wake()
        self._start()
        return True

    def end_server_wait(self) -> None:
        self._wait_until(lambda: not self._paused, partial(self._count, waiting=-1))

    def _count(self, running: int = 0, waiting: int = 0) -> None:
        self._running += running
        self._waiting += waiting


def side_by_side(work: Callable[[T], R], items: Iterable[T], threads: int, name: str) -> list[R]:
    """``work`` for each item, by threads of their own; after an error nobody waits for the others."""
    pool = Pool(threads, shares=False, name=name, pauses=False)
    try:
        tasks = [pool.submit(partial(work, item)) for item in items]
        return [pool.result(task) for task in tasks]
    finally:
        pool.close()


class _Part:
    """A part of shared work, done by the thread that claims it first, in a single call."""

    __slots__ = ("_claims", "error", "finished", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self._claims: dict[str, object] = {}
        self.finished = locks.Flag()
        self.result: Any = None
        self.error: BaseException | None = None

    def is_claimed_by(self, claimer: object) -> bool:
        return self._claims.setdefault("by", claimer) is claimer

    def do(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.finished.set()


class SharedWork:
    """Work of a thread for which others wait: threads of a pool do parts of it meanwhile. The thread that
    gets Ctrl-C does parts of its own work alone: nobody waits for a part that it has dropped.
    """

    def __init__(self) -> None:
        self._parts: Sequence[_Part] = ()
        self._label: Any = None
        self._changed = locks.Bell()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Within, ``in_parts`` of this thread shares its work; at the end those who wait are woken."""
        before = getattr(_own, "shared", None)
        try:
            _own.shared = self
            yield
        finally:
            _own.shared = before
            self._changed.ring()

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        parts = [_Part(partial(work, item)) for item in items]
        self._label = label_here()
        try:
            self._parts = parts
            self._changed.ring()
            for part in parts:
                if part.is_claimed_by(self):
                    part.do()
        finally:  # after an error, too: others may be at their parts still
            self._parts = ()
            for part in parts:
                if not part.is_claimed_by(self):
                    locks.wait_for(part.finished)
        for part in parts:
            if part.error is not None:
                raise part.error
        return [part.result for part in parts]

    def help(self, is_over: Callable[[], bool]) -> None:
        """Do parts until the work is over; in a thread of a pool."""
        while not is_over():
            sleeper = self._changed.sleeper()
            if not self._do_some() and not is_over():
                sleeper.acquire(timeout=locks.TICK)
            self._changed.forget(sleeper)

    def _do_some(self) -> bool:
        me, count = object(), 0
        with doing(self._label):
            for part in self._parts:
                if part.is_claimed_by(me):
                    part.do()
                    count += 1
        return count > 0


def in_parts(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``work`` for each item; where threads of a pool wait for this thread's work, they do a part of them."""
    shared: SharedWork | None = getattr(_own, "shared", None)
    return list(map(work, items)) if shared is None else shared.map(work, items)


def shares_work() -> bool:
    """Whether others may do parts of this thread's work."""
    return getattr(_own, "shared", None) is not None


def is_of_pool() -> bool:
    """Whether this is a thread of a pool, which gets no signals."""
    return getattr(_own, "pool", None) is not None


_pools: locks.Living[Pool] = locks.Living()
#: Held by the thread that forks: what it has paused goes on afterwards.
_forks = locks.ForkLock()
#: This thread's pool.
_own = threading.local()


@contextmanager
def waits() -> Iterator[None]:
    """Around a wait for other threads or processes: they may have to fork first."""
    pool: Pool | None = getattr(_own, "pool", None)
    if pool is None:
        with doing(TURN):
            yield
        return
    pool.begin_wait()
    try:
        with doing(TURN):
            yield
    finally:
        pool.end_wait()


@contextmanager
def waits_for_server() -> Iterator[None]:
    """Around a wait for a server, which takes no core: another thread works meanwhile."""
    pool: Pool | None = getattr(_own, "pool", None)
    if pool is None or not pool.begin_server_wait():
        with doing(BYTES):
            yield
        return
    try:
        with doing(BYTES):
            yield
    finally:
        pool.end_server_wait()


def _count_fork(by: int) -> None:
    """A task of this thread forks, so that no other thread that forks need wait for it; or has forked."""
    pool: Pool | None = getattr(_own, "pool", None)
    if pool is not None:
        with pool._lock:
            pool._forking += by
            pool._changed.ring()


def _before_fork() -> None:
    _count_fork(1)
    _forks.__enter__()
    for pool in sorted(_pools, key=lambda pool: pool.within):
        if pool.is_alive and pool.pauses:
            pool.pause()


def _after_fork_in_parent() -> None:
    for pool in list(_pools):
        if pool._paused:
            pool.resume()
    with suppress(RuntimeError):  # Ctrl-C came before
        _forks.release()
    _count_fork(-1)


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool.forget()


@atexit.register
def _at_exit() -> None:
    end = monotonic() + PATIENCE
    for pool in sorted(_pools, key=lambda pool: pool.within):
        pool.join(end)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
