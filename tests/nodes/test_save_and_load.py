"""Our nodes do in torchdata's loader what torchdata's own nodes do."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
    Unbatcher,
)

import trainpipes as tp
from nodes.contract import check_contract, given
from trainpipes import nodes as tn
from trainpipes.testing import digest

ROWS = 11
TABLE = pa.table({"row": list(range(ROWS))})


def twice(row: dict[str, Any]) -> dict[str, Any]:
    return {"row": 2 * row["row"]}


def as_row(number: int) -> dict[str, Any]:
    return {"row": number}


def some(row: dict[str, Any]) -> bool:
    return bool(row["row"] % 3)


def times(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row] * (row["row"] % 3)


def rows(first: int = 0, count: int = ROWS) -> Any:
    return tn.FromArrow(table=pa.table({"row": list(range(first, first + count))}))


def shuffled(first: int = 0, count: int = ROWS) -> Any:
    return tn.Shuffle(rows(first, count), buffer_size=4, seed=3)


def batches() -> Any:
    return tn.Batch(shuffled(), batch_size=3)


def sharded() -> Any:
    dealt = tn.ShardingFilter(rows(), num_shards=4)
    return tn.Batch(tn.Shuffle(dealt, buffer_size=4), batch_size=2)


def filtered() -> Any:
    return tn.Batch(tn.Filter(shuffled(), predicate=some), batch_size=2)


def mixed() -> Any:
    one = tp.from_arrow(TABLE.slice(0, 5)).shuffle(3)
    two = tp.from_arrow(TABLE.slice(5)).shuffle(3, seed=1)
    return tn.Batch(
        tn.Mix(sources={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0}), batch_size=3
    )


# What stands below: torchdata's nodes, over iterables with and without a state.


class Eager:
    """An iterable with a state, and other rows in each epoch. It goes to its start at once."""

    def __init__(self) -> None:
        self.epoch = self.given = 0
        self.loaded: tuple[int, int] | None = None
        self.used = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._go()
        return self._rest()

    def _go(self) -> None:
        if self.loaded is not None:
            (self.epoch, self.given), self.loaded = self.loaded, None
        elif self.used:
            self.epoch, self.given = self.epoch + 1, 0
        self.used = False

    def _rest(self) -> Iterator[dict[str, Any]]:
        self.used = True
        while self.given < ROWS:
            self.given += 1
            yield {"row": 100 * self.epoch + self.given}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["epoch"], state["given"]


class Lazy(Eager):
    """The same, going to its start, or where a state says, with its first item only."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._go()
        yield from self._rest()


class Drawing(BaseNode[dict[str, Any]]):
    """A node whose state is that of a random generator: tuples and numbers, as Python has them."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._draw = random.Random(7)
        self._left = ROWS
        if initial_state is not None:
            self._draw.setstate(initial_state["generator"])
            self._left = initial_state["left"][0]

    def next(self) -> dict[str, Any]:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return {"row": self._draw.randrange(1000)}

    def get_state(self) -> dict[str, Any]:
        return {"generator": self._draw.getstate(), "left": {0: self._left}}


class Continuing(Drawing):
    """One whose generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(7)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        draw = self._draw
        super().reset(initial_state)
        if initial_state is None:
            self._draw = draw


def numbers(count: int = ROWS) -> Any:
    return Mapper(IterableWrapper(range(count)), as_row)


def drawn() -> Any:
    """Another order in each epoch."""
    sampler = DistributedSampler(range(ROWS), num_replicas=1, rank=0, seed=5)
    return Mapper(SamplerWrapper(sampler), as_row)


def weighted(one: Any, two: Any, criteria: str) -> Any:
    return MultiNodeWeightedSampler(
        {"one": one, "two": two}, {"one": 0.7, "two": 0.3}, criteria, rank=0, world_size=1, seed=2
    )


ALONE: dict[str, Any] = {
    "rows": shuffled,
    "batches": batches,
    "batches, not shuffled": lambda: tn.Batch(rows(), batch_size=4),
    "whole batches only": lambda: tn.Batch(shuffled(), batch_size=4, drop_last=True),
    "shards": sharded,
    "filtered": filtered,
    "filtered shards": lambda: tn.Batch(tn.Filter(tn.ShardingFilter(shuffled(), num_shards=2),
        predicate=some), batch_size=2),
    "mixed": mixed,
    "repeated": lambda: tn.Batch(tn.Repeat(shuffled(count=5), times=2), batch_size=2),
    "batches, repeated": lambda: tn.Repeat(tn.Batch(shuffled(count=5), batch_size=2), times=2),
    "the first batches": lambda: tn.Take(batches(), count=2),
    "without the first batches": lambda: tn.Skip(batches(), count=2),
    "without the first rows": lambda: tn.Batch(tn.Skip(rows(), count=4), batch_size=2),
    "by a function": lambda: tn.Batch(tn.FromIterable(factory=lambda: iter(map(as_row, range(ROWS)))),
        batch_size=3),
    "several of each": lambda: tn.Batch(tn.FlatMap(shuffled(), fn=times), batch_size=4),
    "tensors": lambda: tn.Batch(tn.Shuffle(tn.FromTensors(tensors=[torch.arange(ROWS)]), buffer_size=5),
        batch_size=4),
}  # fmt: skip

UNDER: dict[str, Any] = {
    "Unbatcher": lambda: Unbatcher(batches()),
    "Unbatcher over batches of each size": lambda: Unbatcher(filtered()),
    "Batcher": lambda: Batcher(shuffled(), 4, drop_last=False),
    "Batcher, whole ones": lambda: Batcher(shuffled(), 4),
    "Unbatcher over Batcher over Unbatcher": lambda: Unbatcher(
        Batcher(Unbatcher(sharded()), 4, drop_last=False)
    ),
    "Mapper": lambda: Mapper(shuffled(), twice),
    "Prefetcher": lambda: Prefetcher(batches(), 3),
    "Prefetcher with few snapshots": lambda: Prefetcher(shuffled(), 3, snapshot_frequency=4),
    "ParallelMapper": lambda: ParallelMapper(shuffled(), twice, num_workers=2),
    "ParallelMapper of several": lambda: ParallelMapper(
        shuffled(), twice, num_workers=2, prebatch=3
    ),
    **{
        f"MultiNodeWeightedSampler, {criteria}": lambda criteria=criteria: weighted(
            shuffled(count=5), shuffled(50, 4), criteria
        )
        for criteria in (
            StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED,
            StopCriteria.ALL_DATASETS_EXHAUSTED,
            StopCriteria.FIRST_DATASET_EXHAUSTED,
        )
    },
}

BELOW: dict[str, Any] = {
    "IterableWrapper": numbers,
    "IterableWrapper of an iterable with a state": lambda: IterableWrapper(Eager()),
    "IterableWrapper of a lazy one": lambda: IterableWrapper(Lazy()),
    "SamplerWrapper": drawn,
    "Batcher and Unbatcher": lambda: Unbatcher(Batcher(drawn(), 4, drop_last=False)),
    "Prefetcher": lambda: Prefetcher(drawn(), 4),
    "Prefetcher over a lazy one": lambda: Prefetcher(IterableWrapper(Lazy()), 4),
    "ParallelMapper": lambda: ParallelMapper(drawn(), twice, num_workers=2),
    "MultiNodeWeightedSampler": lambda: weighted(
        numbers(), numbers(5), StopCriteria.ALL_DATASETS_EXHAUSTED
    ),
    "a node with a generator's state": Drawing,
    "ours": lambda: Mapper(Unbatcher(batches()), twice),
}

#: Chains of ours over them: each cuts and holds back other rows.
OVER: dict[str, Any] = {
    "rows": lambda source: tn.Map(source, fn=twice),
    "batches": lambda source: tn.Batch(source, batch_size=3),
    "shuffled": lambda source: tn.Batch(tn.Shuffle(source, buffer_size=4), batch_size=3),
    "filtered": lambda source: tn.Filter(source, predicate=some),
    "shards": lambda source: tn.Batch(tn.ShardingFilter(source, num_shards=2), batch_size=2),
    "without the first rows": lambda source: tn.Batch(tn.Skip(source, count=2), batch_size=2),
    "the first rows": lambda source: tn.Batch(tn.Take(source, count=7), batch_size=2),
    "rows repeated": lambda source: tn.Batch(tn.Repeat(source, times=2), batch_size=4),
    "shuffled, repeated": lambda source: tn.Batch(
        tn.Repeat(tn.Shuffle(source, buffer_size=4), times=2), batch_size=4
    ),
    "batches repeated": lambda source: tn.Repeat(tn.Batch(source, batch_size=4), times=2),
    "shards repeated": lambda source: tn.Repeat(
        tn.Batch(tn.Shuffle(tn.ShardingFilter(source, num_shards=3), buffer_size=5), batch_size=2),
        times=2,
    ),
    "rows of shards repeated": lambda source: tn.Batch(
        tn.Repeat(tn.ShardingFilter(source, num_shards=4), times=3), batch_size=2
    ),
}


EVERY = pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.sample(5)
@EVERY
@pytest.mark.parametrize("kind", ALONE)
def test_a_chain_of_ours_keeps_torchdatas_contract(kind: str, every: int) -> None:
    check_contract(ALONE[kind], every)


#: With threads of their own, which take their time to end.
THREADED_ABOVE = [kind for kind in UNDER if "Prefetcher" in kind or "ParallelMapper" in kind]


@pytest.mark.sample(3)
@EVERY
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k == "ParallelMapper" else ()) for k in UNDER],
)
def test_a_chain_of_ours_keeps_the_contract_under_torchdatas_nodes(kind: str, every: int) -> None:
    check_contract(UNDER[kind], every=6 * every if kind in THREADED_ABOVE else every)


FEW = ("the first rows", "shuffled, repeated")
THREADED = [below for below in BELOW if "Prefetcher" in below or "ParallelMapper" in below]

#: A ParallelMapper that one of its own threads lets go of says that it cannot wait for itself.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def pairs() -> list[Any]:
    """Chains of ours over torchdata's nodes; a quarter of the pairs, with each of both, in ordinary runs."""
    found = []
    for number, below in enumerate(BELOW):
        few, turn = (FEW, 3) if below in THREADED else (OVER, 4)
        for place, over in enumerate(few):
            marks = [pytest.mark.slow] if (number + place) % turn else []
            found.append(pytest.param(below, over, marks=marks))
    return found


@pytest.mark.sample(9)
@pytest.mark.parametrize(("below", "over"), pairs())
def test_a_chain_of_ours_keeps_the_contract_above_torchdatas_nodes(below: str, over: str) -> None:
    check_contract(lambda: OVER[over](BELOW[below]()), every=6 if below in THREADED else 3)


@pytest.mark.sample(10)
@pytest.mark.parametrize("over", ["rows", "shuffled", "the first rows", "batches repeated"])
@pytest.mark.parametrize("below", [below for below in BELOW if below != "ParallelMapper"])
def test_an_epoch_after_one_that_was_broken_off_resumes_from_its_start_and_its_middle(
    below: str, over: str
) -> None:
    run = Loader(OVER[over](BELOW[below]()))
    for _ in zip(range(2), run, strict=False):
        pass
    epoch = iter(run)
    states = [copy.deepcopy(run.state_dict())]
    items = [digest(next(epoch))]
    states.append(copy.deepcopy(run.state_dict()))
    items += [digest(item) for item in epoch]
    following = [given(run) for _ in range(2)]
    for taken, state in enumerate(states):
        again = Loader(OVER[over](BELOW[below]()))
        again.load_state_dict(state)
        assert [given(again) for _ in range(3)] == [items[taken:], *following]


@pytest.mark.parametrize("below", BELOW)
def test_states_above_torchdatas_nodes_pass_through_json(below: str) -> None:
    run = Loader(OVER["shuffled"](BELOW[below]()))
    for _ in zip(range(2), run, strict=False):
        pass
    state = json.loads(json.dumps(run.state_dict()))
    rest = given(run._it)  # type: ignore[arg-type]
    again = Loader(OVER["shuffled"](BELOW[below]()))
    again.load_state_dict(state)
    assert given(again) == rest


KINDS = {
    "tuple": ((1, "a"), ()),
    "bytes": b"\x00\xff",
    "numbers for keys": {0: {(1, 2): None}, 1.5: True},
    "like ours": {"__tuple__": [1]},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "number": np.float32(0.1),
    "bfloat16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "one": torch.tensor(7),
    "empty": torch.empty((0, 3)),
    "not finite": [float("inf"), -0.0],
}


class AllKinds(Drawing):
    """A node whose state holds all that may be in one, and must come back as it was."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        if initial_state is not None:
            assert digest(initial_state["kinds"]) == digest(KINDS)
        super().reset(initial_state)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "kinds": KINDS}


def test_what_a_nodes_state_holds_comes_back_as_it_was() -> None:
    chain = tn.Batch(AllKinds(), batch_size=2)
    next(chain)
    state = json.loads(json.dumps(chain.state_dict()))
    again = tn.Batch(AllKinds(), batch_size=2)
    again.reset(state)
    assert [digest(item) for item in again] == [digest(item) for item in chain]


def test_a_damaged_state_of_a_node_below_is_refused() -> None:
    chain = tn.Batch(AllKinds(), batch_size=2)
    next(chain)
    state = chain.state_dict()
    state["shard-0000"] = state["shard-0000"].replace("bfloat16", "nothing")
    again = tn.Batch(AllKinds(), batch_size=2)
    with pytest.raises(tp.StateError, match="shard-0000"):
        again.reset(state)


class Opaque(Drawing):
    """A node whose state is an object that only it knows."""

    def get_state(self) -> dict[str, Any]:
        return {"place": object()}


def test_a_state_that_json_cannot_hold_is_refused_when_it_is_asked_for() -> None:
    chain = tn.Batch(Opaque(), batch_size=2)
    assert len(next(chain)) == 2
    with pytest.raises(tp.DataError, match="must give what JSON can hold"):
        chain.state_dict()


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_an_epoch_that_was_loaded_and_left_unread_is_begun_anew_or_followed(taken: int) -> None:
    def made() -> Any:
        return tn.Batch(IterableWrapper(range(5)), batch_size=2)

    node = made()
    for _ in range(2):
        node.reset()
        given = [next(node) for _ in range(taken)]
        state, rest, other, left = node.state_dict(), list(node), made(), made()
        other.reset(state)
        assert list(other) == rest
        assert given + rest == [[0, 1], [2, 3], [4]]
        left.reset(state)
        left.reset()
        assert list(left) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_shards_that_are_in_different_epochs_of_a_node_get_the_rows_of_theirs(shards: int) -> None:
    # With three shards one has two of an epoch's five batches, and reads on in the next epoch.
    chain = tn.Batch(tn.ShardingFilter(drawn(), num_shards=shards), batch_size=1)
    run = Loader(tn.Repeat(tn.Take(chain, count=5), times=3))
    node = Loader(drawn())
    wanted = [digest(row) for _ in range(3) for row in list(node)[:5]]
    assert sorted(digest(row) for [row] in run) == sorted(wanted)


def test_a_node_below_that_failed_once_can_be_asked_again_and_has_lost_nothing() -> None:
    failing = {7}

    def once(row: dict[str, Any]) -> dict[str, Any]:
        if row["row"] in failing:
            failing.clear()
            raise OSError("a passing trouble")
        return row

    chain = tn.Batch(Mapper(numbers(), once), batch_size=3)
    found = [next(chain), next(chain)]
    with pytest.raises(OSError, match="a passing trouble"):
        next(chain)
    found.extend(chain)
    assert [row["row"] for batch in found for row in batch] == list(range(ROWS))


def test_a_chain_above_a_node_has_the_epochs_that_torchdata_makes_of_it() -> None:
    ours, theirs = Loader(tn.Map(Continuing(), fn=twice)), Loader(Mapper(Continuing(), twice))
    found = [given(ours) for _ in range(3)]
    assert found == [given(theirs) for _ in range(3)]
    assert len(set(map(str, found))) == 3
