"""Worker processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any

from trainpipes.engine.processes.process_worker import Call, Message, receive, send, unpickled, work
from trainpipes.engine.processes.worker_pool import (
    NO_PICKLE,
    PATIENCE,
    Died,
    Task,
    WorkerPool,
    no_pickle,
    of_no_row,
)
from trainpipes.errors import ConfigError, TrainpipesError, WorkerError, how_ended
from trainpipes.interfaces.watched_calls import Place

#: The process that imported this; its fork server does not serve its forks.
HOME = os.getpid()


def process_pool(
    call: Call,
    workers: int,
    method: Any = None,
    timeout: float | None = None,
    idle: float | None = None,
) -> WorkerPool:
    """Processes that answer a call.

    Args:
        method: how they start, by name or as a context of ``multiprocessing``.
        timeout, idle: see ``WorkerPool``.
    """
    if method is None:  # not fork, which copies locks of other threads
        there = "forkserver" in multiprocessing.get_all_start_methods()
        method = "forkserver" if there and os.getpid() == HOME else "spawn"
    context: Any = multiprocessing.get_context(method) if isinstance(method, str) else method
    payload: Call | bytes | None = call if context.get_start_method() == "fork" else None

    def worker(number: int) -> ProcessWorker:
        nonlocal payload
        if payload is None:
            try:
                payload = bytes(ForkingPickler.dumps(call))
            except NO_PICKLE as error:
                raise no_pickle(call, "the function", "", error) from error
        return ProcessWorker(number, call.said, context, payload, timeout)

    return WorkerPool(call, workers, worker, timeout, idle)


class ProcessWorker:
    """One worker process.

    Args:
        payload: the call, pickled where it is not forked.
        timeout: see ``WorkerPool``.
    """

    def __init__(
        self, number: int, said: str, context: Any, payload: Call | bytes, timeout: float | None
    ) -> None:
        self._number, self._said = number, said
        self._context = context
        self._payload = payload
        self._timeout = timeout
        self._place = context.RawArray("q", Place())
        self._process: Any = None
        self._exit_code: int | None = None
        self.is_ready = False
        self._connection, self._its_end = socket.socketpair()

    def begin(self) -> None:
        if self._context.get_start_method() == "forkserver":
            preload(self._context, "__main__", work.__module__)
        args = self._its_end, self._payload, self._place, self._number
        process = self._context.Process(target=work, args=args, name="trainpipes-map", daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise self._unready("the server of worker processes has ended") from error
        finally:
            self._its_end.close()
        self._process = process

    def has_died(self) -> bool:
        return self.is_ready and bool(connection.wait([self._process.sentinel], 0))

    def ask(self, task: Task) -> tuple[list[Any], BaseException | None, Any]:
        return self.answer(task.message)

    def answer(self, message: Message) -> tuple[list[Any], BaseException | None, Any]:
        """What the process answers to a message."""
        try:
            problem = None if self.is_ready else unpickled(self._receive())
            if problem is None:
                self.is_ready = True
                send(self._connection, message)
                answer = self._receive(self._timeout)
        except (EOFError, OSError):
            how = self.end()
            unready = None if self.is_ready else self._unready(how)
            if unready is not None and (self._exit_code or 0) >= 0:  # it ended by itself
                raise unready from None
            raise Died(how, self._at_work(), unready=unready) from None
        if problem is not None:
            raise (
                problem
                if isinstance(problem, BaseException)
                else of_no_row(ConfigError, self._said, problem)
            )
        given: tuple[list[Any], BaseException | None, Any] = unpickled(answer)
        return given

    def _receive(self, timeout: float | None = None) -> Message:
        place = self._at_work()
        while not (ready := connection.wait([self._connection, self._process.sentinel], timeout)):
            if place == self._at_work():  # it has been at this row since the last look
                self._process.kill()
                self.end()
                raise Died(f"a worker process was ended after {timeout:g} s (timeout)", place, 2)
            place = self._at_work()
        if self._connection not in ready:
            raise EOFError
        return receive(self._connection)

    def _at_work(self) -> Place:
        return Place(*self._place)

    def hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        self._connection.close()

    def end(self) -> str:
        """End the process; how it ended, in words."""
        self._connection.close()
        process, self._process = self._process, None
        if process is None:
            return ""
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join(PATIENCE)
        self._exit_code = process.exitcode
        return f"worker process {process.pid} {how_ended(process.exitcode)}"

    def _unready(self, how: str) -> TrainpipesError:
        cure = (
            'a program that is a script runs its pipeline below `if __name__ == "__main__":`, since workers '
            "import the script"
        )
        return of_no_row(WorkerError, self._said, f"{how} before it was ready; {cure}")


def preload(context: Any, *modules: str) -> None:
    """Import what workers need once, in the fork server, unless the program has set its preload."""
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload([*modules])
