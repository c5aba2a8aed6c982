"""Sources may come and go, and weights change, between two runs."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp


def rows(name: str, count: int = 200) -> tp.Pipeline:
    table = pa.table({"who": [f"{name}{n}" for n in range(count)], "input_ids": [[1]] * count})
    return tp.from_arrow(table).shuffle(20, seed=1)


def mixed(weights: dict[str, float], **options: Any) -> tp.Pipeline:
    sources = {name: rows(name) for name in weights}
    options = {"stop": "repeat", **options}
    return tp.mix(sources, weights=weights, **options).sharding_filter(4).batch(5)


def flat(batches: Any) -> list[str]:
    return [row["who"] for batch in batches for row in batch]


def saved(pipe: tp.Pipeline, batches: int) -> tuple[list[str], dict[str, Any]]:
    iterator = iter(pipe)
    found = flat(islice(iterator, batches))
    return found, json.loads(json.dumps(iterator.state_dict()))


def go_on(pipe: tp.Pipeline, state: dict[str, Any], batches: int, *allowed: str) -> list[str]:
    pipe.load_state_dict(state, allow_changes=allowed)
    return flat(islice(iter(pipe), batches))


OLD = {"a": 0.5, "b": 0.3, "c": 0.2}


@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize(
    "new", [{"a": 0.2, "b": 0.6, "c": 0.2}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1, "d": 2}]
)
def test_sources_that_stay_go_on_where_they_stand(new, by):
    before, state = saved(mixed(OLD, weight_by=by), 17)
    after = go_on(mixed(new, weight_by=by), state, 40, "mix")
    for name in new:
        own = [n for n in before + after if n[0] == name]
        assert len(own) == len(set(own)), name  # none is lost or comes twice in its first epoch
        assert len(own) < 200
    total = sum(new.values())
    for name, weight in new.items():
        count = sum(n[0] == name for n in after)
        assert abs(count - len(after) * weight / total) <= 4  # one row in each shard
    assert all(n[0] in new for n in after)
    if "d" in new:
        alone = {n for n in after if n[0] == "d"}
        first = flat(islice(iter(rows("d").sharding_filter(4).batch(1)), 200))
        assert alone <= set(first[: len(alone) + 16])


def test_all_topologies_go_on_alike_after_a_change():
    _, state = saved(mixed(OLD), 8)
    new = {"a": 1, "c": 3}
    whole = go_on(mixed(new), state, 12, "mix")
    found = [
        go_on(mixed(new).distributed(rank=rank, world_size=2), state, 6, "mix") for rank in range(2)
    ]
    turns = [found[step % 2][5 * (step // 2) : 5 * (step // 2) + 5] for step in range(12)]
    assert [name for batch in turns for name in batch] == whole
    loader = tp.Loader(mixed(new), num_workers=2)
    loader.load_state_dict(state, allow_changes=["mix"])
    assert flat(islice(iter(loader), 12)) == whole


def test_a_changed_run_resumes_without_allowing_anything_more():
    _, state = saved(mixed(OLD), 8)
    new = {"a": 1, "d": 3}
    whole = go_on(mixed(new), state, 12, "mix")
    pipe = mixed(new)
    pipe.load_state_dict(state, allow_changes=["mix"])
    for stop in (0, 1, 7):
        iterator = iter(again := mixed(new))
        again.load_state_dict(state, allow_changes=["mix"])
        iterator = iter(again)
        list(islice(iterator, stop))
        assert go_on(mixed(new), iterator.state_dict(), 12 - stop) == whole[5 * stop :]


def test_another_schedule_goes_on_at_the_rows_drawn_so_far():
    _, state = saved(mixed(OLD), 20)  # 100 rows
    steps = [(0, {"a": 1, "b": 0, "c": 0}), (140, {"a": 0, "b": 1, "c": 0})]
    sources = {name: rows(name) for name in OLD}
    pipe = tp.mix(sources, schedule=steps, stop="repeat").sharding_filter(4).batch(5)
    found = go_on(pipe, state, 16, "mix")
    assert {n[0] for n in found[:40]} == {"a"}
    assert {n[0] for n in found[40:]} == {"b"}


def test_a_source_that_had_left_comes_back_with_more_repetitions():
    def make(times: int) -> tp.Pipeline:
        sources = {"a": rows("a", 400), "b": rows("b", 8)}
        return tp.mix(
            sources, weights={"a": 1, "b": 1}, max_epochs={"b": times}, stop="repeat"
        ).batch(10)

    before, state = saved(make(1), 3)
    assert sum(n[0] == "b" for n in before) == 8
    assert {n[0] for n in go_on(make(1), state, 3)} == {"a"}
    assert sum(n[0] == "b" for n in go_on(make(3), state, 9, "mix")) == 16


ALLOWED = r"; .*allow_changes=\['mix'\]"


@pytest.mark.parametrize(
    ("pipe", "said"),
    [
        (mixed({"a": 1, "b": 1}), r"data/sources/c: saved \{.*\}, now null" + ALLOWED),
        (mixed({**OLD, "a": 0.6}), "stages/mix/weights/a: saved 0.5, now 0.6" + ALLOWED),
        (mixed(OLD, output_column="x"), 'stages/mix/output_column: saved null, now "x"'),
    ],
)
def test_a_change_is_refused_unless_it_is_allowed(pipe, said):
    _, state = saved(mixed(OLD), 3)
    with pytest.raises(tp.StateError, match=said):
        pipe.load_state_dict(state)


@pytest.mark.parametrize(
    ("pipe", "said"),
    [
        (
            mixed(OLD, weight_by="tokens"),
            'stages/mix/weight_by: saved "rows", now "tokens of input_ids"; allow_changes',
        ),
        (mixed(OLD, stop="all_exhausted"), "stages/mix/stop: saved"),
        (
            tp.mix({"a": rows("a", 100), "b": rows("b")}, weights={"a": 1, "b": 1}, stop="repeat")
            .sharding_filter(4).batch(5),
            "data/sources/a/rows: saved 200, now 100; .* give a changed source a new name",
        ),
        (
            tp.mix({"a": rows("a").select("who"), "b": rows("b")}, weights={"a": 1, "b": 1}, stop="repeat")
            .sharding_filter(4).batch(5),
            "stages/mix/sources/a/2/stage: saved null|stages/mix/sources/a/2: saved null",
        ),
        (mixed(OLD).map(len), "stages: saved mix -> sharding_filter -> batch, now"),
    ],
)  # fmt: skip
def test_a_source_that_stays_must_be_the_same(pipe, said):
    _, state = saved(mixed(OLD), 3)
    with pytest.raises(tp.StateError, match=said):
        pipe.load_state_dict(state, allow_changes=["mix"])


def test_rows_that_a_stage_above_holds_forbid_a_change():
    def make(weights: dict[str, float]) -> tp.Pipeline:
        sources = {name: rows(name) for name in weights}
        return tp.mix(sources, weights=weights, stop="repeat").pack(8, buffer_size=32).batch(1)

    iterator = iter(make({"a": 1, "b": 1}))
    next(iterator)
    state = iterator.state_dict()
    with pytest.raises(tp.StateError, match=r"a stage after mix\(\) still holds mixed rows"):
        make({"a": 2, "b": 1}).load_state_dict(state, allow_changes=["mix"])


def test_the_batch_size_may_change_with_the_mix():
    before, state = saved(mixed(OLD), 8)
    new = {"a": 1, "b": 1}
    sources = {name: rows(name) for name in new}
    pipe = tp.mix(sources, weights=new, stop="repeat").sharding_filter(4).batch(3)
    after = go_on(pipe, state, 30, "mix", "batch_size")
    assert len(after) == 90
    assert len(set(before + after)) == len(before + after)
