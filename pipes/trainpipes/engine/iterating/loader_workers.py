"""The worker processes of a ``Loader``, each for the batches of its own shards.

Each message covers a stretch of the rank's batches, the same for all workers, and may hold none: so
any number of workers will do. Stretches start short, so that the first batch comes soon.

``LoaderWorkers`` must not refer to who iterates: in a cycle of references, processes would outlive
their loader.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_sharer
from typing import Any

import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainpipes._internal.activity import SENDING, doing
from trainpipes._internal.activity_sampler import switched
from trainpipes._internal.locks import cached_property
from trainpipes.engine.iterating.worker_end import WorkerWatch, end_in_peace
from trainpipes.engine.iterating.worker_message import (
    Packed,
    WorkerMemory,
    WorkerMessage,
    failure,
    pack,
)
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.shards.lane import ENDED, PASSED
from trainpipes.engine.shards.shard_items import items_of
from trainpipes.interfaces.source import RowSource, RowStream
from trainpipes.interfaces.stage import Stage
from trainpipes.state.format import Position

#: Most batches of a worker in a message: with 8 a queue's cost is a few per cent.
MOST_BATCHES = 8


def share_out(shards: Sequence[int], num_spans: int, workers: int) -> dict[int, int]:
    """The worker of each shard; shards of one span stay together if there are enough spans.

    >>> share_out([0, 1, 2, 3], num_spans=2, workers=2)
    {0: 0, 1: 1, 2: 0, 3: 1}
    """
    spans = sorted({s % num_spans for s in shards})
    if len(spans) >= workers:
        return {s: spans.index(s % num_spans) % workers for s in shards}
    return {s: n % workers for n, s in enumerate(shards)}


@dataclass(eq=False)
class WorkerDataset(IterableDataset[WorkerMessage]):
    """One rank's pass as its workers make it."""

    stages: Sequence[Stage]
    source: RowSource | RowStream
    ranks: tuple[int, int]
    position: Position
    memory: WorkerMemory
    schemas: dict[str, pa.Schema | None] = field(default_factory=dict)
    identity: str | None = None
    #: Whether its workers stay for another pass.
    persistent: bool = False
    #: In a worker: how many messages it has sent; far more while a pass goes on.
    sent: int = 0

    def __iter__(self) -> Iterator[WorkerMessage]:
        info = get_worker_info()
        return self.messages(self.plan, 0 if info is None else info.id)

    @cached_property
    def plan(self) -> Plan:
        plan = Plan.of([stage._fresh() for stage in self.stages], self.source)
        plan = plan.reweighed(self.position.reweighed)
        plan.inputs.schemas.adopt(self.schemas)
        if self.identity is not None:
            plan = plan.known_as(self.identity)
        for tally in plan.tallies:
            tally.is_silent = True
        return plan

    def messages(self, plan: Plan, worker: int) -> Iterator[WorkerMessage]:
        number = self.memory.unpacked(worker)
        if number < self.sent:  # the last pass was left: nobody fetches its large tensors any more
            resource_sharer.stop(timeout=1)
            gc.collect()  # of what was made ahead
        self.sent = 1 << 62
        sent = [tally.numbers for tally in plan.tallies]
        sampler = switched(None, self.memory.is_profiled)
        for message in self._filled(plan, worker):
            message.profile = None if sampler is None else sampler.take()
            sampler = switched(sampler, self.memory.is_profiled)
            message.schemas = plan.inputs.schemas.known()
            message.counted = [t.since(n) for t, n in zip(plan.tallies, sent, strict=True)]
            sent = [tally.numbers for tally in plan.tallies]
            message.number, number = number, number + 1
            self.memory.place(message)
            self.memory.makes(worker, -1)
            yield message
        self.sent = number
        switched(sampler, False)
        if not self.persistent:  # whoever receives a large tensor asks the process that made it
            while self.memory.unpacked(worker) < number:
                time.sleep(0.005)

    def _filled(self, plan: Plan, worker: int) -> Iterator[WorkerMessage]:
        (rank, world), memory = self.ranks, self.memory
        epoch, position = memory.start, self.position
        if epoch is not None:
            position = Position(epoch, 0, position.num_shards, reweighed=position.reweighed)
        plan = plan.resized(position.sizes, position.m)
        num_shards, end = plan.chain.num_shards, plan.counts.end(1)
        num_spans = plan.layouts.usual.num_spans
        step = plan.counts.topology(rank, world).step(num_shards)
        owners = share_out(range(rank % step, num_shards, step), num_spans, memory.workers)
        running = {shard for shard, owner in owners.items() if owner == worker}
        items = items_of(
            plan, position, running, sharers=world // step, own=lambda m: m % world == rank
        )
        if plan.counted:
            step = world
        stretch = world * memory.workers
        # Holds back only workers that are out of step.
        most_ahead = (memory.ahead + 2) * MOST_BATCHES * stretch
        m = position.m + (rank - position.m) % step
        length = 1
        items.open(sorted(n for n in range(m, m + num_shards, step) if n % num_shards in running))
        while running and m < end:
            stop = min(m + length * stretch, memory.due + most_ahead, end)
            length = min(2 * length, MOST_BATCHES)
            message = WorkerMessage(worker)
            while running and m < stop:
                shard = m % num_shards
                if shard in running:
                    memory.makes(worker, m)
                    try:
                        own = m % world == rank
                        item = items.take(m) if own else items.pass_over(m)
                        with doing(SENDING):
                            batch = None if item is ENDED else pack(item) if own else PASSED
                        text = items.cursor_text(shard)
                    except Exception:
                        message.items.append((m, failure(worker), ""))
                        running.clear()
                        break
                    if batch is None:
                        running.discard(shard)
                    elif isinstance(batch, Packed) and not message.has_room(batch):
                        yield message
                        message = WorkerMessage(worker)
                    message.items.append((m, batch, text))
                m += step
            yield message


@dataclass(eq=False)
class LoaderWorkers:
    """Starts a ``Loader``'s workers. ``check`` raises if stages can't be sent to processes not forked."""

    stages: Callable[[], Sequence[Stage]]
    check: Callable[[], None]
    most: int
    ahead: int
    persistent: bool
    init: Callable[[int], None] | None
    options: dict[str, Any]
    _sent: Sequence[Stage] | None = None
    #: Processes for another pass, and what they iterate.
    _idle: tuple[DataLoader[WorkerMessage], WorkerDataset, WorkerWatch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_idle": None}

    def start(
        self, plan: Plan, ranks: tuple[int, int], workers: int, position: Position
    ) -> tuple[WorkerMemory, Generator[WorkerMessage]]:
        """The workers' memory and messages. Throw errors in unpacking at the generator: a dead worker may be
        why.
        """
        idle, self._idle = self._idle, None
        watch = None
        is_of_plan = (
            idle is not None
            and idle[1].source is plan.inputs.source
            and idle[1].position.reweighed == position.reweighed
        )
        if idle is not None and is_of_plan and not position.m and idle[2].is_well:
            loader, data, watch = idle
            data.memory.begin(position.pass_number)
        else:
            if idle is not None:
                idle[2].end()
            self._sent = self._sent or self.stages()
            memory = WorkerMemory(workers, self.ahead)
            source, known = plan.inputs.source, plan.inputs.schemas.known()
            identity = None if plan.counted else plan.identity
            data = WorkerDataset(
                self._sent, source, ranks, position, memory, known, identity, self.persistent
            )
            loader = self._processes(data, workers)
        return data.memory, self._messages(loader, data, watch)

    def _processes(self, data: WorkerDataset, workers: int) -> DataLoader[WorkerMessage]:
        generator = torch.Generator()  # a DataLoader would draw from the global one
        generator.manual_seed(data.position.pass_number)
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
        self, loader: DataLoader[WorkerMessage], data: WorkerDataset, watch: WorkerWatch | None
    ) -> Generator[WorkerMessage]:
        sound, kept = True, False
        try:
            messages = iter(loader)
            watch = watch or WorkerWatch(messages)
            try:
                for message in messages:
                    sound = sound and not message.has_failed
                    yield message
            except GeneratorExit:
                pass  # the pass is left; the processes can begin another
            kept = sound and self.persistent
        except (RuntimeError, EOFError, OSError):
            died = None if watch is None else watch.death(data.memory, data.position.num_shards)
            if died is None:
                raise
            raise died from None
        finally:
            if kept and watch is not None:
                self._idle = loader, data, watch
            elif watch is not None:
                data.memory.leave()
                watch.end()


def _begin(own: Callable[[int], None] | None, worker: int) -> None:
    end_in_peace()
    gc.freeze()  # garbage collection would copy the memory shared with the parent
    if own is not None:
        own(worker)
