"""``to``: batches on the device that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.runtime.kinds import PlaceStage
from trainpipes.runtime.made_once import made_once
from trainpipes.shown import shown

__all__ = ["To"]

#: Devices with streams, on which a copy runs beside the work of others.
STREAMS = ("cuda", "xpu")


class To(PlaceStage):
    """Copies the tensors of each batch to a device, ahead of their use.

    In and out: batches of any nesting of dicts, lists and tuples. Carried out by the process that trains;
    workers of a plain ``DataLoader`` pass it over with one notice. ``depth`` batches beyond the one that
    is given are fetched, and their copies begun, on a stream of their own: they run while the device works
    on earlier batches. The device waits for a copy before it uses the batch, this process does not. Put
    ``pin()`` before it: only from pinned memory does a copy run by itself.

    Cursor: none; a state is that after the last batch given, whatever is on its way. Memory: ``depth`` + 1
    batches on the device.

    Args:
        device: where to; "cuda" is this process's current device.
        non_blocking: whether this process goes on while pinned memory is copied.
        depth: batches whose copies are begun ahead; 0 to copy each when it is asked for.

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
    depth: int = 2

    def check(self) -> None:
        try:
            self._set(device=str(self._device))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f'to(device) is a device such as "cuda" or "cuda:1", got {shown(self.device)}'
            ) from error
        whole_number(self.depth, 0, "to(depth)", "batches whose copies are begun ahead")

    @property
    def ahead(self) -> int:
        return self.depth

    @cached_property
    def _device(self) -> torch.device:
        return torch.device(self.device)

    @made_once
    def _stream(self) -> Any:
        """On which copies run beside the work of others."""
        module: Any = torch.get_device_module(self._device)
        return module.Stream(self._device)

    def place(self, item: Any) -> Any:
        return self.begun(item)()

    def begun(self, item: Any) -> Callable[[], Any]:
        """Begin to copy a batch. What is returned gives it, once: what the device is told to do from
        then on waits for the copy."""
        device = self._device
        if device.type not in STREAMS:
            found = self._copied(item)
            return lambda: found
        module: Any = torch.get_device_module(device)
        if not module.is_available():
            raise self._missing()
        with module.stream(self._stream):
            moved = self._copied(item)
        done = self._stream.record_event()

        def ready() -> Any:
            current = module.current_stream(self._stream.device)
            current.wait_event(done)
            for leaf in tree_leaves(moved):
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(current)  # or its memory might be used again too early
            return moved

        return ready

    def _copied(self, item: Any) -> Any:
        try:
            return tree_map(
                lambda x: (
                    x.to(self._device, non_blocking=self.non_blocking)
                    if isinstance(x, torch.Tensor)
                    else x
                ),
                item,
            )
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if self._there():
                raise
            raise self._missing() from error

    def _there(self) -> bool:
        try:
            torch.empty(0, device=self._device)
        except (RuntimeError, NotImplementedError, AssertionError):
            return False
        return True

    def _missing(self) -> ConfigError:
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return ConfigError(
            f"{self}: there is no device {str(self._device)!r} here; "
            + ("there is no accelerator" if found is None else f"there is {str(found)!r}")
            + ': leave to() out, or pass device="cpu"',
            stage=str(self),
        )
