from __future__ import annotations

import copy
import dataclasses
import os
import threading
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import KW_ONLY
from typing import Any

import torch

from trainpipes._internal.checks import Natural, wrong
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import warn_once
from trainpipes.errors import ConfigError
from trainpipes.interfaces.stage import made_once
from trainpipes.interfaces.stage_kinds import DeviceStage

SEQUENCES = (list, deque, UserList)


def map_tensors(item: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with other tensors, in copies of its containers. ``change`` returns the
    replacement of a tensor or other object, or None to look inside.
    """
    if item is None or isinstance(item, (str, bytes, int, float)):
        return item
    changed = change(item)
    if changed is not None:
        return changed
    before = _parts(item)
    parts = {key: map_tensors(value, change) for key, value in before.items()}
    if all(value is before[key] for key, value in parts.items()):
        return item
    kind: Any = type(item)
    if isinstance(item, tuple):
        return kind._make(parts.values()) if hasattr(kind, "_make") else kind(parts.values())
    if isinstance(item, Mapping) and (kind is dict or not isinstance(item, MutableMapping)):
        return kind(parts)
    clone = copy.copy(item)
    for key, value in parts.items():
        if isinstance(item, (Mapping, *SEQUENCES)):
            clone[key] = value
        else:  # a dataclass, also if it is frozen
            object.__setattr__(clone, key, value)
    return clone


def _parts(item: Any) -> dict[Any, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (tuple, *SEQUENCES)):
        return dict(enumerate(item))
    if isinstance(item, type) or not dataclasses.is_dataclass(item):
        return {}
    names = [field.name for field in dataclasses.fields(item)]
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


#: How the dense tensors in a sparse one are had.
DENSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),  # also of one whose indices come twice
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")
    ),
}


def recorded(item: Any, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """A batch's tensors, and objects that pass ``record_stream`` on to theirs; ``within`` others."""
    if isinstance(item, torch.Tensor) and item.layout in DENSE:
        yield from (getattr(item, name)() for name in DENSE[item.layout])
        return
    if can(item, "record_stream"):
        yield item
        return
    parts = _parts(item)
    if not parts and can(item, "to") and all(item is not holder for holder in within):
        within = (*within, item)
        names = [*getattr(item, "__dict__", ()), *getattr(item, "__slots__", ())]
        parts = {name: getattr(item, name, None) for name in names}
    for value in parts.values():
        yield from recorded(value, within)


def accelerator() -> str:
    there = torch.accelerator.is_available()
    return str(torch.accelerator.current_accelerator()) if there else ""


def can(item: Any, method: str) -> bool:
    return not isinstance(item, type) and callable(getattr(item, method, None))


class Pin(DeviceStage):
    """Copy the tensors of each batch to page-locked memory.

    Batches may nest mappings, lists, tuples, dataclasses and objects with a ``pin_memory`` method.
    The process that trains pins. Workers of a plain ``DataLoader``, and machines without an
    accelerator, skip it with a warning.
    """

    def place(self, item: Any) -> Any:
        kind = accelerator()
        if kind in ("", "mps"):
            why = "MPS shares the CPU's memory" if kind else "there is no accelerator to copy to"
            warn_once(f"pin() does nothing here: {why}")
            return item
        return map_tensors(item, _pinned)


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.layout in (torch.strided, torch.jagged)
        return value.pin_memory() if dense and value.device.type == "cpu" else value
    return value.pin_memory() if can(value, "pin_memory") else None


class SideStream:
    """A stream for copies to a device, which may be ``steps`` batches behind."""

    def __init__(self, module: Any, device: torch.device, steps: int) -> None:
        self.device = device
        self._module = module
        self._stream = module.Stream(device)
        self._steps = steps
        self._lock = threading.Lock()  # several threads may iterate, each with a pass of its own
        #: Of each batch given on which the device may still work, two events: the end of its copy; and the
        #: end of the work that was queued before the next batch was given, None until a batch was.
        self._given: deque[list[Any]] = deque()

    def begin(self, copy: Callable[[], Any]) -> Callable[[], Any]:
        self._wait()
        with self._module.stream(self._stream):
            batch = copy()
            copied = self._event(self._stream)

        def give() -> Any:
            current = self._module.current_stream(self.device)
            with self._lock:
                if self._given and self._given[-1][1] is None:
                    self._given[-1][1] = self._event(current)
                self._given.append([copied, None])
            current.wait_event(copied)
            for tensor in recorded(batch):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type == self.device.type:
                    tensor.record_stream(current)  # one that stays on the CPU has no streams
            return batch

        return give

    def _wait(self) -> None:
        while True:
            with self._lock:
                if len(self._given) <= self._steps:
                    return
                ends = self._given.popleft()
            for event in filter(None, ends):
                event.synchronize()

    def _event(self, stream: Any) -> Any:
        # Who waits for a blocking event sleeps, and leaves the core to threads that make batches.
        options = {"blocking": True} if self.device.type == "cuda" else {}
        event = self._module.Event(**options)
        event.record(stream)
        return event


#: Devices with streams, on which a copy runs beside the work of others.
STREAMS = ("cuda", "xpu")


class To(DeviceStage):
    """Copy the tensors of each batch to a device, ahead of their use.

    Batches may nest as in ``pin``. The process that trains copies. On CUDA and XPU the next
    ``depth`` batches are copied on a side stream while the device works; only pinned memory is
    copied in the background, so put ``pin()`` before it. The device holds at most 2 ``depth`` + 2
    batches. A state is that after the last batch given.

    Args:
        device: where to; "cuda" is the current device of this process, so call
            ``torch.cuda.set_device(local_rank)`` first.
        non_blocking: whether this process goes on while pinned memory is copied.
        depth: batches to copy ahead; 0 to copy each when it is asked for.

    Raises:
        ConfigError: there is no such device.

    >>> import torch, trainpipes as tp
    >>> pipe = tp.from_tensors(x=torch.arange(4)).batch(2).collate().to("cpu")
    >>> [batch["x"].tolist() for batch in pipe]
    [[0, 1], [2, 3]]
    """

    device: str | int | torch.device
    _: KW_ONLY
    non_blocking: bool = True
    depth: Natural = 2

    def check(self) -> None:
        try:
            self._set(device=str(self._device))
        except (RuntimeError, TypeError, ValueError) as error:
            rule = 'a device such as "cuda" or "cuda:1"'
            raise wrong("to(device)", rule, self.device) from error

    @property
    def ahead(self) -> int:
        return self.depth

    @cached_property
    def _device(self) -> torch.device:
        return torch.device(self.device)

    @made_once
    def _copies(self) -> SideStream | None:
        """For all passes of this process; their first use says which device "cuda" is."""
        if self._device.type not in STREAMS:
            try:
                torch.empty(0, device=self._device)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                raise self._missing() from error
            return None
        module: Any = torch.get_device_module(self._device)
        if not module.is_available() or (self._device.index or 0) >= module.device_count():
            raise self._missing()
        device = torch.device(self._device.type, self._index(module))
        return SideStream(module, device, self.depth + 1)

    def _index(self, module: Any) -> int:
        if self._device.index is not None:
            return self._device.index
        current, rank = int(module.current_device()), os.environ.get("LOCAL_RANK", "")
        if rank.isdecimal() and current != int(rank) < module.device_count():
            kind = self._device.type
            said = f"copies to this process's current device, {kind}:{current}, and LOCAL_RANK is {rank}"
            way = f"call torch.{kind}.set_device({rank}) before, or use to('{kind}:{rank}')"
            warn_once(f"{self} {said}: {way}")
        return current

    def place(self, item: Any) -> Any:
        return self.begun(item)()

    def begun(self, item: Any) -> Callable[[], Any]:
        copies = self._copies
        if copies is None:
            moved = _moved(item, self._device, False)
            return lambda: moved
        return copies.begin(lambda: _moved(item, copies.device, self.non_blocking))

    def _missing(self) -> ConfigError:
        kind = accelerator()
        there = f"{torch.accelerator.device_count()} of {kind!r}" if kind else "no accelerator"
        said = f"{self}: there is no device {str(self._device)!r} here; torch {torch.__version__} finds"
        way = 'leave to() out, or pass device="cpu"'
        return ConfigError(f"{said} {there}: {way}", stage=str(self))


def _moved(item: Any, device: torch.device, non_blocking: bool) -> Any:
    def moved(value: Any) -> Any:
        if not can(value, "to"):
            return None
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:
            if isinstance(value, torch.Tensor):
                raise
            return value.to(device)  # a method of the user's may take no more

    return map_tensors(item, moved)
