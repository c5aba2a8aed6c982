"""Random runs of a ``WorkQueue``: orders of finishing, failures, kills, ranks, epochs, retired rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp
from trainpipes.testing import digest

ROWS, SHARDS = 97, 12
TABLE = pa.table({"id": range(ROWS), "n": [(7 * k) % 11 for k in range(ROWS)]})
ROWS_OF_TEXT = [{"text": f"{k} " * (1 + k % 9)} for k in range(ROWS)]


def rows(ids: slice = slice(None)) -> tp.Pipeline:
    return tp.from_arrow(TABLE.slice(ids.start or 0, (ids.stop or ROWS) - (ids.start or 0)))


def dealt(pipe: tp.Pipeline) -> tp.Pipeline:
    return pipe.sharding_filter(SHARDS, tail="uneven")


def only_row(batch: list[Any]) -> Any:
    return batch[0]


#: Counted pipelines and others, of rows and of batches.
PIPELINES: dict[str, Callable[[], tp.Pipeline]] = {
    "in order": lambda: dealt(rows()),
    "shuffled": lambda: dealt(rows()).shuffle(20, seed=1),
    "filtered": lambda: dealt(rows()).shuffle(20, seed=2).filter(pc.field("n") < 7),
    "unevenly filtered": lambda: dealt(rows()).filter(pc.field("id") < 40),
    "mixed": lambda: dealt(tp.mix({"a": rows(slice(0, 40)), "b": rows(slice(40, 97))},
        weights={"a": 2, "b": 1}, max_epochs=1)),
    "batches": lambda: dealt(rows()).shuffle(20, seed=4).batch(3),
    "packed": lambda: (dealt(tp.from_dataset(ROWS_OF_TEXT)).shuffle(20, seed=5).tokenize("bytes")
        .pack(48)),
    "taken": lambda: (
        dealt(rows()).filter(pc.field("n") < 7).batch(1).skip(5).take(40).map(only_row)
    ),
    "two rounds": lambda: dealt(rows(slice(0, 30))).shuffle(9, seed=6).repeat(2),
}  # fmt: skip
#: Those whose items are rows that are the same in all epochs.
OF_ROWS = ("in order", "shuffled", "filtered", "unevenly filtered", "mixed")


def plain(name: str, epochs: int) -> list[Counter[str]]:
    """What a loader gives in each epoch."""
    loader = tp.Loader(PIPELINES[name](), threads=0)
    return [Counter(map(digest, loader)) for _ in range(epochs)]


class Log:
    """What was done and retired by the run: part of its checkpoint, as a model's weights are."""

    def __init__(self, done: Any = (), retired: Any = ()) -> None:
        self.done, self.retired = list(done), set(retired)

    def copy(self) -> Log:
        return Log(self.done, self.retired)


class Run:
    """One run, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.name = draw.choice(sorted(PIPELINES))
        self.most = draw.choice([1, 2, 3, 8, 40, 512])
        self.epochs = draw.choice([1, 1, 2, 3])
        self.order = draw.choice(["longest first", "random", "newest first", "one waits"])
        self.fails, self.retires = draw.choice([0, 0.2]), 0.0
        self.worlds = draw.choice([[1], [1], [1, 1, 1], [1, 4, 3], [4, 4], [3, 1], [5, 2]])
        if set(self.worlds) == {1} and self.name in OF_ROWS:
            self.retires = draw.choice([0, 0.1, 0.5])
        self.queues: list[tp.WorkQueue] = []
        self.flight: list[list[tp.Work]] = []
        self.log = Log()

    def open(self, world: int, state: Any) -> None:
        pipe = PIPELINES[self.name]()
        self.queues = [
            tp.WorkQueue(
                tp.Loader(pipe.distributed(rank=rank, world_size=world), threads=0),
                max_in_flight=self.most,
                epochs=self.epochs,
            )
            for rank in range(world)
        ]
        self.flight = [[] for _ in self.queues]
        if state is not None:
            for queue in self.queues:
                queue.load_state_dict(json.loads(state))

    def state(self) -> str:
        states = [queue.state_dict() for queue in self.queues]
        return json.dumps(states[0] if len(states) == 1 else tp.merge_states(states))

    def step(self, rank: int) -> bool:
        """Take items, or finish one; whether anything was left to do."""
        queue, flight, draw = self.queues[rank], self.flight[rank], self.random
        over = False
        for _ in range(draw.choice([1, 3, 50])):
            try:
                work = queue.get(timeout=0)
            except TimeoutError:
                break
            if work is None:
                over = True
                break
            assert digest(work.item) not in self.log.retired
            flight.append(work)
        if not flight:
            return not over
        last = len(flight) - 1
        number = {
            "longest first": last,
            "random": draw.randrange(len(flight)),
            "newest first": max(0, last - draw.randrange(3)),
            "one waits": min(1, last),
        }[self.order]
        work = flight.pop(number)
        if draw.random() < self.fails:
            queue.again(work.key)
        elif draw.random() < self.retires:
            queue.retire(work.key)
            self.log.retired.add(digest(work.item))
            self.log.done.append((*work.key, digest(work.item)))
        else:
            queue.done(work.key)
            self.log.done.append((*work.key, digest(work.item)))
        return True

    def go(self) -> None:
        draw, saved = self.random, (None, Log())
        for number, world in enumerate(self.worlds):
            state, self.log = saved[0], saved[1].copy()
            self.open(world, state)
            if state is not None:
                assert sorted(self.log.done) == sorted(set(self.log.done))
            kill = draw.randrange(1, 150) if number + 1 < len(self.worlds) else None
            count = 0
            while True:
                drawn = [rank for rank in range(world) if draw.random() < 0.8]
                if not sum(self.step(rank) for rank in drawn) and len(drawn) == world:
                    break
                count += 1
                if count % 7 == 0 or draw.random() < 0.05:
                    saved = self.state(), self.log.copy()
                if count == kill:
                    break

    def check(self) -> None:
        keys = [(epoch, place) for epoch, place, _ in self.log.done]
        assert len(keys) == len(set(keys)), "an item was done twice"
        for epoch, wanted in enumerate(plain(self.name, self.epochs)):
            found = Counter(item for e, _, item in self.log.done if e == epoch)
            assert not found - wanted
            assert (wanted - found).keys() <= self.log.retired
