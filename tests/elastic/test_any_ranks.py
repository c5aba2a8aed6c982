"""Any number of ranks and workers: those that do not divide the shards share some of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from laws import Whole, given_by
from ranks import Leg, Reads

pytestmark = pytest.mark.filterwarnings("ignore:.*do not divide num_shards")

ROWS = pa.table({"x": list(range(271)), "text": ["ab" * (n % 7) for n in range(271)]})


def over_half(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 5 > 1)


def more_in_some_shards(row: dict[str, Any]) -> bool:
    return bool(row["x"] < 150 or row["x"] % 4 == 0)


def dealt(shards: int, **options: Any) -> tp.Pipeline:
    return tp.from_arrow(ROWS).sharding_filter(shards, **options).shuffle(40, seed=3)


def mixed(shards: int) -> tp.Pipeline:
    one = tp.from_arrow(ROWS).shuffle(30, seed=1)
    other = tp.from_arrow(ROWS.slice(100)).filter(over_half)
    mix = tp.mix({"one": one, "other": other}, weights={"one": 2, "other": 1})
    return mix.sharding_filter(shards).batch(3)


#: By name: the pipeline of so many shards.
PIPELINES: dict[str, Callable[[int], tp.Pipeline]] = {
    "counted": lambda s: dealt(s).batch(3),
    "in order": lambda s: tp.from_arrow(ROWS).sharding_filter(s).batch(4),
    "rows": lambda s: dealt(s).take(120),
    "stride": lambda s: dealt(s, split="stride").batch(3, drop_last=True),
    "repeat": lambda s: dealt(s).batch(7).repeat(2),
    "repeat rows": lambda s: dealt(s).repeat(2).batch(5),
    "skip": lambda s: dealt(s).batch(3).skip(5).take(100),
    "filter": lambda s: dealt(s).filter(over_half).batch(2),
    "filter batches": lambda s: dealt(s).batch(4).filter(lambda rows: rows[0]["x"] % 3 > 0),
    "filter, take": lambda s: dealt(s).filter(more_in_some_shards).batch(2).take(30),
    "filter, skip": lambda s: dealt(s).filter(more_in_some_shards).batch(2).skip(7).take(40),
    "pack": lambda s: dealt(s).tokenize("bytes").pack(16).batch(2),
    "endless": lambda s: dealt(s).filter(over_half).repeat().batch(3),
    "stream": lambda s: tp.from_iterable(range(211)).sharding_filter(s).batch(2),
    "mix": mixed,
    "shuffled again": lambda s: dealt(s).map(dict).shuffle(16, seed=3).batch(3),
    "made and shuffled": lambda s: dealt(s).tokenize("bytes").pack(16).shuffle(6).batch(2),
    "batches shuffled": lambda s: dealt(s).batch(3).shuffle(7),
    "batches of batches": lambda s: dealt(s).batch(3).batch(4),
    "a mix shuffled": lambda s: mixed(s).shuffle(9),
}
#: Of which ranks with workers of a plain DataLoader need not agree on an end.
COUNTED = ("counted", "in order", "rows", "stride", "repeat", "skip", "batches shuffled")


@cache
def whole_of(name: str, shards: int) -> Whole:
    return Whole(PIPELINES[name](shards))


def some(names: Iterable[str], ways: Sequence[Any], count: int) -> list[Any]:
    """Each pipeline in so many of the ways: each way comes about as often as any other, beside other
    pipelines."""
    step = -(-len(ways) // count)
    return [
        (name, way)
        for place, name in enumerate(names)
        for number, way in enumerate(ways)
        if (place + number) % step == 0
    ]


#: Shards, how each rank reads, numbers of ranks and of workers, and how many of these each pipeline has.
WAYS: list[tuple[int, Reads, list[tuple[int, int]], int]] = [
    (6, "pipe", [(ranks, 1) for ranks in (3, 4, 5, 7, 9)], 2),
    (24, "pipe", [(ranks, 1) for ranks in (2, 4, 5, 6, 8, 9, 24)], 1),
    (1, "pipe", [(3, 1), (4, 1)], 1),
    (6, "loader", [(5, 1), (5, 3), (7, 2), (4, 5), (9, 4)], 1),
    (6, "workers", [(1, 5), (1, 4), (2, 5), (5, 2), (7, 3)], 2),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("name", "shards", "reads", "ranks", "workers"),
    [
        (name, shards, reads, *way)
        for shards, reads, ways, count in WAYS
        for name, way in some(PIPELINES, ways, count)
        if reads != "workers" or name in (*COUNTED, "endless")
    ],
)
def test_ranks_together_give_the_sequence_of_one(
    name: str, shards: int, reads: Reads, ranks: int, workers: int
) -> None:
    """And end together; states are those of one."""
    whole = whole_of(name, shards)
    leg = Leg(PIPELINES[name](shards), ranks, workers, reads)
    found = dict(given_by(leg, whole, 0, None))
    leg.close()
    end = whole.start + whole.steps(ranks) * ranks if ranks > 1 else len(whole.items) + 10**9
    assert found == {m: item for m, item in whole.items.items() if m < end}


def states_of(name: str, ranks: int, steps: int, reads: Reads = "pipe") -> list[dict[str, Any]]:
    leg = Leg(PIPELINES[name](6), ranks, 2, reads)
    leg.begin()
    for _ in range(steps):
        leg.step()
    try:
        return leg.states()
    finally:
        leg.close()


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "way"),
    some(PIPELINES, [(ranks, reads) for reads in ("pipe", "loader") for ranks in (4, 5, 7)], 1),
)
def test_a_state_is_the_text_that_one_rank_saves_there(name: str, way: tuple[int, Any]) -> None:
    ranks, reads = way
    (one,) = states_of(name, 1, 2 * ranks)
    assert tp.merge_states(states_of(name, ranks, 2, reads)) == one


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, int, list[int], list[tuple[int, Reads, int]]]:
    legs = draw(st.permutations([1, 7, 5, 8, 3]))
    reads: Any = st.sampled_from(["pipe", "loader"])
    return (
        draw(st.sampled_from(sorted(PIPELINES))),
        draw(st.sampled_from([1, 6, 24])),
        draw(st.lists(st.integers(0, 4), min_size=5, max_size=5)),
        [(ranks, draw(reads), draw(st.integers(1, 3))) for ranks in legs],
    )


@examples(60, often=4)
@given(runs())
def test_a_run_goes_on_on_any_number_of_ranks(
    run: tuple[str, int, list[int], list[tuple[int, Reads, int]]],
) -> None:
    name, shards, stops, legs = run
    pipe = PIPELINES[name](shards)
    whole, state, m = whole_of(name, shards), None, 0
    for steps, (ranks, reads, workers) in zip(stops, legs, strict=True):
        steps = min(steps, whole.steps(ranks, m))
        loaded = None if state is None else [state] * ranks
        leg = Leg(pipe, ranks, workers, reads, loaded)
        for at, item in given_by(leg, whole, m, steps):
            assert item == whole.items[at]
        state = json.loads(json.dumps(tp.merge_states(leg.states())))
        leg.close()
        if state["epoch"]:
            return
        m = state["batches"]


def test_a_warning_says_what_it_costs_and_what_would_do(nothing_warned_of: None) -> None:
    cases = {
        (24, 7): "7 ranks do not divide num_shards=24: each reads 24 shards where 4 would do; "
        "num_shards=21 or 28 would",
        (6, 24): "24 ranks do not divide num_shards=6: each shard is read 4 times; num_shards=24 would",
    }  # fmt: skip
    for (shards, ranks), said in cases.items():
        with pytest.warns(UserWarning, match="do not divide") as found:
            next(iter(dealt(shards).batch(2).distributed(rank=0, world_size=ranks)))
        assert str(found[0].message) == said


def test_stages_run_only_for_a_ranks_own_batches_where_counts_allow() -> None:
    made: list[int] = []

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        made.append(row["x"])
        return row

    pipe = dealt(6).map(noted).batch(3).distributed(rank=2, world_size=5)
    own = [row["x"] for batch in pipe for row in batch]
    assert sorted(made) == sorted(own)


def test_a_rank_may_be_a_number_of_numpy() -> None:
    made = dealt(4).batch(3)
    pipe = made.distributed(rank=np.int64(1), world_size=np.int64(2))  # type: ignore[arg-type]
    next(iter(pipe))
    state = json.dumps(pipe.state_dict())
    resumed = made.distributed(rank=1, world_size=2)
    resumed.load_state_dict(json.loads(state))
    assert next(iter(resumed)) == [*made.distributed(rank=1, world_size=2)][1]


@pytest.mark.parametrize(("shards", "workers"), [(1, 0), (6, 0), (6, 2)])
def test_so_do_the_last_stages_where_batches_are_not_counted(
    shards: int, workers: int, tmp_path: Path
) -> None:
    calls = tmp_path / "calls.txt"

    def collated(rows: list[dict[str, Any]]) -> str:
        with calls.open("a") as file:  # processes add lines
            file.write(f"collated {[row['x'] for row in rows]}\n")
        return str([row["x"] for row in rows])

    def mapped(batch: str) -> str:
        with calls.open("a") as file:
            file.write(f"mapped {batch}\n")
        return batch

    pipe = dealt(shards).filter(over_half).repeat().batch(3)
    made = pipe.collate(collated).map(mapped)
    own = list(islice(tp.Loader(made.distributed(rank=2, world_size=5), num_workers=workers), 15))
    called = calls.read_text().splitlines()
    whole = [str([row["x"] for row in batch]) for batch in islice(pipe, 400)]
    assert own == whole[2:75:5]
    for name in ("collated ", "mapped "):
        found = [line.removeprefix(name) for line in called if line.startswith(name)]
        assert set(own) <= set(found) <= set(whole[2::5])
        assert len(found) == len(set(found))
