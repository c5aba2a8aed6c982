"""The items that workers send, in the process that trains: each is unpacked once, large ones ahead. Where a
worker dies, others make what is due again.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import finalize

from torch._utils import ExceptionWrapper

from trainpipes._internal import activity
from trainpipes._internal.activity import RECEIVING, TURN, doing, look_at
from trainpipes._internal.locks import InterruptibleLock, Living, cached_property
from trainpipes._internal.messages import is_worth_a_line
from trainpipes._internal.pool import Pool
from trainpipes.engine.iterating.loader_workers import LoaderWorkers
from trainpipes.engine.iterating.worker_end import WorkerDeath
from trainpipes.engine.iterating.worker_message import WorkerMemory, WorkerMessage
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.shard_items import ShardItems, items_of
from trainpipes.errors import WorkerError
from trainpipes.interfaces.stage import Numbers
from trainpipes.order.layout import Topology
from trainpipes.state.format import Position

log = logging.getLogger("trainpipes")

#: Deaths of workers while one batch is due, after which it is taken for the cause.
TRIES = 3
#: Bytes of a message whose batches are unpacked by a thread.
LARGE = 4 << 20
#: In place of a batch that is unpacked.
_GONE = object()


class _Failed(NamedTuple):
    """In place of a batch that cannot be unpacked: raised where it is taken."""

    error: Exception


class Received:
    """The items of a message, each unpacked once: by whoever takes it, or by a thread that works ahead. Once
    all are, the worker may use their memory again.
    """

    def __init__(self, memory: WorkerMemory, message: WorkerMessage) -> None:
        self._memory: WorkerMemory | None = memory
        self._whose = message.worker, message.number
        self._packed: list[Any] = [made for _, made, _ in message.items]
        self._items: dict[int, Any] = {}
        self._left = len(self._packed)
        self._lock = InterruptibleLock()
        self.places = {m: n for n, (m, _, _) in enumerate(message.items)}
        self.texts = [text for _, _, text in message.items]
        self.counted = message.counted
        self.is_begun = False  # whether an item was taken
        self.nbytes = sum(batch.size for batch in message.batches)
        if not self._left:
            memory.has_unpacked(*self._whose)

    def take(self, n: int) -> Any:
        self.is_begun = True
        with self._lock:
            self._unpack(n)
            item = self._items.pop(n)
        if isinstance(item, _Failed):
            raise item.error
        return item

    def unpack_all(self) -> None:
        """Unpack ahead. The worker may wait for it to end, also where somebody waits for the worker."""
        for n in range(len(self._packed)):
            with self._lock:
                self._unpack(n)

    def leave(self) -> None:
        """Nobody takes another item: their memory may be another's."""
        with self._lock:
            self._memory = None

    def _unpack(self, n: int) -> None:
        packed = self._packed[n]
        if packed is _GONE or self._memory is None:
            return
        try:
            with doing(RECEIVING):
                self._items[n] = self._memory.unpacked_batch(packed)
        except Exception as error:
            self._items[n] = _Failed(error)
        self._packed[n] = _GONE
        self._left -= 1
        # Garbage collection may have closed the iterator, and with it left this, in this thread.
        if not self._left and self._memory is not None:
            self._memory.has_unpacked(*self._whose)


_INTERRUPTED = (
    "this iteration was interrupted while it waited for its workers: call "
    "loader.load_state_dict(loader.state_dict()), then iterate the Loader again; it continues "
    "with the next batch"
)


_all: Living[WorkerReceiver] = Living()


@atexit.register
def _at_exit() -> None:
    """End the workers of open iterators, while modules have what that needs."""
    for receiver in list(_all):
        receiver.close()


class WorkerReceiver:
    """One rank's items, made by workers. A worker's error is raised when its batch is due, and ever after."""

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
        #: The message that has the item of each m.
        self._ready: dict[int, Received] = {}
        self._pool: Pool | None = None  # unpacks large batches while the program is at work
        self._cursors: dict[int, str] = {}  # by shard, after what was taken
        self._deaths: list[int] = []  # the batch that was due, of the last deaths alike
        self._count = 0  # of all deaths
        _all.add(self)

    def take(self, m: int) -> Any:
        while True:
            try:
                return self._take(m)
            except WorkerDeath as death:
                self._begin_again(m, death)

    def _take(self, m: int) -> Any:
        try:
            if self._error is not None:
                raise self._error
            while m not in self._ready:
                self._receive(m)
            received = self._ready[m]
            n = received.places[m]
            item, text = self._unpacked(received, n), received.texts[n]
            del self._ready[m]
            if isinstance(item, ExceptionWrapper):
                item.reraise()  # type: ignore[no-untyped-call]
        except WorkerDeath:
            raise
        except BaseException as error:
            self._leave()
            self._error = error if isinstance(error, Exception) else WorkerError(_INTERRUPTED)
            raise
        if text:
            self._cursors[m % self._position.num_shards] = text
        return item

    def _begin_again(self, m: int, death: WorkerDeath) -> None:
        """Have other workers make what comes from batch ``m`` on; raises where they die there, too."""
        self._deaths = [*(batch for batch in self._deaths if batch == m), m]
        if death.at_start or len(self._deaths) == TRIES:
            self._leave()
            self._error = death.error()
            raise self._error from None
        self._count += 1
        if is_worth_a_line(self._count):
            again = f"workers start again at batch {m:,} ({self._count:,} such so far)"
            log.warning("%s; %s", death.said, again)
        for received in {id(each): each for each in self._ready.values()}.values():
            if not received.is_begun:  # its rows are counted again
                self._adopt([(-a, -b, -c) for a, b, c in received.counted])
        self.close()
        texts = {shard: json.loads(text) for shard, text in self._cursors.items()}
        position = self._position
        self._position = replace(position, m=m, cursors={**position.cursors, **texts})
        vars(self).pop("_at_start", None)

    #: The worker has passed over it.
    pass_over = take

    def _receive(self, due: int) -> None:
        if self._started is None:
            # The workers find schemas: a function that opens a file on its first call must not do so
            # here, before they are forked.
            useful = min(self._workers.most, len(self._own))
            self._started = self._workers.start(self._plan, self._ranks, useful, self._position)
        memory, messages = self._started
        memory.due, memory.is_profiled = due, activity.is_on
        with doing(TURN):
            message = next(messages, None)
        if message is None:
            shard = due % self._position.num_shards
            raise WorkerError(
                f"the workers ended early: batch {due} of shard {shard} is missing; "
                "load the state again, or report this with the state"
            )
        if message.profile is not None:
            activity.from_workers.append(message.profile)
        self._plan.inputs.schemas.adopt(message.schemas)
        self._adopt(message.counted)
        received = Received(memory, message)
        self._ready.update(dict.fromkeys(received.places, received))
        if received.nbytes < LARGE:
            received.unpack_all()
            return
        if self._pool is None:
            self._pool = Pool(1, name="trainpipes-receiving")
            finalize(self, self._pool.close)
        self._pool.submit(received.unpack_all)

    def _adopt(self, counted: Sequence[Numbers]) -> None:
        for tally, more in zip(self._plan.tallies, counted, strict=True):
            tally.adopt(more)

    def _unpacked(self, received: Received, n: int) -> Any:
        try:
            item = received.take(n)
        except (EOFError, OSError) as error:  # large tensors are handed over by the worker
            if self._started is not None:
                self._started[1].throw(error)
            raise
        if n == 0:
            look_at([item], 0)
        return item

    def begin(self, m: int, stride: int, end: float) -> None:
        """Nothing: workers start when the first item is asked for."""

    def cursor_text(self, shard: int) -> str:
        """Where a shard's next item starts: as a worker said, or else where it started."""
        return self._cursors.get(shard) or self._at_start.cursor_text(shard)

    @cached_property
    def _at_start(self) -> ShardItems:
        return items_of(self._plan, self._position, self._own)

    def close(self) -> None:
        self._leave()
        self._ready.clear()

    def _leave(self) -> None:
        for received in {id(message): message for message in self._ready.values()}.values():
            received.leave()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._started = None
