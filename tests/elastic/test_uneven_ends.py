"""``tail="uneven"``: ranks end at different steps, and what a resume gives those that have ended."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import examples

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*do not divide num_shards"),
    pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing"),
]

#: Everything that saves a state, of one rank's pipeline.
LOADERS: dict[str, Callable[[tp.Pipeline], Any]] = {
    "pipeline": lambda pipe: pipe,
    "Loader": tp.Loader,
    "StatefulDataLoader": lambda pipe: StatefulDataLoader(pipe, batch_size=None),
}


def rows(shards: int, count: int = 60, filtered: bool = True) -> tp.Pipeline:
    pipe = tp.from_dataset(range(count)).sharding_filter(shards, tail="uneven").shuffle(20)
    return pipe.filter(lambda row: row % 3 > 0) if filtered else pipe


def on_ranks(pipe: tp.Pipeline, ranks: int, kind: str = "Loader") -> list[Any]:
    return [LOADERS[kind](pipe.distributed(rank=n, world_size=ranks)) for n in range(ranks)]


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("kind", ["pipeline", "Loader"])
def test_a_rank_that_has_ended_waits_for_the_others_after_a_resume(
    kind: str, filtered: bool
) -> None:
    """Of four rows on three ranks one is left after a step."""
    pipe = rows(3, 4, filtered=False).batch(1)
    if filtered:
        pipe = tp.from_dataset(range(4)).sharding_filter(3, tail="uneven").filter(is_row).batch(1)
    loaders = on_ranks(pipe, 3, kind)
    taken = [next(iter(loader)) for loader in loaders]
    state = tp.merge_states([loader.state_dict() for loader in loaders])
    again = on_ranks(pipe, 3, kind)
    for loader in again:
        loader.load_state_dict(state)
    left = [list(loader) for loader in again]
    assert sorted(map(len, left)) == [0, 0, 1]
    assert sorted(row for batch in (*taken, *chain(*left)) for row in batch) == [*range(4)]
    epoch = [list(loader) for loader in on_ranks(pipe, 3, kind)]
    assert sorted(len(list(loader)) for loader in again) == sorted(map(len, epoch)) == [1, 1, 2]


@pytest.mark.parametrize(("ranks", "steps"), [(3, 18), (2, 27)])
def test_that_states_do_not_merge_once_a_shard_has_ended_is_said(ranks: int, steps: int) -> None:
    """No rank has ended; three ranks share four shards, and pass the turns of the one that has. Of two, one
    passes them sooner than the other.
    """
    pipe = tp.from_dataset(range(400)).sharding_filter(4, tail="uneven").shuffle(20)
    keeps = in_first_shards if ranks == 3 else in_other_shards
    loaders = on_ranks(pipe.filter(keeps).batch(4), ranks)
    for loader in loaders:
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
    own = [loader.state_dict() for loader in loaders]
    with pytest.raises(
        tp.StateError, match=r"do not merge once a shard has ended: load that of each"
    ):
        tp.merge_states(own)


def in_first_shards(row: int) -> bool:
    return row < 210 or row % 20 == 0


def in_other_shards(row: int) -> bool:
    return row > 80


def is_row(row: int) -> bool:
    return row >= 0


@examples(60)
@given(
    st.integers(1, 13),
    st.integers(1, 24),
    st.sampled_from(sorted(LOADERS)),
    st.booleans(),
    st.data(),
)
def test_a_rank_resumes_from_its_own_state_at_any_step(
    ranks: int, shards: int, kind: str, filtered: bool, data: st.DataObject
) -> None:
    """After its last batch too, and after steps in which only others had one."""
    pipe = rows(shards, filtered=filtered).batch(2)
    rank = data.draw(st.integers(0, ranks - 1))
    own = pipe.distributed(rank=rank, world_size=ranks)
    whole = LOADERS[kind](own)
    epoch, later = list(whole), list(whole)
    stop = data.draw(st.integers(0, len(epoch) + 2))
    loader = LOADERS[kind](pipe.distributed(rank=rank, world_size=ranks))
    items = iter(loader)
    for _ in range(stop):
        next(items, None)
    again = LOADERS[kind](pipe.distributed(rank=rank, world_size=ranks))
    again.load_state_dict(loader.state_dict())
    left = list(again)
    assert left == epoch[stop:] or (stop >= len(epoch) and left == later)


@examples(40)
@given(st.integers(1, 13), st.sampled_from([1, 2, 3, 4, 6, 12, 24]), st.booleans(), st.data())
def test_merged_states_go_on_on_other_ranks_up_to_the_end(
    shards_per: int, ranks: int, filtered: bool, data: st.DataObject
) -> None:
    """Each row comes once, before the stop or after it."""
    pipe = rows(24, filtered=filtered).batch(2)
    loaders = on_ranks(pipe, ranks)
    items = [iter(loader) for loader in loaders]
    steps = data.draw(st.integers(0, 30 // ranks))
    taken = [batch for _ in range(steps) for each in items for batch in islice(each, 1)]
    states = [loader.state_dict() for loader in loaders]
    if len({state["epoch"] for state in states}) > 1:  # counted, and after the last step
        return
    state = tp.merge_states(states)
    again = on_ranks(pipe, shards_per)
    for loader in again:
        loader.load_state_dict(state)
    left = [batch for loader in again for batch in loader]
    whole = sorted(map(str, list(pipe)))
    if len(taken) < len(whole):
        assert sorted(map(str, [*taken, *left])) == whole


@pytest.mark.sample(10)
@pytest.mark.parametrize(("before", "after"), [(7, 7), (5, 5), (7, 14), (6, 4), (5, 1)])
@pytest.mark.parametrize("stop", [0, 1, 3, 100])
def test_queues_on_any_ranks_load_what_they_saved(before: int, after: int, stop: int) -> None:
    pipe = rows(24)
    queues = [tp.WorkQueue(loader, epochs=1) for loader in on_ranks(pipe, before)]
    done = [row for queue in queues for row in worked(queue, stop)]
    state = tp.merge_states([queue.state_dict() for queue in queues])
    for queue in (tp.WorkQueue(loader, epochs=1) for loader in on_ranks(pipe, after)):
        queue.load_state_dict(state)
        done += worked(queue)
    assert sorted(done) == [row for row in range(60) if row % 3 > 0]


def worked(queue: tp.WorkQueue, most: int | None = None) -> list[int]:
    """The items of a queue, done one after the other."""
    done = []
    for work in islice(iter(queue.get, None), most):
        queue.done(work.key)
        done.append(work.item)
    return done
