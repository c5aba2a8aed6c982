"""``take`` and ``skip`` where counts are unknown: the first items of the sequence, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import trainpipes as tp
from drawn import examples
from resuming import EVERYWHERE, check_resume, goes_on_exactly

ROWS = tp.from_dataset([{"id": n} for n in range(100)])
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*do not divide num_shards"),
    pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing"),
]


def of_first_shards(row: dict[str, Any]) -> bool:
    """Rows in file order are dealt in spans, so that most of these are in the first ones."""
    return bool(row["id"] < 25)


def batches(shards: int = 4, tail: Any = "even") -> tp.Pipeline:
    return ROWS.sharding_filter(shards, tail=tail).filter(of_first_shards).batch(1)


SEQUENCE = list(batches())


@pytest.mark.parametrize("count", [0, 3, 20, 24, 25, 30])
def test_the_first_items_are_taken_where_shards_have_ended(count: int) -> None:
    assert list(batches().take(count)) == SEQUENCE[:count]
    assert list(batches().skip(count)) == SEQUENCE[count:]
    assert list(batches().skip(count).take(7)) == SEQUENCE[count : count + 7]


def test_rows_that_are_shuffled_are_taken_over_all_shards() -> None:
    rows = ROWS.filter(of_first_shards).sharding_filter(4).shuffle(10)
    assert list(rows.take(20)) == list(rows)[:20]


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", [{}, {"threads": 0}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize(("shards", "times"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_functions_after_skip_are_not_called_for_what_it_leaves_out(
    shards: int, times: int, options: dict[str, Any]
) -> None:
    rows = ROWS.sharding_filter(shards).filter(lambda row: row["id"] % 2 == 0)
    kept = rows.batch(5).skip(4).repeat(times)
    bad = {row["id"] for batch in rows.batch(5).take(4) for row in batch}

    def of_good_rows(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert not bad & {row["id"] for row in batch}
        return batch

    loader = tp.Loader(kept.map(of_good_rows), multiprocessing_context="fork", **options)
    assert list(loader) == list(kept)
    if not options or EVERYWHERE:
        goes_on_exactly(lambda: kept.map(of_good_rows))


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("call", [2, 7, 11])
def test_an_error_in_what_skip_leaves_out_moves_nothing(
    call: int, in_steps: bool, raised: type[BaseException]
) -> None:
    calls = 0

    def keeps(row: dict[str, Any]) -> bool:
        nonlocal calls
        calls += 1
        if calls == call:
            raise raised
        return row["id"] % 3 > 0

    def loader() -> tp.Loader:
        return tp.Loader(ROWS.sharding_filter(4).filter(keeps).batch(2).skip(3), threads=0)

    def given(of: tp.Loader) -> Iterator[Any]:
        return map(list, tp.steps(of, batches=2)) if in_steps else iter(of)

    calls = call
    expected = list(given(loader()))
    failing, calls = loader(), 0
    items = given(failing)
    with pytest.raises(raised):
        next(items)
    resumed = loader()
    resumed.load_state_dict(failing.state_dict())
    assert list(given(resumed)) == expected
    if not in_steps or raised is KeyboardInterrupt:  # an error comes again where ranks end together
        assert list(items) == expected


def test_workers_of_a_loader_give_the_same() -> None:
    pipe = batches().skip(10).take(7)
    assert list(tp.Loader(pipe, num_workers=3)) == SEQUENCE[10:17]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_of_a_plain_loader_give_the_same(workers: int) -> None:
    pipe = batches().skip(5).take(15)
    assert list(DataLoader(pipe, batch_size=None, num_workers=workers)) == SEQUENCE[5:20]


@examples(40)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_ranks_that_end_apart_give_each_item_once(
    ranks: int, shards: int, skip: int, take: int
) -> None:
    whole = list(batches(shards))
    pipe = batches(shards, "uneven").skip(skip).take(take)
    each = [list(pipe.distributed(rank=rank, world_size=ranks)) for rank in range(ranks)]
    taken = [item for items in each for item in items]
    assert sorted(map(str, taken)) == sorted(map(str, whole[skip : skip + take]))


@pytest.mark.parametrize("tail", ["even", "uneven"])
def test_it_resumes(tail: str) -> None:
    for pipe in (batches(tail=tail).take(20), batches(tail=tail).skip(6).take(9)):
        check_resume(pipe, epochs=2, processes=0)


def test_ranks_that_end_apart_resume_on_as_many() -> None:
    pipe = batches(6, "uneven").skip(4).take(15)
    for rank in range(4):
        loader = tp.Loader(pipe.distributed(rank=rank, world_size=4))
        expected, later = list(loader), list(loader)
        for stop in range(len(expected) + 1):
            loader = tp.Loader(pipe.distributed(rank=rank, world_size=4))
            items = iter(loader)
            assert [next(items) for _ in range(stop)] == expected[:stop]
            again = tp.Loader(pipe.distributed(rank=rank, world_size=4))
            again.load_state_dict(loader.state_dict())
            left = list(again)
            assert left == expected[stop:] or (stop == len(expected) and left == later)


def test_a_shard_with_less_than_its_share_under_repeat_is_an_error() -> None:
    """Shards go on by themselves there, and do not know how many items others have."""
    with pytest.raises(
        tp.DataError, match=r"take\(20\): under repeat\(\).*share, 5 items.*shard 1"
    ):
        list(batches().take(20).repeat(2))
    even = ROWS.sharding_filter(4).filter(lambda row: row["id"] % 2 == 0).batch(1).take(20)
    assert sorted(map(str, even.repeat(2))) == sorted(map(str, list(even) * 2))
