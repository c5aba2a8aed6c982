"""Every stage gives the same sequence on any number of ranks, and resumes on any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from every_stage import ENDLESS, FINITE, public_stages
from laws import Whole, assert_ranks_agree, assert_resumes_elsewhere, world_sizes
from ranks import ENDED, Leg, OneProcessLoader, Reads
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings("ignore:(pin|to)\\(.*:UserWarning")

Make = Callable[[Path], tp.Pipeline]

MAKES: dict[str, Make] = {**FINITE, **ENDLESS}


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", MAKES)
def test_ranks_together_give_the_sequence_of_one_and_others_go_on_with_it(
    name: str, folder: Path
) -> None:
    pipe, turn = MAKES[name](folder), list(MAKES).index(name)
    resumed = assert_resumes_elsewhere(pipe, turn + 1)
    if " / " not in name or not resumed:
        assert_ranks_agree(pipe, turn)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_the_laws_hold_for_every_number_of_ranks_in_every_way(name: str, folder: Path) -> None:
    assert_ranks_agree(MAKES[name](folder))
    assert_resumes_elsewhere(MAKES[name](folder))


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
        tp.from_iterable(_count).sharding_filter(12, tail="uneven").shuffle(7).batch(4)
    ),
}


def sharded(folder: Path) -> tp.Pipeline:
    dealt = FINITE["read_parquet"](folder).stages[:2]
    return tp.Pipeline(dealt).sharding_filter(12, tail="uneven").shuffle(9, seed=3)


def _some(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 5 > 1)


def _first(batch: list[Any]) -> bool:
    return bool(batch[0]["x"] % 4)


def _count() -> Iterator[int]:
    return iter(range(61))


#: How each rank reads, ranks and workers.
WAYS: list[tuple[Reads, int, int]] = [
    ("loader", 1, 3),
    ("pipe", 2, 1),
    ("loader", 2, 3),
    ("loader", 3, 2),
    ("pipe", 4, 1),
]


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_tail_leaves_nothing_out(name: str, folder: Path) -> None:
    pipe = RAGGED[name](folder)
    whole = Whole(pipe)
    for reads, ranks, workers in WAYS:
        leg = Leg(pipe, ranks, workers, reads)
        leg.begin()
        items = [
            item for _ in range(len(whole.items) + 1) for item in leg.step() if item is not ENDED
        ]
        assert sorted(map(digest, items)) == sorted(whole.items.values())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("known", 3), ("filtered", 2), ("filtered", 4), ("filtered batches", 3), ("stream", 4)],
)
def test_each_rank_of_a_ragged_tail_resumes_with_its_own_state(
    name: str, ranks: int, folder: Path
) -> None:
    pipe = RAGGED[name](folder)
    for rank in range(ranks):
        own = pipe.distributed(rank=rank, world_size=ranks)
        epochs = [[digest(item) for item in own] for _ in range(2)]
        for stop in {*range(0, len(epochs[0]), 4), len(epochs[0])}:
            iterator = iter(first := pipe.distributed(rank=rank, world_size=ranks))
            for _ in range(stop):
                next(iterator)
            again = pipe.distributed(rank=rank, world_size=ranks)
            again.load_state_dict(first.state_dict())
            rest = [digest(item) for item in again]
            left = epochs[0][stop:]  # where nothing is, others may have more of the epoch
            assert rest == left or (not left and rest == epochs[1])


@pytest.mark.parametrize(("ranks", "workers"), [(2, 2), (3, 0), (4, 2)])
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
