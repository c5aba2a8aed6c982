"""The worker processes of a ``Loader``: started for a pass, and kept for the next one if they may be.

Owned by the ``Loader``, and used by the thread that iterates. It knows nothing of who iterates: in a cycle
of references, processes would outlive the last reference to their loader.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainpipes.kinds.stage import Stage
from trainpipes.runtime.iterating.worker_dataset import WorkerDataset
from trainpipes.runtime.iterating.worker_message import WorkerMemory, WorkerMessage
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position

__all__ = ["LoaderWorkers"]


@dataclass(eq=False)
class LoaderWorkers:
    """Starts a ``Loader``'s workers.

    Args:
        stages: gives the pipeline's stages as workers get them.
        check: raises if these can't be sent to a process that is not forked.
        most: how many workers there may be.
        ahead: messages of each that are made ahead.
        persistent: whether they are kept from one pass to the next.
        init: called with the worker's number in each, if given.
        options: more of a ``DataLoader``'s.
        with_rows: whether items are sent with their rows.
    """

    stages: Callable[[], Sequence[Stage]]
    check: Callable[[], None]
    most: int
    ahead: int
    persistent: bool
    init: Callable[[int], None] | None
    options: dict[str, Any]
    with_rows: bool = False
    _sent: Sequence[Stage] | None = None
    #: Processes that can begin another pass, and what they iterate.
    _idle: tuple[DataLoader[WorkerMessage], WorkerDataset] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_idle": None}

    def start(
        self, plan: Plan, ranks: tuple[int, int], workers: int, position: Position
    ) -> tuple[WorkerMemory, Iterator[WorkerMessage]]:
        """Workers for a pass: the memory that they share, and their messages. They begin to work when the
        first one is asked for.

        Args:
            plan: the pipeline's.
            ranks: rank and world size.
            workers: how many the pass has use for.
            position: where it starts.
        """
        idle, self._idle = self._idle, None
        if idle is not None and not position.m and idle[1].leaves_out_as(position):
            loader, data = idle
            data.memory.begin(position.epoch)
        else:
            self._sent = self._sent or self.stages()
            memory = WorkerMemory(workers, self.ahead)
            source = plan.inputs.source
            data = WorkerDataset(self._sent, source, ranks, position, memory, self.with_rows)
            loader = self._processes(data, workers)
        return data.memory, self._messages(loader, data)

    def _processes(self, data: WorkerDataset, workers: int) -> DataLoader[WorkerMessage]:
        generator = torch.Generator()  # a DataLoader would draw from the global one
        generator.manual_seed(data.position.epoch)
        loader = DataLoader(
            data, batch_size=None, num_workers=workers, prefetch_factor=self.ahead,
            persistent_workers=self.persistent, worker_init_fn=partial(_begin, self.init),
            generator=generator, **self.options,
        )  # fmt: skip
        context: Any = loader.multiprocessing_context or torch.multiprocessing
        if context.get_start_method() != "fork":
            self.check()
        return loader

    def _messages(
        self, loader: DataLoader[WorkerMessage], data: WorkerDataset
    ) -> Iterator[WorkerMessage]:
        sound = True
        try:
            for message in loader:
                sound = sound and not message.has_failed
                yield message
        except GeneratorExit:
            pass  # the pass is left; the processes can begin another
        if sound and self.persistent:
            self._idle = loader, data


def _begin(own: Callable[[int], None] | None, worker: int) -> None:
    """What a worker does first."""
    gc.freeze()  # what it shares with its parent is not looked through for garbage, which copies it
    if own is not None:
        own(worker)
