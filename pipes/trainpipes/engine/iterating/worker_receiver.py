from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import Any

from torch._utils import ExceptionWrapper

from trainpipes.engine.iterating.loader_workers import LoaderWorkers
from trainpipes.engine.iterating.worker_message import WorkerMemory, WorkerMessage
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_items import Items, items_of
from trainpipes.engine.topology import Topology
from trainpipes.errors import WorkerError
from trainpipes.state.format import Position

_INTERRUPTED = (
    "this iteration was interrupted while it waited for its workers: call "
    "loader.load_state_dict(loader.state_dict()), then iterate the Loader again; it continues "
    "with the next batch"
)


class WorkerReceiver:
    """One rank's items, made by workers. A worker's error is raised when its batch is due, and on
    every call from then on."""

    def __init__(
        self, workers: LoaderWorkers, plan: Plan, topology: Topology, position: Position
    ) -> None:
        self._workers = workers
        self._plan = plan
        self._ranks = topology.rank, topology.world_size
        self._position = position
        self._own = topology.shards(position.m, position.num_shards)
        self._started: tuple[WorkerMemory, Generator[WorkerMessage]] | None = None
        self._error: Exception | None = None  # what was raised
        #: Items by m, each with its shard's cursor after it.
        self._ready: dict[int, tuple[Any, str]] = {}
        self._cursors: dict[int, str] = {}  # by shard, after what was taken

    def take(self, m: int) -> Any:
        try:
            if self._error is not None:
                raise self._error
            while m not in self._ready:
                self._receive(m)
            item, text = self._ready.pop(m)
            if isinstance(item, ExceptionWrapper):
                item.reraise()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._started = None
            self._error = error if isinstance(error, Exception) else WorkerError(_INTERRUPTED)
            raise
        if text:
            self._cursors[m % self._position.num_shards] = text
        return item

    def _receive(self, due: int) -> None:
        if self._started is None:
            # The workers find schemas: a function that opens a file on its first call must not do so
            # here, before they are forked.
            useful = min(self._workers.most, len(self._own))
            self._started = self._workers.start(self._plan, self._ranks, useful, self._position)
        memory, messages = self._started
        memory.due = due
        message = next(messages, None)
        if message is None:
            shard = due % self._position.num_shards
            raise WorkerError(
                f"the workers ended early: batch {due} of shard {shard} is missing; "
                "load the state again, or report this with the state"
            )
        self._plan.inputs.schemas.adopt(message.schemas)
        try:
            unpacked = memory.unpack(message)
        except (EOFError, OSError) as error:  # large tensors are handed over by the worker
            messages.throw(error)
            raise
        for m, item, text in unpacked:
            self._ready[m] = item, text

    def begin(self, m: int, stride: int, end: float) -> None:
        """Nothing: workers start when the first item is asked for."""

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts: as a worker said, or else where it started."""
        return self._cursors.get(shard) or self._at_start.cursor_text(shard)

    @cached_property
    def _at_start(self) -> Items:
        return items_of(self._plan, self._position, self._own)

    def close(self) -> None:
        self._started = None
        self._ready.clear()
