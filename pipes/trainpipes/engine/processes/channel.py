"""Messages between processes: pickles whose large arrays travel out of band, over a socket."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import pyarrow as pa
import torch

#: Bytes from which on an array travels out of band: two copies fewer for one more system call. That
#: saves 0.1 ms of CPU time for an array of 442 KB.
LARGE = 1 << 14
#: Bytes of large arrays from which on they travel as a file in memory; how many such files are mapped at
#: once; what their buffers are aligned to.
SHARED, MOST_MAPPED, ALIGNED = 1 << 20, 256, 64
#: Answers after which a file that none of them used goes.
RARELY = 64
#: How a message begins: how many parts it has, how many files were let go of, and the number of its own file.
HEADER, NO_FILE = struct.Struct("<3q"), 0
#: Files of others that this process has mapped, and how often it has forked.
_maps: set[ref[mmap.mmap]] = set()
_forks = 0

#: What is added to an error: its notes, and the row and the place that it is about.
ADDED = frozenset({"__notes__", "_trainpipes", "_place"})

#: A pickle, and the buffers that it leaves out.
Message: TypeAlias = "list[Any]"


def _table(stream: Any) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_all()


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its numbers in memory."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type == "cpu" and not tensor.requires_grad


def _tensor(flat: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


class Pickler(pickle.Pickler):
    """Pickles a tensor as an array, since torch's own way makes a file of each; and of a table only its rows,
    not all that they are cut from. Errors keep what was noted of them.
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
        if isinstance(value, BaseException) and (
            said := {n: v for n, v in vars(value).items() if n in ADDED}
        ):
            made = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(made, tuple) and len(made) == 2:  # as that of json.JSONDecodeError
                return (*made, said)
        return NotImplemented


#: How messages are pickled here; in tasks of Ray, where ``__main__`` is Ray's, in another way.
pickler: type[Pickler] = Pickler


def pickled(value: Any, by: type[Pickler] | None = None) -> Message:
    large: list[memoryview] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE:
            large.append(raw)
        return raw.nbytes < LARGE

    content = io.BytesIO()
    (by or pickler)(content, protocol=5, buffer_callback=keep_in_pickle).dump(value)
    # Not getbuffer(): an export that outlives its file is a BufferError at the end of the interpreter.
    return [memoryview(content.getvalue()), *large]


def unpickled(message: Message) -> Any:
    return pickle.loads(message[0], buffers=message[1:])


class Channel:
    """Sends messages to another process, and receives its messages.

    The buffers of a large answer travel as a file in memory, which the other side maps instead of copying it.
    A file is used again once the other side has let go of all buffers, as its next message says: the pages of
    a new one take as long as five copies.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        #: Files of this side by number; those that nobody uses, since which answer.
        self._files: dict[int, _MemoryFile] = {}
        self._unused: dict[int, int] = {}
        self._made = self._answers = 0
        #: What the other side has let go of, and what this one has, which the other is yet to hear. Any
        #: thread may add to them.
        self._returned: deque[int] = deque()
        self._let_go: deque[int] = deque()

    def send(self, message: Message, shares: bool = False) -> None:
        """Send a message; with ``shares`` its buffers may travel as a file."""
        parts, number, file = message, NO_FILE, None
        if shares and sum(part.nbytes for part in message[1:]) >= SHARED:
            number, file = self._filled(message[1:])
        let_go = [self._let_go.popleft() for _ in range(len(self._let_go))]
        sizes = [part.nbytes for part in message]
        header = HEADER.pack(len(sizes), len(let_go), number)
        if file is None:
            self._connection.sendall(header)
        else:
            socket.send_fds(self._connection, [header], [file.descriptor])
            parts = message[:1]
        numbers = [*let_go, *sizes]
        self._connection.sendall(struct.pack(f"<{len(numbers)}q", *numbers))
        for part in parts:
            self._connection.sendall(part)

    def receive(self) -> Message:
        """Wait for the next message; raises EOFError when the other side is gone."""
        header, descriptors, *_ = socket.recv_fds(self._connection, HEADER.size, 1)
        if not header:
            raise EOFError
        if len(header) < HEADER.size:
            header += self._read(HEADER.size - len(header))
        count, returned, file = HEADER.unpack(header)
        numbers = struct.unpack(f"<{returned + count}q", self._read(8 * (returned + count)))
        self._returned += numbers[:returned]
        first, *sizes = numbers[returned:]
        content = self._read(first)
        if file == NO_FILE:
            return [content, *map(self._read, sizes)]
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return [content, *self._mapped(descriptors[0], file, sizes)]

    def _read(self, size: int) -> memoryview:
        content = np.empty(size, np.uint8).data
        left = content
        while left:
            got = self._connection.recv_into(left)
            if not got:
                raise EOFError
            left = left[got:]
        return content

    def _filled(self, buffers: Sequence[memoryview]) -> tuple[int, _MemoryFile | None]:
        """A file with some buffers; None where there are no such files, or no more memory."""
        places = _places([buffer.nbytes for buffer in buffers])
        try:
            number = self._unused_file(places[-1])
        except (AttributeError, OSError):
            return NO_FILE, None
        file = self._files[number]
        for place, buffer in zip(places, buffers, strict=False):
            file.content[place : place + buffer.nbytes] = buffer
        return number, file

    def _unused_file(self, size: int) -> int:
        """The smallest that is large enough, or a new one in place of one that is not."""
        self._answers += 1
        while self._returned:
            number = self._returned.popleft()
            if number < 0:
                self._files.pop(~number).close()
            else:
                self._unused[number] = self._answers
        large = [number for number in self._unused if self._files[number].size >= size]
        if large:
            number = min(large, key=lambda number: self._files[number].size)
            del self._unused[number]
            gone = [n for n, since in self._unused.items() if self._answers - since > RARELY]
        else:
            number = self._made = self._made + 1
            gone = [*self._unused][:1]
        for old in gone:
            del self._unused[old]
            self._files.pop(old).close()
        if not large:
            self._files[number] = _MemoryFile(size)
        return number

    def _mapped(self, descriptor: int, number: int, sizes: Sequence[int]) -> list[memoryview]:
        """The buffers in a file; memory of their own where many files are mapped."""
        places = _places(sizes)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        try:
            whole = mmap.mmap(descriptor, places[-1], flags=mmap.MAP_SHARED | populate)
        finally:
            os.close(descriptor)
        _maps.add(ref(whole, partial(self._let_go_of, number, _forks)))
        content = memoryview(whole)
        parts = [content[place : place + size] for place, size in zip(places, sizes, strict=False)]
        if len(_maps) > MOST_MAPPED:
            return [np.array(part).data for part in parts]
        return parts

    def _let_go_of(self, number: int, forks: int, whole: ref[mmap.mmap]) -> None:
        """A fork of this process may go on to read what was mapped here: such a file is not written again."""
        _maps.discard(whole)
        self._let_go.append(number if forks == _forks else ~number)


class _MemoryFile:
    """A file in memory, mapped for writing. Raises OSError where memory is short."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("trainpipes-batches")
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # later it would be SIGBUS
            self.content = memoryview(mmap.mmap(self.descriptor, size))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where buffers lie in a file, and where its end is."""
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_fork)
