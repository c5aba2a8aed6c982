"""The worker process of a pool; its messages are pickles with large arrays out of band.

A second thread reads what the parent sends, and ends the process with the parent.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeAlias
from weakref import ref

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.locks import start
from trainpipes.engine.calling import Answer, RowCall
from trainpipes.errors import DataError, TrainpipesError, WorkerError
from trainpipes.interfaces.watched_calls import AtWork, Place, set_current

#: Seconds that a function may run on after its parent has ended.
GRACE = 0.5
#: Bytes from which on an array travels out of band: two copies fewer for one more system call. That
#: saves 0.1 ms of CPU time for an array of 442 KB.
LARGE = 1 << 14
#: Bytes of large arrays from which on they travel as a file in memory; how many such files are mapped at
#: once; what their buffers are aligned to.
SHARED, MOST_MAPPED, ALIGNED = 1 << 20, 256, 64
_maps: set[ref[mmap.mmap]] = set()

#: A pickle, and the buffers that it leaves out.
Message: TypeAlias = "list[Any]"


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


def _table(stream: Any) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_all()


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its numbers in memory."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type == "cpu" and not tensor.requires_grad


def _tensor(flat: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array, since torch's own way makes a file of each; and of a table only its rows,
    not all that they are cut from.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is pa.Table:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_stream(stream, value.schema) as writer:
                writer.write_table(value)
            return _table, (pickle.PickleBuffer(stream.getvalue()),)
        if type(value) is torch.Tensor and _has_bytes(value):
            flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.stride(0) != 1:  # one number, which an expanded tensor repeats
                flat = flat.clone(memory_format=torch.contiguous_format)
            return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
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


def send(to: socket.socket, message: Message, shares: bool = False) -> None:
    """Send a message. With ``shares`` the buffers of a large one go as a file in memory, which the other side
    maps instead of copying it.
    """
    parts, file = message, None
    if shares and sum(part.nbytes for part in message[1:]) >= SHARED:
        file = _memory_file(message[1:])
    sizes = [part.nbytes for part in message]
    header = struct.pack("<2q", len(sizes), file is not None)
    if file is None:
        to.sendall(header)
    else:
        socket.send_fds(to, [header], [file])
        os.close(file)
        parts = message[:1]
    to.sendall(struct.pack(f"<{len(sizes)}q", *sizes))
    for part in parts:
        to.sendall(part)


def receive(sender: socket.socket) -> Message:
    """Wait for the next message; raises EOFError when the other side is gone."""
    header, files, *_ = socket.recv_fds(sender, 16, 1)
    if not header:
        raise EOFError
    if len(header) < 16:
        header += _read(sender, 16 - len(header))
    count, is_shared = struct.unpack("<2q", header)
    sizes = struct.unpack(f"<{count}q", _read(sender, 8 * count))
    if not is_shared:
        return [_read(sender, size) for size in sizes]
    return [_read(sender, sizes[0]), *_mapped(files[0], sizes[1:])]


def _read(sender: socket.socket, size: int) -> memoryview:
    content = np.empty(size, np.uint8).data
    left = content
    while left:
        got = sender.recv_into(left)
        if not got:
            raise EOFError
        left = left[got:]
    return content


def _places(sizes: Sequence[int]) -> list[int]:
    """Where buffers lie in a file, and where its end is."""
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def _memory_file(buffers: Sequence[memoryview]) -> int | None:
    """A file in memory with some buffers; None where there are no such files, or no more."""
    try:
        file = os.memfd_create("trainpipes")
    except (AttributeError, OSError):
        return None
    try:
        places = _places([buffer.nbytes for buffer in buffers])
        for place, buffer in zip(places, buffers, strict=False):
            while len(buffer):
                count = os.pwrite(file, buffer, place)
                place, buffer = place + count, buffer[count:]
        os.truncate(file, places[-1])
        return file
    except OSError:  # memory is short
        os.close(file)
        return None


def _mapped(file: int, sizes: Sequence[int]) -> list[memoryview]:
    """The buffers in a file; memory of their own where many files are mapped."""
    places = _places(sizes)
    whole = mmap.mmap(file, places[-1], flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    os.close(file)
    content = memoryview(whole)
    parts = [content[place : place + size] for place, size in zip(places, sizes, strict=False)]
    if len(_maps) >= MOST_MAPPED:
        return [np.array(part).data for part in parts]
    _maps.add(ref(whole, _maps.discard))
    return parts


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
    start(threading.Thread(target=_listen, args=(parent, messages), daemon=True))
    with suppress(ConnectionError):  # the parent is gone
        try:
            loaded: Call = unpickled(call) if isinstance(call, list) else call
        except Exception as error:
            problem = (
                f"the function does not load in a worker process ({type(error).__name__}: {error}); define "
                'it at the top of a module that can be imported there, or use method="thread"'
            )
            send(parent, pickled(problem))
            _end()
        try:
            loaded.begin(worker)
        except BaseException as error:
            send(parent, pickled(portable(error, loaded.said)))
            _end()
        send(parent, pickled(None))
        while (message := messages.get()) is not None:
            send(parent, answer_to(loaded, message, place), loaded.shares)
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


def answer_to(call: Call, message: Message, place: Any) -> Message:
    """Results up to the first error; that error; what the call noticed."""
    results: list[Any] = []
    error: BaseException | None
    try:
        items, words, failed = unpickled(message)
        set_current(AtWork(place, failed))
        results, error = call.answer(items, words)
    except Exception as problem:  # rows that can't be unpickled here
        error = problem
    place[:] = Place()
    raised = None if error is None else portable(error, call.said)
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
        pickle.loads(pickle.dumps(error))
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
