"""Batches on their way from a worker process to the one that trains.

Small tensors of a message lie one after the other in memory that a forked worker shares with its parent,
used again for later messages: nothing is opened, mapped or faulted in on the way. Where there is no such
memory (spawned workers), or it is too small, the tensors of each dtype travel as one, as torch sends
tensors.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_map

__all__ = ["Parcel", "Slots", "pack", "unpack"]

#: Tensors of this many bytes or more travel by themselves.
OWN_PASSAGE = 1 << 20
#: Bytes of a message that shared memory is kept for.
SLOT_BYTES = 8 << 20
#: Where a tensor may start.
ALIGNED = 64


@dataclass(frozen=True)
class _Packed:
    """Stands for a tensor that travels with others.

    Args:
        dtype: its.
        shape: its.
        start: its first value among those of its dtype, or its first byte in a slot.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass
class Parcel:
    """What ``pack`` makes.

    Args:
        skeleton: the batches, with ``_Packed`` in the place of small tensors.
        flat: their values by dtype; None where they lie in a slot.
        worker: who sends it.
    """

    skeleton: list[Any]
    flat: dict[torch.dtype, torch.Tensor] | None
    worker: int


class Slots:
    """Memory that forked workers share with their parent. Pickled, it is gone.

    A worker fills its slots in turn. The parent counts the messages that it has unpacked; a slot is free
    again once its last message is among them.

    Args:
        workers: how many.
        ahead: messages of each that are made ahead.
    """

    def __init__(self, workers: int, ahead: int) -> None:
        self._each = ahead + 1
        # Pages that no message comes to are never there.
        counts = -(-8 * workers // mmap.PAGESIZE) * mmap.PAGESIZE
        size = counts + workers * self._each * SLOT_BYTES
        self._first, self._memory = counts, mmap.mmap(-1, size)
        self._unpacked = torch.frombuffer(self._memory, dtype=torch.int64, count=workers).numpy()

    def __reduce__(self) -> Any:
        return type(None), ()

    def unpacked(self, worker: int) -> int:
        """Messages of a worker that the parent has unpacked."""
        return int(self._unpacked[worker])

    def count(self, worker: int) -> None:
        """One more message of a worker is unpacked."""
        self._unpacked[worker] += 1

    def first_byte(self, worker: int, message: int) -> int | None:
        """Where message number ``message`` of a worker may lie; None if no slot is free."""
        if message - self.unpacked(worker) >= self._each:
            return None
        return self._first + (worker * self._each + message % self._each) * SLOT_BYTES

    def tensor(self, packed: _Packed) -> torch.Tensor:
        """A tensor in a slot, as it lies there."""
        if not packed.count:
            return torch.empty(packed.shape, dtype=packed.dtype)
        flat = torch.frombuffer(
            self._memory, dtype=packed.dtype, count=packed.count, offset=packed.start
        )
        return flat.view(packed.shape)


def _travels_with_others(leaf: Any) -> bool:
    if type(leaf) is not torch.Tensor or leaf.nbytes >= OWN_PASSAGE or leaf.requires_grad:
        return False
    return leaf.device.type == "cpu" and leaf.layout == torch.strided


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """``tree_map`` at a third of its cost where all is made of dicts, lists and tuples."""
    kind = type(tree)
    if kind is dict:
        return {key: mapped(value, leaf) for key, value in tree.items()}
    if kind is list:
        return [mapped(value, leaf) for value in tree]
    if isinstance(tree, tuple):
        parts = [mapped(value, leaf) for value in tree]
        return kind(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree_map(leaf, tree) if kind in SUPPORTED_NODES else leaf(tree)


def pack(items: list[Any], slots: Slots | None, worker: int, message: int) -> Parcel:
    """Batches with their small tensors together, for the way through a queue.

    Args:
        items: the batches.
        slots: shared memory, if there is any.
        worker: which worker sends them.
        message: number of the message among those of the worker.
    """
    start = None if slots is None else slots.first_byte(worker, message)
    if slots is not None and start is not None:
        skeleton = _into_slot(items, slots, start)
        if skeleton is not None:
            return Parcel(skeleton, None, worker)
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}

    def gather(leaf: Any) -> Any:
        if not _travels_with_others(leaf):
            return leaf
        first = sizes.get(leaf.dtype, 0)
        flat.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
        sizes[leaf.dtype] = first + leaf.numel()
        return _Packed(leaf.dtype, tuple(leaf.shape), first)

    skeleton = mapped(items, gather)
    return Parcel(skeleton, {dtype: torch.cat(parts) for dtype, parts in flat.items()}, worker)


def _into_slot(items: list[Any], slots: Slots, start: int) -> list[Any] | None:
    """Batches with their small tensors in a slot; None if they do not fit."""
    at, stop = start, start + SLOT_BYTES

    def gather(leaf: Any) -> Any:
        nonlocal at
        if not _travels_with_others(leaf):
            return leaf
        packed = _Packed(leaf.dtype, tuple(leaf.shape), at)
        at += -(-leaf.nbytes // ALIGNED) * ALIGNED
        if at > stop:
            raise _FullError
        slots.tensor(packed).copy_(leaf)
        return packed

    try:
        skeleton: list[Any] = mapped(items, gather)
    except _FullError:
        return None
    return skeleton


class _FullError(Exception):
    """A slot is too small."""


def unpack(parcel: Parcel, slots: Slots | None) -> list[Any]:
    """The batches of ``pack``, their tensors with memory of their own."""
    flat = parcel.flat

    def restore(leaf: Any) -> Any:
        if not isinstance(leaf, _Packed):
            return leaf
        if flat is not None:
            return flat[leaf.dtype][leaf.start : leaf.start + leaf.count].clone().view(leaf.shape)
        assert slots is not None
        return slots.tensor(leaf).clone()

    items: list[Any] = mapped(parcel.skeleton, restore)
    if slots is not None:
        slots.count(parcel.worker)
    return items
