"""Worker processes that call a function for rows, as ``map(method="process")`` uses them.

Orders, of a few rows each, are handed out in turn: two to each worker, so that it has the next one when it
is done with one. A thread of the parent takes in answers, and notices deaths. Processes are started when
there is something to do, and end when nothing was for a while, with the pipeline, or with their parent,
however that ends.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakSet

from trainpipes.runtime.calling.crew_errors import (
    death,
    ending,
    function_refused,
    let_go,
    no_more,
    rows_refused,
    unready,
)
from trainpipes.runtime.calling.crew_member import READY, UNFIT, serve
from trainpipes.runtime.calling.crew_order import Order, Task
from trainpipes.runtime.calling.passage import packed, receive, send, unpacked
from trainpipes.runtime.calling.row_call import RowCall
from trainpipes.runtime.calling.row_random import Words

__all__ = ["Crew", "start_method"]

#: Orders that a worker has at a time.
IN_HAND = 2
#: Seconds without work after which workers end.
IDLE = 60.0
#: Seconds that a worker which is to end is waited for.
PATIENCE = 5.0


#: The process that imported this. The server that forks for it does not do so for its own forks.
HOME = os.getpid()


def start_method() -> str:
    """How processes are started: not by a fork, which would copy locks that threads of ours hold."""
    there = "forkserver" in multiprocessing.get_all_start_methods()
    return "forkserver" if there and os.getpid() == HOME else "spawn"


class _Member:
    """A worker process as its parent sees it."""

    def __init__(self, number: int, process: Any, link: socket.socket) -> None:
        self.number = number
        self.process = process
        self.link = link
        self.ready = False
        self.tasks: deque[Task] = deque()


class Crew:
    """Worker processes, started when there is something to do.

    Args:
        call: the function.
        workers: how many.
        method: how they are started: "forkserver", "spawn" or "fork"; None for what is safe here.

    Attributes:
        process: the process that it belongs to. A fork of it has no part in it.
    """

    def __init__(self, call: RowCall, workers: int, method: str | None = None) -> None:
        self.process = os.getpid()
        self._call = call
        self._workers = workers
        self._method = method or start_method()
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._waiting: deque[Task] = deque()
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._progress: Any = None
        self._payload: RowCall | bytes | None = None
        self._unfit: str | None = None  # why workers cannot load the function
        self._bell: tuple[socket.socket, socket.socket] | None = None  # to wake the thread
        _crews.add(self)

    def start(self) -> None:
        """Start workers, if there are not enough; they get ready by themselves.

        Raises:
            ConfigError: the function does not pickle.
        """
        with self._lock:
            self._fill()

    def submit(self, items: Sequence[Any], words: Words | None) -> Order:
        """Have the function called for some items.

        Raises:
            ConfigError: the function, or an item, does not pickle.
        """
        try:
            parts = packed((items, words))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise rows_refused(self._call.said, items[0], error) from error
        with self._lock:
            if self._closed:
                raise let_go(self._call.said)
            self._fill()
            self._count += 1
            order = Order(self._count)
            self._waiting.append(Task(order, parts))
            self._hand_out()
        return order

    # With the lock held

    def _fill(self) -> None:
        if self._closed or len(self._members) >= self._workers:
            return
        context: Any = multiprocessing.get_context(self._method)
        if self._method == "forkserver":
            _preload(context)
        if self._payload is None:
            self._payload = self._call if self._method == "fork" else self._pickled()
            self._progress = context.RawArray("q", 2 * self._workers)
        for number in set(range(self._workers)) - self._members.keys():
            self._members[number] = self._begin(context, number)
        if self._thread is None:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
            thread = threading.Thread(target=self._attend, name="trainpipes-crew", daemon=True)
            self._thread = thread
            thread.start()
        self._wake()

    def _pickled(self) -> bytes:
        try:
            return bytes(ForkingPickler.dumps(self._call))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise function_refused(self._call.said, error) from error

    def _begin(self, context: Any, number: int) -> _Member:
        own, theirs = socket.socketpair()
        inherited = [own] if self._method == "fork" else []
        process = context.Process(
            target=serve,
            args=(theirs, self._payload, number, self._progress, inherited),
            name=f"trainpipes-map-{number}",
            daemon=True,
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:  # the server that is to fork it has died
            own.close()
            how = "the server of worker processes has ended"
            raise unready(self._call.said, how, self._unfit) from error
        finally:
            theirs.close()
        return _Member(number, process, own)

    def _hand_out(self) -> None:
        """Send orders that wait to workers that have less than they may."""
        while self._waiting:
            free = [m for m in self._members.values() if m.ready and len(m.tasks) < IN_HAND]
            if not free:
                return
            task = self._waiting.popleft()
            if not task.wanted:  # nobody wants it any more
                continue
            member = min(free, key=lambda m: len(m.tasks))
            member.tasks.append(task)
            with suppress(OSError):  # it has died, which will be noticed
                send(member.link, task.number, task.parts)

    def _wake(self) -> None:
        if self._bell is not None:
            with suppress(OSError):
                self._bell[1].send(b"!")

    # In the thread

    def _attend(self) -> None:
        """Take in answers, and notice deaths, until there is nothing more to do."""
        try:
            while self._listen():
                pass
        except BaseException as error:  # who waits for an answer must not wait for ever
            with self._lock:
                self._dismiss(error)
            raise

    def _listen(self) -> bool:
        with self._lock:
            members = list(self._members.values())
            patience = None if self._busy() else IDLE
            assert self._bell is not None
            ears = self._bell[0]
        links = {m.link: m for m in members}
        ends = {m.process.sentinel: m for m in members}
        came = connection.wait([ears, *links, *ends], patience)
        with self._lock:
            if self._closed or (not came and not self._busy()):
                self._dismiss()
                return False
        if ears in came:
            with suppress(OSError):
                ears.recv(4096)
        lost = [m for link, m in links.items() if link in came and not self._take_in(m)]
        lost += [m for end, m in ends.items() if end in came and m not in lost]
        for member in lost:
            self._lost(member)
        return True

    def _busy(self) -> bool:
        return bool(self._waiting) or any(m.tasks for m in self._members.values())

    def _take_in(self, member: _Member) -> bool:
        """One message of a worker; False where it is gone."""
        message = receive(member.link)
        if message is None:
            return False
        number, parts = message
        with self._lock:
            if number == UNFIT:
                self._unfit = unpacked(parts)
            elif number == READY:
                member.ready = True
            else:
                task = member.tasks.popleft()
                assert task.number == number
            self._hand_out()
        if number > 0:
            task.arrived(parts)
        return True

    def _lost(self, member: _Member) -> None:
        """A worker has died: what it sent before is taken in, and who waits for the rest is told."""
        while connection.wait([member.link], 0) and self._take_in(member):
            pass
        member.process.join(PATIENCE)
        if member.process.exitcode is None:  # deaf, but alive
            member.process.kill()
            member.process.join(PATIENCE)
        how, said = ending(member.process.pid, member.process.exitcode), self._call.said
        with self._lock:
            del self._members[member.number]
            member.link.close()
            if not member.ready:
                self._give_up(self._waiting, unready(said, how, self._unfit))
            elif member.tasks:
                task = member.tasks.popleft()
                at_hand = self._progress[2 * member.number] == task.number
                row = int(self._progress[2 * member.number + 1]) if at_hand else 0
                task.failed(row, death(said, how))
            self._waiting.extendleft(reversed(member.tasks))
            if not self._members:  # the next order starts others
                self._give_up(self._waiting, no_more(said, how))
            self._hand_out()

    def _give_up(self, tasks: deque[Task], error: BaseException) -> None:
        for task in tasks:
            task.failed(0, error)
        tasks.clear()

    # The end

    def _dismiss(self, error: BaseException | None = None) -> None:
        """Let the workers go, with the lock held."""
        members, self._members = list(self._members.values()), {}
        self._thread = None
        gone = let_go(self._call.said)
        gone.__cause__ = error
        for tasks in (self._waiting, *(m.tasks for m in members)):
            self._give_up(tasks, gone)
        for member in members:
            with suppress(OSError):
                member.link.shutdown(socket.SHUT_RDWR)
            member.link.close()
        bell, self._bell = self._bell, None
        for end in bell or ():
            end.close()
        until = time.monotonic() + PATIENCE
        for member in members:
            member.process.join(max(0.0, until - time.monotonic()))
            if member.process.exitcode is None:
                member.process.kill()
                member.process.join(PATIENCE)

    def close(self) -> None:
        """Let the workers go; returns at once."""
        if self.process == os.getpid():
            self._closed = True
            self._wake()

    def join(self) -> None:
        """Let the workers go, and wait until they are gone."""
        self.close()
        thread = self._thread
        if thread is not None and self.process == os.getpid():
            thread.join(3 * PATIENCE)

    def forget(self) -> None:
        """In a fork: close what it has of the parent's connections, so that workers notice its end."""
        for member in list(self._members.values()):
            member.link.close()
        for end in self._bell or ():
            end.close()


def _preload(context: Any) -> None:
    """Have the server import what workers need, once for all of them, unless it was told what to import."""
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload(["__main__", serve.__module__])


_crews: WeakSet[Crew] = WeakSet()


def _after_fork_in_child() -> None:
    for crew in list(_crews):
        crew.forget()


@atexit.register
def _at_exit() -> None:
    for crew in list(_crews):
        crew.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
