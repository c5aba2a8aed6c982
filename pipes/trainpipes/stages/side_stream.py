"""Copies to a device on a stream of their own, beside its work on earlier batches.

The rules, in the order in which a batch meets them:

1. Before its copy is begun, the process waits until the device is not more than ``steps`` batches behind.
   A process that only queues work would else run ahead of the device as far as the driver lets it, and each
   batch that waits there takes memory of its own.
2. The copy is queued on the side stream. From pinned memory it runs by itself. torch keeps the pinned memory
   until the copy has ended, also where nobody else does.
3. When the batch is given, the stream that the consumer uses waits for the copy; the process does not. The
   batch's memory is marked as used by that stream: it is not used again before the work on it has ended.

So at most ``steps`` batches given, and those begun and not given, are being copied at a time.

Called by the thread that iterates: the current device and the current stream are a thread's own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trainpipes.stages.nested import recorded


class SideStream:
    """A stream for copies to one device.

    Args:
        module: torch's module for such devices: ``torch.cuda`` or ``torch.xpu``.
        device: where to; with its number.
        steps: batches given on which the device may still work when another copy is begun; at least 1.

    Attributes:
        device: where to.
    """

    def __init__(self, module: Any, device: torch.device, steps: int) -> None:
        self.device = device
        self._module = module
        self._stream = module.Stream(device)
        self._steps = steps
        self._lock = threading.Lock()  # several threads may iterate, each with a pass of its own
        #: Of each batch given on which the device may still work, two events: the end of its copy; and the
        #: end of the work that was queued before the next batch was given, None until one was.
        self._given: deque[list[Any]] = deque()

    def begin(self, copy: Callable[[], Any]) -> Callable[[], Any]:
        """Begin to copy a batch.

        Args:
            copy: returns the batch on the device; what it has the device do is queued on the side stream.

        Returns:
            what gives the batch, once. Work that is queued from then on waits for the copy.
        """
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
            for one in recorded(batch):
                one.record_stream(current)
            return batch

        return give

    def _wait(self) -> None:
        while True:
            with self._lock:
                if len(self._given) <= self._steps:
                    return
                ends = self._given.popleft()
            for event in ends:
                if event is not None:
                    event.synchronize()

    def _event(self, stream: Any) -> Any:
        # Who waits for a blocking event sleeps, and leaves the core to threads that make batches.
        options = {"blocking": True} if self.device.type == "cuda" else {}
        event = self._module.Event(**options)
        event.record(stream)
        return event
