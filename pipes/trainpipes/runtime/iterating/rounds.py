"""How the workers of a ``Loader`` send what they make: in rounds of several batches.

A round is a stretch of a rank's micro-batches. Each worker sends one message a round, with the batches
of its own shards in it, perhaps none; so any number of workers will do, a ``DataLoader`` may ask
them in strict turn, and a queue's cost is paid once for several batches. Rounds start short, so that the
first batch comes soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from trainpipes.runtime.iterating.parcels import Slots, pack, unpack
from trainpipes.runtime.iterating.worker_end import end_in_peace
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.shards.chains import Chains
from trainpipes.runtime.shards.lane import ENDED, Lane
from trainpipes.runtime.source import RowSource, RowStream
from trainpipes.runtime.stage import Stage
from trainpipes.state import Position

__all__ = ["Message", "Rounds", "share_out", "unpacked"]

#: Micro-batches of each worker in a full round.
FULL_ROUND = 8


def share_out(shards: Sequence[int], num_spans: int, workers: int) -> dict[int, int]:
    """The worker of each shard: shards of one span stay together where there are spans enough,
    since they share what is read.

    >>> share_out([0, 1, 2, 3], num_spans=2, workers=2)
    {0: 0, 1: 1, 2: 0, 3: 1}
    """
    spans = sorted({s % num_spans for s in shards})
    if len(spans) >= workers:
        return {s: spans.index(s % num_spans) % workers for s in shards}
    return {s: n % workers for n, s in enumerate(shards)}


def round_lengths(workers: int) -> Iterator[int]:
    """Micro-batches of a rank in each round: few at first."""
    length = 1
    while True:
        yield length * workers
        length = min(2 * length, FULL_ROUND)


@dataclass
class Message:
    """What a worker sends for one round.

    Args:
        slots: numbers m of the batches sent.
        items: the batches; on their way a ``Parcel`` of them.
        cursors: position of the batch's shard after it, JSON; empty where the pipeline is counted.
        ended: cursor of each shard that was found to have ended, or an empty text.
        last: whether this worker has no shard left that has not ended.
        notes: what it knows of the rows' schemas.
    """

    slots: list[int] = field(default_factory=list)
    items: Any = None
    cursors: list[str] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    last: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


class Rounds(IterableDataset[Message]):
    """One rank's pass as its workers make it, a message a round.

    Args:
        steps: the pipeline's stages' classes and options.
        source: the listed rows.
        ranks: rank and world size.
        workers: workers that share the rank's shards.
        start: number of the pass, and 1 if it starts at ``position``, 0 if at its start; in memory that
            all workers see.
        position: where the first pass starts.
        slots: memory shared with the workers, if they are forked.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        source: RowSource | RowStream,
        ranks: tuple[int, int],
        workers: int,
        start: Any,
        position: Position,
        slots: Slots | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._source = source
        self._ranks = ranks
        self._workers = workers
        self._start = start
        self._position = position
        self._slots = slots
        self._plan: Plan | None = None

    def __iter__(self) -> Iterator[Message]:
        if self._plan is None:
            self._plan = Plan([stage.fresh() for stage in self._stages], self._source)
            self._plan.adopt(self._position.notes)
        info = get_worker_info()
        end_in_peace()
        number, at_position = self._start
        position = self._position
        if not at_position:
            position = Position(number, 0, position.num_shards)
        return self._rounds(self._plan, position, 0 if info is None else info.id)

    def _rounds(self, plan: Plan, position: Position, worker: int) -> Iterator[Message]:
        plan = plan.resized(position.sizes)
        rank, world = self._ranks
        shards = [s for s in range(plan.num_shards) if s % world == rank]
        owners = share_out(shards, plan.layout.num_spans, self._workers)
        own = [s for s in shards if owners[s] == worker]
        chains = Chains(plan, plan.windows(), len(own))
        lanes = {s: Lane(chains, s, position.epoch, plan.cursor(position, s)) for s in own}
        running = set(lanes)
        end = plan.last_slot(world, position.m)
        m = position.m + (rank - position.m) % world
        number = 0 if self._slots is None else self._slots.unpacked(worker)
        for length in round_lengths(self._workers):
            message = Message()
            items = []
            for _ in range(length):
                shard = m % plan.num_shards
                if shard in running and m < end:
                    item = lanes[shard].next()
                    if item is ENDED:
                        running.discard(shard)
                        message.ended[shard] = lanes[shard].cursor_text()
                    else:
                        items.append(item)
                        message.slots.append(m)
                        message.cursors.append(lanes[shard].cursor_text())
                m += world
            message.items = pack(items, self._slots, worker, number)
            number += 1
            message.last = not running or m >= end
            message.notes = plan.notes
            yield message
            if message.last:
                return


def unpacked(messages: Iterator[Message], slots: Slots | None) -> Iterator[Message]:
    """Messages as they arrive, their batches with memory of their own."""
    for message in messages:
        message.items = unpack(message.items, slots)
        yield message
