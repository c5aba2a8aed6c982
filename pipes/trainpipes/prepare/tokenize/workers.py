"""Processes that make files side by side.

Each has a connection to its parent, which gives it one task at a time and waits for what it says: rows read,
the file is written, or what went wrong. A second thread of a process ends it as soon as the parent is gone,
however that ended. None lets a tokenizer start threads of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NoReturn

from trainpipes.errors import ConfigError, WorkerError
from trainpipes.prepare.tokenize.make import Made, named
from trainpipes.prepare.tokenize.tasks import Task

#: Is called with rows read.
Tell = Callable[[int], None]
#: Opens, in a process, what makes the file of a task and puts it in its place.
Open = Callable[[], Callable[[Task, Tell], Made]]

#: Seconds that a process which is to end is waited for before it is killed.
PATIENCE = 5.0
#: The variable by which tokenizers are told to start no threads.
PARALLELISM = "TOKENIZERS_PARALLELISM"


def made_here(
    tasks: Sequence[Task], opened: Open, tell: Tell
) -> Generator[tuple[Task, Made], None, None]:
    """Make files one after the other in this process."""
    make = opened() if tasks else None
    for task in tasks:
        assert make is not None
        try:
            made = make(task, tell)
        except BaseException as error:
            named(error, task)
            raise
        yield task, made


def made_by_processes(
    tasks: Sequence[Task],
    opened: Open,
    tell: Tell,
    processes: int,
) -> Generator[tuple[Task, Made], None, None]:
    """Make files in several processes. They come as they are ready.

    Raises:
        ConfigError: the pipeline does not pickle.
        WorkerError: a process has died; says which file it was at.
    """
    try:
        payload = bytes(ForkingPickler.dumps(opened))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"tokenize(processes={processes}): the pipeline must pickle to reach a process, and does not "
            f"({error}); define functions at the top of a module, or use processes=1"
        ) from error
    waiting = list(reversed(tasks))
    workers: list[_Worker] = []
    try:
        for _ in range(min(processes, len(tasks))):
            workers.append(_Worker(payload))
        busy = [worker for worker in workers if worker.give(waiting)]
        while busy:
            for ready in connection.wait([worker.connection for worker in busy]):
                worker = next(w for w in busy if w.connection is ready)
                message = worker.receive()
                if message[0] == "rows":
                    tell(*message[1:])
                    continue
                task = worker.task
                assert task is not None
                if not worker.give(waiting):
                    busy.remove(worker)
                yield task, message[1]
    finally:
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.end()


class _Worker:
    """A process, as its parent has it."""

    def __init__(self, payload: bytes) -> None:
        context = _context()
        self.connection, its_end = context.Pipe()
        self.task: Task | None = None
        self._ready = False
        self._process = context.Process(
            target=_work, args=(its_end, payload), name="trainpipes-tokenize", daemon=True
        )
        self._process.start()
        its_end.close()

    def give(self, waiting: list[Task]) -> bool:
        """Give it the next task, if there is one."""
        if not waiting:
            return False
        self.task = waiting.pop()
        with suppress(OSError):  # it has died: the answer says so
            self.connection.send(self.task)
        return True

    def receive(self) -> Any:
        """What it says next.

        Raises:
            Exception: what went wrong in it.
            WorkerError: it has died.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        self._ready = True
        if message[0] == "error":
            raise message[1]
        return message

    def _died(self) -> WorkerError:
        process, task = self._process, self.task
        assert task is not None
        process.join(PATIENCE)
        code = process.exitcode
        how = f"has ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in {*signal.Signals} else "unknown"
            hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            how = f"was ended by signal {-code} ({name}){hint}"
        cure = "call it again to go on after the files that are whole, with fewer processes if memory ran out"
        if not self._ready and (code is None or code >= 0):
            cure = (
                'a program that is a script calls it below `if __name__ == "__main__":`, since processes '
                "import the script; or use processes=1"
            )
        return WorkerError(
            f"tokenize(): process {process.pid} {how} while it made {task.name} of {task.source}; {cure}",
            path=task.source,
        )

    def hang_up(self) -> None:
        self.connection.close()

    def end(self) -> None:
        self._process.join(PATIENCE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(PATIENCE)


def _context() -> Any:
    """Starts processes. A fork of this one would copy locks that other threads hold; a server that has
    imported what they need, and nothing else, forks them in no time, and they share its memory."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    if getattr(forkserver._forkserver, "_preload_modules", None) == [
        "__main__"
    ]:  # nobody said other
        context.set_forkserver_preload([__name__])
    return context


def _work(parent: Any, payload: bytes) -> None:
    """What a process does: make the files that its parent asks for, until it hangs up or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and hangs up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tasks: SimpleQueue[Task] = SimpleQueue()
    threading.Thread(target=_listen, args=(parent, tasks), daemon=True).start()
    make: Any = None
    while True:
        task = tasks.get()
        try:
            if make is None:
                _one_thread()
                make = pickle.loads(payload)()
            message = ("made", make(task, lambda rows: _say(parent, ("rows", rows))))
        except Exception as error:
            message = ("error", _portable(named(error, task), task))
        _say(parent, message)


def _listen(parent: Any, tasks: SimpleQueue[Task]) -> None:
    """Read what the parent sends; end this process with it, whatever it is at."""
    while True:
        try:
            tasks.put(parent.recv())
        except (EOFError, OSError):
            _end()


def _say(parent: Any, message: Any) -> None:
    try:
        parent.send(message)
    except OSError:
        _end()


def _end() -> NoReturn:
    """End at once: nothing here needs the interpreter's own end."""
    os._exit(1)


def _one_thread() -> None:
    """As many processes as cores need no threads of their own."""
    import pyarrow as pa
    import torch

    os.environ[PARALLELISM] = "false"  # read whenever a tokenizer encodes
    torch.set_num_threads(1)
    pa.set_cpu_count(1)


def _portable(error: BaseException, task: Task) -> BaseException:
    """An error that reaches the parent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(
            f"tokenize(): {type(error).__qualname__}: {error} (while {task.name} was made of {task.source})",
            path=task.source,
        )
    return error
