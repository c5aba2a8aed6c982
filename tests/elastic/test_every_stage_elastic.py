"""Every stage gives the same sequence on any number of ranks, and resumes on any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from elastic.ranks import ENDED, Leg, OneProcessLoader, Reads
from every_stage import ENDLESS, FINITE, public_stages
from trainpipes.order import divisors
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings("ignore:(pin|to)\\(.*:UserWarning")

Make = Callable[[Path], tp.Pipeline]

#: Items of an endless pipeline that are compared.
ENOUGH = 36

MAKES: dict[str, Make] = {**FINITE, **ENDLESS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


class Whole:
    """What one rank gives in one pass: digests by number m, holes left out."""

    def __init__(self, pipe: tp.Pipeline) -> None:
        self.plan = pipe._session.plan
        self.items: dict[int, str] = {}
        m = -1
        iterator = iter(pipe)
        for item in iterator:
            state = iterator.state_dict()
            m = state["m"] - 1 if state["m"] else m + 1
            self.items[m] = digest(item)
            if self.plan.chain.endless and len(self.items) == ENOUGH:
                break

    def steps(self, ranks: int, first: int = 0) -> int:
        """Steps that so many ranks take from ``first`` to the end."""
        if ranks == 1:
            return sum(m >= first for m in self.items)
        hole = next(m for m in count(first) if m not in self.items)
        return (hole - first) // ranks


def world_sizes(pipe: tp.Pipeline) -> list[int]:
    """1 to 4 ranks, as far as they divide the shards."""
    return [ranks for ranks in divisors(pipe._session.plan.chain.num_shards) if ranks <= 4]


def given_by(leg: Leg, whole: Whole, first: int, steps: int | None) -> Iterator[tuple[int, str]]:
    """Numbers and digests of so many steps of a leg from ``first`` on; to the end if None."""
    leg.begin()
    m = first
    for _ in range(steps if steps is not None else whole.steps(leg.ranks, first)):
        items = leg.step()
        assert ENDED not in items
        if leg.ranks == 1:  # holes are passed over
            m = min(at for at in whole.items if at >= m)
        for rank, item in enumerate(items):
            yield m + (rank - m) % leg.ranks, digest(item)
        m += leg.ranks
    if steps is None and not whole.plan.chain.endless:
        assert leg.step() == [ENDED] * leg.ranks


def reads_of(whole: Whole, ranks: int) -> list[tuple[Reads, int]]:
    """Ways in which a rank may read, and numbers of workers."""
    ways: list[tuple[Reads, int]] = [("pipe", 1), ("loader", 2)]
    shards = whole.plan.chain.num_shards // ranks
    if not whole.plan.counts.ends_unevenly and shards % 2 == 0:
        ways.append(("workers", 2))
    return ways


@pytest.mark.parametrize("name", MAKES)
def test_ranks_together_give_the_sequence_of_one(name: str, folder: Path) -> None:
    pipe = MAKES[name](folder)
    whole = Whole(pipe)
    for ranks in world_sizes(pipe):
        end = whole.steps(ranks) * ranks if ranks > 1 else None
        expected = {m: item for m, item in whole.items.items() if end is None or m < end}
        ways = reads_of(whole, ranks)
        for reads, workers in ways[ranks % len(ways) :][:1] if " / " in name else ways:
            leg = Leg(pipe, ranks, workers, reads)
            assert dict(given_by(leg, whole, 0, None)) == expected, f"{ranks} ranks, {reads}"
            leg.close()


@pytest.mark.parametrize("name", MAKES)
def test_a_run_saved_on_some_ranks_goes_on_on_others(name: str, folder: Path) -> None:
    pipe = MAKES[name](folder)
    whole = Whole(pipe)
    sizes = world_sizes(pipe)
    for number, ranks in enumerate(sizes):
        steps = whole.steps(ranks)
        for stop in {steps // 2} if " / " in name else {min(1, steps), steps // 2}:
            others = sizes[(number + 1 + stop) % len(sizes)]
            reads, workers = reads_of(whole, ranks)[stop % 2]
            first = Leg(pipe, ranks, workers, reads)
            taken = dict(given_by(first, whole, 0, stop))
            state = json.loads(json.dumps(tp.merge_states(first.states())))
            first.close()
            m = state["m"]
            if state["epoch"] or whole.steps(others, m) == 0:  # nothing is left of the pass
                continue
            reads, workers = reads_of(whole, others)[number % 2]
            then = Leg(pipe, others, workers, reads, [state] * others)
            rest = dict(given_by(then, whole, m, None))
            then.close()
            assert not set(taken) & set(rest)
            end = max(rest, default=m) + 1
            expected = {at: item for at, item in whole.items.items() if at < end}
            assert taken | rest == expected, f"{ranks} ranks, then {others}"


def test_no_public_stage_is_missing_here() -> None:
    tried = {name.split(" / ")[0] for name in MAKES}
    assert public_stages() == tried


def test_every_stage_that_can_be_sharded_is_run_on_several_ranks(folder: Path) -> None:
    alone = {name.split(" / ")[0] for name in MAKES}
    for name, make in MAKES.items():
        if len(world_sizes(make(folder))) > 1:
            alone.discard(name.split(" / ")[0])
    assert alone == {"from_torchdata"}


RAGGED: dict[str, Make] = {
    "known": lambda f: sharded(f).batch(5),
    "filtered": lambda f: sharded(f).filter(_some).batch(3),
    "filtered batches": lambda f: sharded(f).batch(2).filter(_first),
    "stream": lambda f: (
        tp.from_iterable(_count).sharding_filter(12, tail="ragged").shuffle(7).batch(4)
    ),
}


def sharded(folder: Path) -> tp.Pipeline:
    dealt = FINITE["read_parquet"](folder).stages[:2]
    return tp.Pipeline(dealt).sharding_filter(12, tail="ragged").shuffle(9, seed=3)


def _some(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 5 > 1)


def _first(batch: list[Any]) -> bool:
    return bool(batch[0]["x"] % 4)


def _count() -> Iterator[int]:
    return iter(range(61))


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ragged_tail_leaves_nothing_out(name: str, ranks: int, folder: Path) -> None:
    pipe = RAGGED[name](folder)
    whole = Whole(pipe)
    for reads, workers in (("pipe", 1), ("loader", 2), ("loader", 3)):
        leg = Leg(pipe, ranks, workers, reads)  # type: ignore[arg-type]
        leg.begin()
        items = [
            item for _ in range(len(whole.items) + 1) for item in leg.step() if item is not ENDED
        ]
        assert sorted(map(digest, items)) == sorted(whole.items.values())


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_of_a_ragged_tail_resumes_with_its_own_state(
    name: str, ranks: int, folder: Path
) -> None:
    pipe = RAGGED[name](folder)
    for rank in range(ranks):
        own = pipe.distributed(rank=rank, world_size=ranks)
        epochs = [[digest(item) for item in own] for _ in range(2)]
        for stop in range(len(epochs[0]) + 1):
            iterator = iter(first := pipe.distributed(rank=rank, world_size=ranks))
            for _ in range(stop):
                next(iterator)
            again = pipe.distributed(rank=rank, world_size=ranks)
            again.load_state_dict(first.state_dict())
            rest = [digest(item) for item in again]
            assert rest == (epochs[0][stop:] or epochs[1])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_have_come_to_the_end_of_a_counted_ragged_tail_stand_at_the_next_epoch(
    ranks: int, workers: int, folder: Path
) -> None:
    pipe = RAGGED["known"](folder)
    states = []
    for rank in range(ranks):
        loader = OneProcessLoader(
            pipe.distributed(rank=rank, world_size=ranks), num_workers=workers
        )
        assert len(list(loader)) in (20 // ranks, 20 // ranks + 1)
        states.append(loader.state_dict())
    assert all(state == pipe.state_at(0, epoch=1) for state in states)
