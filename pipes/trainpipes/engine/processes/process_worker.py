"""The worker process of a pool.

A second thread reads what the parent sends, and ends the process with the parent.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from trainpipes._internal.locks import start
from trainpipes.engine.calling import Answer, RowCall
from trainpipes.engine.processes.channel import Channel, Message, pickled, unpickled
from trainpipes.errors import DataError, TrainpipesError, WorkerError
from trainpipes.interfaces.watched_calls import AtWork, Place, set_current

#: Seconds that a function may run on after its parent has ended.
GRACE = 0.5


class Call(Protocol):
    """What worker processes do for their parent; it pickles, but where they are forked.

    Attributes:
        said: what it is, in messages.
        while_waiting: what a thread of the parent is at that waits for a worker.
        without: what to write so that nothing has to pickle.
        shares: whether the last answer is one whose arrays are let go of together.
    """

    said: str
    without: str
    shares: bool

    @property
    def while_waiting(self) -> Any: ...

    def begin(self, worker: int) -> None:
        """In a worker, before all else; by the number of the worker."""
        ...

    def answer(self, items: Any, words: Any) -> Answer:
        """In a worker: results for the first items, and the error at the next one."""
        ...

    def noticed(self) -> Any:
        """In a worker: what the parent is to hear with an answer."""
        ...

    def hear(self, noticed: Any) -> None:
        """In the parent, by any thread."""
        ...

    def leaves_out(self, stage: int) -> bool:
        """Whether a row at which workers die may be left out there."""
        ...

    def objects(self, sent_here: Sequence[Any]) -> Sequence[Any]:
        """The Python objects in what is sent there or back."""
        ...

    def where(self, place: Place) -> str:
        """Of a place at which a worker died, in words; "" if nothing is known."""
        ...

    def died_at(self, error: TrainpipesError, how: str, place: Place) -> Answer:
        """The answer where workers died at a place, and how the last one did."""
        ...


def work(parent: socket.socket, call: Call | list[bytearray], place: Any, worker: int) -> None:
    """Answer what the parent sends, until it hangs up or dies.

    The first answer is None, or why the call can't be used. ``place``, in shared memory, says which row
    of which stage is at work.
    """
    os.setpgid(0, 0)  # signals to the parent's group are for the parent, which ends this
    # Copies of one process would draw the same numbers otherwise.
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(1)
    messages: SimpleQueue[Message | None] = SimpleQueue()
    channel = Channel(parent)
    start(threading.Thread(target=_listen, args=(channel, messages), daemon=True))
    with suppress(ConnectionError):  # the parent is gone
        try:
            loaded: Call = unpickled(call) if isinstance(call, list) else call
        except Exception as error:
            problem = (
                f"the function does not load in a worker process ({type(error).__name__}: {error}); define "
                "it at the top of a module that can be imported there"
            )
            channel.send(pickled(problem))
            _end()
        try:
            loaded.begin(worker)
        except BaseException as error:
            channel.send(pickled(portable(error, loaded.said)))
            _end()
        gc.freeze()  # garbage collection would copy the memory shared with the parent
        channel.send(pickled(None))
        while (message := messages.get()) is not None:
            channel.send(answer_to(loaded, message, place), loaded.shares)
    _end()


def _listen(channel: Channel, messages: SimpleQueue[Message | None]) -> None:
    try:
        while True:
            messages.put(channel.receive())
    except (EOFError, OSError):
        messages.put(None)
        time.sleep(GRACE)
        _end()
    except BaseException:  # such as MemoryError: the parent sees the end of this process
        traceback.print_exc()
        _end(1)


def _end(code: int = 0) -> NoReturn:
    """End at once, without the interpreter's shutdown."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def answer_to(call: Call, message: Message, place: Any) -> Message:
    """Results up to the first error; that error; what the call noticed."""
    results: list[Any] = []
    error: BaseException | None
    try:
        items, words, failed = unpickled(message)
        set_current(AtWork(place, failed, call))
        results, error = call.answer(items, words)
    except Exception as problem:  # rows that can't be unpickled here
        error = problem
    place[:] = Place()
    raised = error
    if error is not None and error.__traceback__ is not None:  # else it is portable already
        raised = portable(error, call.said)
    noticed = call.noticed()
    try:
        return pickled((results, raised, noticed))
    except Exception as problem:
        bad = next((n for n, result in enumerate(results) if not _pickles(result)), 0)
        objects = call.objects(results[bad:])
        culprit = next((value for value in objects if not _pickles(value)), None)
        refused = DataError(
            f"{call.said}: what the function returns must pickle to come back from a worker process, and "
            f"a {type(culprit).__name__} does not ({problem}); {call.without}, or return arrays, tensors "
            "and plain values"
        )
        return pickled((results[:bad], refused, noticed))


def _pickles(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


def portable(error: BaseException, said: str, is_task: bool = False) -> BaseException:
    """An error as it can go to another process, with its trace as a note, but for an error of ours at a task;
    ``said``: of what it is.
    """
    trace = error.__traceback__
    ours = {__file__, RowCall.each.__code__.co_filename}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    note = f"in worker process {os.getpid()}:\n{lines}"
    try:
        if not (is_task and isinstance(error, TrainpipesError)):
            error.add_note(note)
        unpickled(pickled(error))
    except Exception:  # its own methods may do anything
        about = getattr(error, "_trainpipes", None)
        said = said if about is None else about[0]
        try:
            text = str(error)
        except Exception as of_it:
            text = f"(its text cannot be had: {type(of_it).__qualname__})"
        kind = type(error).__qualname__
        error = WorkerError(f"{said}: the function raised {kind}, which does not pickle: {text}")
        error.add_note(note)
        if about is not None:
            error._trainpipes = about
    error.__traceback__ = None
    return error
