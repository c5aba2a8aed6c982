"""Locks that no fork inherits locked, waits that Ctrl-C ends, sets that let go of unreferenced items, and
``cached_property`` without the lock that it has in Python 3.11.

Conditions, events and semaphores of ``threading``, queues and ``concurrent.futures`` are Python code: where
Ctrl-C comes within them, a lock stays held, and a thread waits for it for ever. So threads that get signals
use those here, of locks in C.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import reduction
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

try:
    import fcntl
except ImportError:  # not on this system: all may work on files at the same time
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")


class Living(Generic[T]):
    """A set of objects that lets go of those that nobody else holds. In a ``WeakSet``, Ctrl-C during the
    callback for an object that goes would be lost.
    """

    def __init__(self) -> None:
        self._refs: deque[ref[T]] = deque()

    def add(self, value: T) -> None:
        for _ in range(2):  # more than come
            with suppress(IndexError, ValueError):  # another thread was there
                if (first := self._refs[0])() is None:
                    self._refs.remove(first)
                else:
                    self._refs.rotate(-1)
        self._refs.append(ref(value))

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[T]:
        for reference in list(self._refs):
            if (value := reference()) is not None:
                yield value


#: Seconds until a signal just before a wait is seen.
TICK = 0.1


class InterruptibleLock(type(threading.RLock())):  # type: ignore[misc]  # its end is in C
    """A lock for a ``with`` statement that Ctrl-C never leaves locked. Windows and readers of remote files
    hold it while they read, so the thread that trains may wait for it long.
    """

    def __enter__(self) -> bool:
        try:
            while not self.acquire(timeout=TICK):
                pass
        except BaseException:
            with suppress(RuntimeError):  # it was not acquired
                self.release()
            raise
        return True


class ForkLock(InterruptibleLock):
    """One that is free in a forked child, as is a copy or pickle of it."""

    def __init__(self) -> None:
        _all.add(self)

    def __reduce__(self) -> Any:
        return ForkLock, ()


_all: Living[ForkLock] = Living()


def _renew() -> None:
    for lock in list(_all):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class ProcessLock(ForkLock):
    """A lock for threads, and after ``share`` for processes, too: those that are forked or spawned then. A
    process that is killed leaves it free, as no semaphore is.
    """

    _file = -1

    def share(self) -> None:
        if self._file < 0:  # until then its end is in C, so that Ctrl-C cannot come before it
            self._file = _unnamed_file()
            self.__class__ = _SharedLock

    def __reduce__(self) -> Any:
        self.share()
        return _of_file, (reduction.DupFd(self._file),)


class _SharedLock(ProcessLock):
    def __enter__(self) -> bool:
        super().__enter__()
        try:
            self._lock_file(fcntl.LOCK_EX)
        except BaseException:  # Ctrl-C, before or after
            self.__exit__()
            raise
        return True

    def __exit__(self, *_: object) -> None:
        self._lock_file(fcntl.LOCK_UN)
        self.release()

    def _lock_file(self, how: int) -> None:
        with suppress(OSError):  # somebody has closed all files
            fcntl.lockf(self._file, how)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainpipes-lock")
    with TemporaryFile() as file:
        return os.dup(file.fileno())


def _of_file(file: Any) -> ProcessLock:
    lock = ProcessLock()
    lock._file, lock.__class__ = file.detach(), _SharedLock
    return lock


class Flag:
    """Is set once, and may be waited for, as ``threading.Event``."""

    __slots__ = ("_is_set", "_shut")

    def __init__(self) -> None:
        self._is_set = False
        self._shut = threading.Lock()  # until it is set
        self._shut.acquire()

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # it is open already
            self._shut.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether it is set."""
        if not self._is_set and self._shut.acquire(timeout=max(0.0, seconds)):
            with suppress(RuntimeError):  # it was set twice
                self._shut.release()  # for others that wait
        return self._is_set


class Bell:
    """Wakes threads that sleep until something changes, as ``threading.Condition``; with the lock that guards
    it.
    """

    def __init__(self) -> None:
        self._sleeping: deque[threading.Lock] = deque()

    def sleeper(self) -> threading.Lock:
        """A lock that opens at the next ring. Wait for it by ``acquire``, and hold no other lock."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleeping.append(sleeper)
        return sleeper

    def forget(self, sleeper: threading.Lock) -> None:
        """Forget a thread that does not wait any more."""
        with suppress(ValueError):
            self._sleeping.remove(sleeper)

    def ring(self, most: int | None = None) -> int:
        """Wake so many, or all; how many there were."""
        woken = 0
        while self._sleeping and woken != most:
            sleeper = self._sleeping[0]
            with suppress(RuntimeError):  # Ctrl-C came before it was removed
                sleeper.release()
                woken += 1
            self.forget(sleeper)
        return woken


def lock_file(handle: int, path: str | os.PathLike[str]) -> bool:
    """Lock an open file until it is closed, without waiting. False if another thread or process has it, or
    has removed the file meanwhile. A file system without locks keeps nobody out.
    """
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # no locks here
        return True


class LateThread(threading.Thread):
    """A thread that is started by another thread: ``start`` waits for an event, and Ctrl-C may end that."""

    has_starter = False


def start(thread: threading.Thread) -> None:
    """Start a thread, in a thread."""
    _thread.start_new_thread(_start_next, (deque([thread]),))


def start_all(threads: deque[LateThread]) -> None:
    """Start the threads that are in there, and take them out: each once, also where several threads do so."""
    for thread in list(threads):
        if not thread.has_starter:
            _thread.start_new_thread(_start_next, (threads,))
            thread.has_starter = True


def _start_next(threads: deque[threading.Thread] | deque[LateThread]) -> None:
    try:
        thread = threads.popleft()
    except IndexError:  # another thread was there
        return
    try:
        thread.start()
    except RuntimeError as error:
        if "shutdown" not in str(error):  # there can be no more threads: this one does its work
            thread.run()


def wait_for(flag: Flag) -> None:
    while not flag.wait(TICK):
        pass


def get(queue: SimpleQueue[T]) -> T:
    while True:
        try:
            return queue.get(timeout=TICK)
        except Empty:
            pass


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:
    #: Python 3.11 makes the dict of an object's attributes when it is first asked for. It collects garbage
    #: meanwhile, and so may run Python code, in which another thread makes a set, too: both hold the same
    #: values, and free them twice. So only one thread asks at a time.
    _making_dicts = ForkLock()
    #: Seconds until a thread asks in any case: finalizers of garbage collection may wait for it.
    _PATIENCE = 1.0

    class cached_property:
        """A property that is made when it is first asked for. Where several threads ask, it may be made
        several times, and all get the same value. A process that is forked while a thread makes it would
        inherit a lock that nobody releases.
        """

        def __init__(self, make):
            self._make, self.__doc__ = make, make.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, one, owner=None):
            if one is None:
                return self
            values = _dict_of(one)
            if self._name not in values:
                values.setdefault(self._name, self._make(one))
            return values[self._name]

    def _dict_of(instance):
        try:
            _making_dicts.acquire(timeout=_PATIENCE)
            return vars(instance)
        finally:
            with suppress(RuntimeError):  # it was not acquired
                _making_dicts.release()
