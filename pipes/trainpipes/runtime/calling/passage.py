"""Python objects on their way to another process and back: arrays and tensors of some size travel as the
bytes they are, beside a pickle of the rest (PEP 574)."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from trainpipes.runtime.rows.lone_copy import is_plain

__all__ = ["Parts", "packed", "receive", "send", "unpacked"]

#: A pickle, and the buffers that it does not hold.
Parts: TypeAlias = "list[Any]"

#: Buffers of so many bytes travel beside the pickle.
BESIDE = 1 << 14
#: Pieces that the system takes in one call, at most.
AT_ONCE = 512

_COUNT = struct.Struct("<q")


class _Pickler(pickle.Pickler):
    """Takes a tensor for the array that it is: torch's own way makes a file of each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and is_plain(value):
            array = value.numpy()
            return torch.from_numpy, (array if array.flags.c_contiguous else array.copy("C"),)
        return NotImplemented


def packed(value: Any) -> Parts:
    """A value as bytes-like parts."""
    beside: list[memoryview] = []

    def takes_in(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        beside.append(raw)
        return False

    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=takes_in).dump(value)
    return [content.getbuffer(), *beside]


def unpacked(parts: Parts) -> Any:
    """The value again. Its arrays lie in the parts."""
    content, *beside = parts
    return pickle.loads(content, buffers=beside)


def send(to: socket.socket, number: int, parts: Parts) -> None:
    """Send a numbered message; returns when all of it is on its way."""
    sizes = [memoryview(part).nbytes for part in parts]
    head = struct.pack(f"<{2 + len(sizes)}q", number, len(sizes), *sizes)
    left = [memoryview(part).cast("B") for part in (head, *parts) if memoryview(part).nbytes]
    while left:
        sent = to.sendmsg(left[:AT_ONCE])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def receive(sender: socket.socket) -> tuple[int, Parts] | None:
    """The next message and its number; None where the other side is gone."""
    head = _exactly(sender, 16)
    if head is None:
        return None
    number, count = struct.unpack("<2q", head)
    sizes = _exactly(sender, 8 * count)
    if sizes is None:
        return None
    parts: list[Any] = []
    for (size,) in _COUNT.iter_unpack(sizes):
        part = _exactly(sender, size)
        if part is None:
            return None
        parts.append(part)
    return number, parts


def _exactly(sender: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    left: Sequence[Any] = memoryview(found)
    while len(left):
        try:
            got = sender.recv_into(left)  # type: ignore[arg-type]
        except ConnectionError:
            return None
        if not got:
            return None
        left = left[got:]
    return found
