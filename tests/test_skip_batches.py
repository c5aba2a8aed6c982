"""Batches that a loader is told to leave out: the same ones on any number of ranks, kept in the state."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from elastic.ranks import InTurn
from trainpipes.testing import check_resume, digest

SHARDS = 4


def dealt(rows: int = 203) -> tp.Pipeline:
    tokens = [[x + k for k in range(1 + x % 5)] for x in range(rows)]
    table = pa.table({"x": range(rows), "input_ids": tokens})
    return tp.from_arrow(table).sharding_filter(SHARDS).shuffle(15, seed=2)


def some(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 3)


def all_of_them(row: Any) -> bool:
    return True


PIPES: dict[str, Callable[[], tp.Pipeline]] = {
    "counted": lambda: dealt().batch(6),
    "twice": lambda: dealt(90).batch(6).repeat(2),
    "endless": lambda: dealt(90).batch(6).repeat(),
    "rolling": lambda: dealt(90).repeat().batch(6),
    "rolling, filtered": lambda: dealt(90).filter(some, version="1").repeat().batch(6),
    "packed": lambda: dealt().pack(8, buffer_size=16).repeat().batch(3).pad_collate(),
    "mixed": lambda: tp.mix(
        {"a": tp.from_dataset(range(90)).shuffle(9), "b": tp.from_dataset(range(60))},
        weights={"a": 2, "b": 1},
    ).sharding_filter(SHARDS).repeat().batch(5),
}  # fmt: skip
MOST = 44


def whole(name: str) -> list[str]:
    """What one rank gives that leaves nothing out, by number m."""
    return [digest(batch) for batch in islice(tp.Loader(PIPES[name](), threads=0), MOST)]


def left(batches: list[str], *named: int) -> list[str]:
    """What is left of a whole sequence, by the rule."""
    gone: set[int] = set()
    for m in sorted(named):
        if m not in gone:
            gone.update(range(m, m + SHARDS))
    return [batch for m, batch in enumerate(batches) if m not in gone]


class Ranks:
    """All ranks of a run, in this process."""

    def __init__(
        self, name: str, world: int, workers: int, skip: Any, state: dict[str, Any] | None
    ) -> None:
        self.loaders = []
        for rank in range(world):
            pipe = PIPES[name]().distributed(rank=rank, world_size=world)
            loader = tp.Loader(
                pipe, skip_batches=skip, num_workers=workers, threads=None if workers else 0
            )
            if workers:
                loader._workers = InTurn(
                    lambda pipe=pipe: pipe.stages, lambda: None, workers, 2, False, None, {}
                )
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            self.loaders.append(loader)
        self.iterators = [iter(loader) for loader in self.loaders]

    def steps(self, m: int, count: int) -> list[str]:
        """What all ranks give in so many steps from delivered micro-batch ``m`` on, in the order of m."""
        found: list[str] = []
        world = len(self.loaders)
        for _ in range(count):
            step = [digest(next(iterator)) for iterator in self.iterators]
            found += [step[(m + k) % world] for k in range(world)]
        return found

    def state(self) -> dict[str, Any]:
        return tp.merge_states([loader.state_dict() for loader in self.loaders])


@given(
    name=st.sampled_from(list(PIPES)),
    named=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    later=st.lists(st.integers(0, 20), max_size=2),
    legs=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0, 2]), st.integers(0, 4)),
        min_size=1,
        max_size=3,
    ),
)
@examples(50)
def test_the_rest_is_the_same_on_any_number_of_ranks_and_after_any_resume(
    name: str, named: list[int], later: list[int], legs: list[tuple[int, int, int]]
) -> None:
    expected = left(whole(name), *named)
    given_: list[str] = []
    state: dict[str, Any] | None = None
    for world, workers, count in legs:
        # Only the first loader is told: from there on the state knows.
        ranks = Ranks(name, world, workers, named if state is None else (), state)
        count = min(count, (len(expected) - len(given_)) // world)
        given_ += ranks.steps(len(given_), count)
        if count or state is None:  # who has not begun has the state that was loaded
            state = ranks.state()
    assert given_ == expected[: len(given_)]
    assert state is not None
    if later:  # of what is told later, what is behind by then changes nothing
        at = len(given_)
        numbers = [m for m, batch in enumerate(whole(name)) if batch]
        kept = left([str(m) for m in numbers], *named)
        reached = int(kept[at - 1]) + 1 if at else 0
        told = [m for m in later if m >= reached]
        ranks = Ranks(name, 1, 0, later, state)
        rest = left(whole(name), *named, *told)
        more = min(8, len(rest) - at)
        assert ranks.steps(at, more) == rest[at : at + more]


@pytest.mark.parametrize("name", PIPES)
def test_a_loader_that_leaves_batches_out_resumes_exactly(name: str) -> None:
    endless = PIPES[name]()._session.plan.chain.endless
    report = check_resume(
        lambda: tp.Loader(PIPES[name](), skip_batches=[3, (0, 9), (1, 2)], threads=0),
        epochs=2, limit=16 if endless else None, every=3, processes=0,
    )  # fmt: skip
    assert report.items[0] >= 16


def numbers(loader: tp.Loader) -> list[int]:
    return [loader.provenance().m for _ in loader]


def test_len_is_last_and_state_know_what_is_left_out_at_an_epochs_end() -> None:
    pipe = tp.from_dataset(range(101)).sharding_filter(4).batch(4)  # 26 batches
    # of the last two, all are left out; of the epoch before, four
    loader = tp.Loader(pipe, skip_batches=[24, (1, 3)], with_provenance=True)
    assert len(loader) == 24
    batches = iter(loader)
    given = []
    for batch in batches:
        given.append((batch, batches.is_last(), loader.state_dict()["epoch"]))
        assert len(loader) == 24
    assert [last for _, last, _ in given] == [False] * 23 + [True]
    assert [epoch for *_, epoch in given] == [0] * 23 + [1]
    assert loader.state_dict()["m"] == 0
    assert len(loader) == 22
    assert numbers(loader) == [0, 1, 2, *range(7, 26)]
    assert len(loader) == 26
    assert numbers(loader) == list(range(26))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_len_is_what_each_rank_gives(world: int) -> None:
    pipe = tp.from_dataset(range(101)).sharding_filter(4).batch(4)
    for skip in ([0], [7], [22], [25], [5, 20], list(range(26))):
        counts = set()
        for rank in range(world):
            own = pipe.distributed(rank=rank, world_size=world)
            loader = tp.Loader(own, skip_batches=skip)
            length = len(loader)
            assert length == len(list(loader))
            counts.add(length)
        assert len(counts) == 1


def test_without_sharding_just_the_batch_that_is_named_is_left_out() -> None:
    loader = tp.Loader(tp.from_dataset(range(20)).batch(4), skip_batches=[1, 3])
    assert list(loader) == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]


def test_a_batch_that_fails_can_be_left_out_where_batches_are_counted() -> None:
    def check(x: int) -> int:
        if x == 9:
            raise LookupError("cannot take row 9")
        return x

    pipe = tp.from_dataset(range(20)).map(check, version="1").batch(4)
    loader = tp.Loader(pipe, with_provenance=True)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(LookupError):
        next(batches)
    failed = loader.provenance().m + 1
    again = tp.Loader(pipe, skip_batches=[failed])
    again.load_state_dict(loader.state_dict())
    assert list(again) == [[12, 13, 14, 15], [16, 17, 18, 19]]


def test_a_state_from_before_keeps_the_list_and_one_may_take_it_back() -> None:
    pipe = dealt().batch(6)
    loader = tp.Loader(pipe, skip_batches=[9])
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    plain = tp.Loader(pipe, with_provenance=True)
    plain.load_state_dict(state)
    assert numbers(plain)[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 13, 14]
    plain.load_state_dict(state, allow_changes=["skip_batches"])
    assert numbers(plain)[:10] == list(range(1, 11))
    other = tp.Loader(pipe, with_provenance=True, skip_batches=[4])
    other.load_state_dict(state)
    assert numbers(other)[:7] == [1, 2, 3, 8, 13, 14, 15]
    past = list(islice(batches, 12))
    assert len(past) == 12
    plain.load_state_dict(loader.state_dict(), allow_changes=["skip_batches"])
    assert numbers(plain)[0] == 17  # what was left out stays so


def test_the_pipeline_itself_goes_on_from_such_a_state() -> None:
    pipe = dealt().batch(6)
    loader = tp.Loader(pipe, skip_batches=[9, (1, 2)])
    epochs = [list(loader), list(loader)]
    again = dealt().batch(6)
    fresh = tp.Loader(dealt().batch(6), skip_batches=[9, (1, 2)])
    again.load_state_dict(fresh.state_dict())
    assert [list(again), list(again)] == epochs


def test_other_loaders_of_the_pipeline_leave_nothing_out() -> None:
    pipe = dealt().batch(6)
    first = tp.Loader(pipe, skip_batches=[0])
    list(first)
    assert len(list(tp.Loader(pipe))) == len(pipe) == len(list(first)) == len(list(pipe)) == 34


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_are_told_anew(workers: int) -> None:
    pipe = dealt().batch(6)
    loader = tp.Loader(
        pipe, num_workers=workers, persistent_workers=workers > 0, skip_batches=[9, (1, 2)]
    )
    expected = tp.Loader(pipe, skip_batches=[9, (1, 2)], threads=0)
    for _ in range(3):
        assert list(loader) == list(expected)
    other = tp.Loader(pipe, skip_batches=[(3, 5), (4, 1)], threads=0)
    other.load_state_dict(expected.state_dict())
    loader.load_state_dict(other.state_dict())
    for _ in range(2):
        assert list(loader) == list(other)


def test_what_is_left_out_of_the_next_epoch_is_not_shown_at_the_end_of_one() -> None:
    rows = tp.from_dataset([f"row {n:02}" for n in range(16)])
    loader = tp.Loader(rows.filter(all_of_them, version="1").batch(4), skip_batches=[(1, 0)])
    ended = list(loader)
    resumed = tp.Loader(loader.pipeline, skip_batches=[(1, 0)])
    resumed.load_state_dict(loader.state_dict())
    shown = resumed.show().text()
    assert len(ended) == 4
    assert "row 04" in shown
    assert "row 00" not in shown
    assert resumed.peek() == next(iter(resumed))


def test_locate_counts_what_is_delivered_and_tells_the_number_in_the_whole_sequence() -> None:
    pipe = dealt().batch(6)
    loader = tp.Loader(pipe, skip_batches=[9], with_provenance=True)
    for k, batch in enumerate(loader):
        found = tp.locate(loader, k)
        assert found.batch == batch
        assert found.m == loader.provenance().m == (k if k < 9 else k + SHARDS)
        assert tp.locate(pipe, found.m, epoch=0).batch == batch


def test_ranks_that_leave_out_others_do_not_merge() -> None:
    pipe = dealt().filter(some, version="1").repeat().batch(6)
    states = []
    for rank, skip in ((0, [3]), (1, [4])):
        loader = tp.Loader(pipe.distributed(rank=rank, world_size=2), skip_batches=skip)
        next(iter(loader))
        states.append(loader.state_dict())
    with pytest.raises(tp.StateError, match="skip_batches: state 0 leaves out"):
        tp.merge_states(states)


def test_the_batch_size_does_not_change_in_an_epoch_of_which_batches_are_left_out() -> None:
    loader = tp.Loader(dealt().batch(6), skip_batches=[3])
    next(iter(loader))
    larger = tp.Loader(dealt().batch(7))
    with pytest.raises(tp.StateError, match="are skipped"):
        larger.load_state_dict(loader.state_dict(), allow_changes=["batch_size"])
    loader = tp.Loader(dealt().batch(6), skip_batches=[3])
    list(loader)
    larger.load_state_dict(loader.state_dict(), allow_changes=["batch_size"])
    assert len(next(iter(larger))) == 7


@pytest.mark.parametrize("wrong", [3, "34", [-1], [1.5], [True], [(1, 2, 3)], [(0, -1)], [None]])
def test_what_is_no_list_of_batches_is_refused(wrong: Any) -> None:
    with pytest.raises(tp.ConfigError, match="skip_batches"):
        tp.Loader(tp.from_dataset(range(9)), skip_batches=wrong)


def test_a_batch_beyond_the_epoch_is_refused() -> None:
    loader = tp.Loader(tp.from_dataset(range(20)).batch(4), skip_batches=[5])
    with pytest.raises(tp.ConfigError, match=r"have 5, got m = 5 of epoch 0.*pair"):
        next(iter(loader))


@pytest.mark.parametrize("wrong", [3, [3], [[1]], [[0, -1]], [[1, 2], [0, 3]], {"a": 1}])
def test_a_damaged_list_in_a_state_is_refused(wrong: Any) -> None:
    pipe = tp.from_dataset(range(20)).batch(4)
    session = pipe._session
    position = session.start_of(0)
    position.notes = {"skip_batches": wrong}
    from trainpipes.state.format import render

    with pytest.raises(tp.StateError, match="skip_batches: damaged"):
        pipe.load_state_dict(render(position, session.plan.identity))


def test_a_position_known_by_its_count_alone_is_found_with_the_list() -> None:
    loader = tp.Loader(dealt().batch(6), skip_batches=[9])
    batches = iter(loader)
    for _ in range(12):
        next(batches)
    pipe = dealt().batch(6)
    pipe.load_state_dict(tp.Loader(pipe, skip_batches=[9]).state_dict())
    assert pipe.state_at(12) == loader.state_dict()
