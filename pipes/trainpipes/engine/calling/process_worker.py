"""The worker process of ``ProcessMap``; its messages are pickles with large arrays out of band.

A second thread reads what the parent sends, and ends the process with the parent.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from trainpipes._internal.locks import start
from trainpipes.columns.tensor_rows import is_plain
from trainpipes.engine.calling.row_call import RowCall
from trainpipes.errors import DataError, WorkerError

#: Seconds that a function may run on after its parent has ended.
GRACE = 0.5
#: In place of the number of a row, where none is at work.
NO_ROW = -1
#: Bytes from which on an array travels out of band: two copies fewer for one more system call. That
#: saves 0.1 ms of CPU time for an array of 442 KB.
LARGE = 1 << 14

#: A pickle, and the buffers that it leaves out.
Message: TypeAlias = "list[Any]"


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array: torch's own way makes a file of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and is_plain(value):
            array = value.numpy()
            return torch.from_numpy, (array if array.flags.c_contiguous else array.copy("C"),)
        return NotImplemented


def pickled(value: Any) -> Message:
    large: list[memoryview] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE:
            large.append(raw)
        return raw.nbytes < LARGE

    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=keep_in_pickle).dump(value)
    # Not getbuffer(): an export that outlives its file is a BufferError at the end of the interpreter.
    return [memoryview(content.getvalue()), *large]


def unpickled(message: Message) -> Any:
    return pickle.loads(message[0], buffers=message[1:])


def send(to: socket.socket, message: Message) -> None:
    sizes = [part.nbytes for part in message]
    to.sendall(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes))
    for part in message:
        to.sendall(part)


def receive(sender: socket.socket) -> Message:
    """Wait for the next message; raises EOFError when the other side is gone."""
    (count,) = struct.unpack("<q", _read(sender, 8))
    sizes = struct.unpack(f"<{count}q", _read(sender, 8 * count))
    return [_read(sender, size) for size in sizes]


def _read(sender: socket.socket, size: int) -> memoryview:
    content = memoryview(bytearray(size))
    left = content
    while left:
        got = sender.recv_into(left)
        if not got:
            raise EOFError
        left = left[got:]
    return content


def work(parent: socket.socket, call: RowCall | bytes, row: Any) -> None:
    """Call a function for the rows that the parent sends, until it hangs up or dies.

    The first answer is None, or why the function can't be used. ``row``, in shared memory, says which
    row is at work.
    """
    os.setpgid(0, 0)  # signals to the parent's group are for the parent, which ends this
    # Copies of one process would draw the same numbers otherwise.
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(1)
    messages: SimpleQueue[Message | None] = SimpleQueue()
    start(threading.Thread(target=_listen, args=(parent, messages), daemon=True))
    with suppress(ConnectionError):  # the parent is gone
        try:
            loaded: RowCall = pickle.loads(call) if isinstance(call, bytes) else call
        except Exception as error:
            problem = (
                f"the function does not load in a worker process ({type(error).__name__}: {error}); define "
                'it at the top of a module that can be imported there, or use method="thread"'
            )
            send(parent, pickled(problem))
            _end()
        send(parent, pickled(None))
        while (message := messages.get()) is not None:
            send(parent, _answer(loaded, message, row))
    _end()


def _listen(parent: socket.socket, messages: SimpleQueue[Message | None]) -> None:
    try:
        while True:
            messages.put(receive(parent))
    except (EOFError, OSError):
        messages.put(None)
        time.sleep(GRACE)
        _end()


def _end() -> NoReturn:
    """End at once, without the interpreter's shutdown."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(0)


def _answer(call: RowCall, message: Message, row: Any) -> Message:
    """Results up to the first error; that error; the global generator that it drew from."""
    results: list[Any] = []
    error: BaseException | None
    call.watch.reports = False  # the parent does
    try:
        items, words, known = unpickled(message)
        results, error = call.each(items, words, row, known)
    except Exception as problem:  # rows that can't be unpickled here
        error = problem
    row.value = NO_ROW
    try:
        raised = None if error is None else _portable(error, call.said)
        return pickled((results, raised, call.watch.found))
    except Exception as problem:
        bad = next((n for n, result in enumerate(results) if not _pickles(result)), 0)
        refused = DataError(
            f"{call.said}: what the function returns must pickle to come back from a worker process, and "
            f'a {type(results[bad]).__name__} does not ({problem}); use method="thread", or return arrays, '
            "tensors and plain values"
        )
        return pickled((results[:bad], refused, call.watch.found))


def _pickles(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


def _portable(error: BaseException, said: str) -> BaseException:
    trace = error.__traceback__
    ours = {__file__, RowCall.each.__code__.co_filename}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    note = f"in worker process {os.getpid()}:\n{lines}"
    try:
        error.add_note(note)
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = WorkerError(
            f"{said}: the function raised {type(error).__qualname__}, which does not pickle: {error}"
        )
        error.add_note(note)
    error.__traceback__ = None
    return error
