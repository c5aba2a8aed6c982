"""The pack length may change where an epoch starts, where that is allowed by name."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp

LENGTHS = np.random.default_rng(3).integers(1, 25, 150).tolist()
DOCUMENTS = pa.table({"input_ids": [[d] * n for d, n in enumerate(LENGTHS)]})
ALLOWED = ["pack_length"]


def packed(
    length: int, *, shards: int = 4, times: int | None = 1, method: Any = "best_fit", size: int = 2
) -> tp.Pipeline:
    rows = tp.from_arrow(DOCUMENTS).sharding_filter(shards).shuffle(20, seed=1)
    pipe = rows.pack(length, method=method, buffer_size=8).batch(size)
    return pipe if times == 1 else pipe.repeat(times)


def drawn(source: Any, count: int | None = None) -> list[list[list[int]]]:
    return [[row["input_ids"] for row in batch] for batch in islice(iter(source), count)]


def loaded(state: dict[str, Any], length: int, **options: Any) -> tp.Pipeline:
    pipe = packed(length, **options)
    pipe.load_state_dict(json.loads(json.dumps(state)), allow_changes=ALLOWED)
    return pipe


def state_of_the_end(length: int = 32, **options: Any) -> dict[str, Any]:
    pipe = packed(length, **options)
    iterator = iter(pipe)
    assert drawn(iterator)
    return iterator.state_dict()


def second_epoch(length: int, **options: Any) -> list[list[list[int]]]:
    pipe = packed(length, **options)
    drawn(pipe)
    return drawn(pipe)


@pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])
def test_the_next_epoch_after_an_epochs_end_has_the_new_length(method: Any) -> None:
    state = state_of_the_end(method=method)
    assert drawn(loaded(state, 48, method=method)) == second_epoch(48, method=method)


def test_a_state_of_the_start_takes_another_length() -> None:
    state = packed(32).state_dict()
    assert state is not None
    assert drawn(loaded(state, 48)) == drawn(packed(48))


def test_a_pass_under_repeat_takes_another_length_at_its_start() -> None:
    state = state_of_the_end(times=2)
    pipe = packed(48, times=2)
    drawn(pipe)
    assert drawn(loaded(state, 48, times=2)) == drawn(pipe)


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_one_shard_takes_it_between_two_epochs_of_a_pass(method: Any) -> None:
    options: dict[str, Any] = {"shards": 1, "times": 3, "method": method, "size": 1}
    count = len(drawn(packed(32, shards=1, method=method, size=1)))
    iterator = iter(packed(32, **options))
    drawn(iterator, count)
    found = drawn(loaded(iterator.state_dict(), 48, **options))
    second = second_epoch(48, shards=1, method=method, size=1)
    assert found[: len(second)] == second
    assert {len(row) for batch in found for row in batch} == {48}


def test_the_new_length_is_the_same_on_any_topology() -> None:
    state = state_of_the_end(times=2)
    whole = drawn(loaded(state, 48, times=2))
    loader = tp.Loader(packed(48, times=2), num_workers=2)
    loader.load_state_dict(state, allow_changes=ALLOWED)
    assert drawn(loader) == whole
    endless = packed(32, times=None).state_dict()
    assert endless is not None
    whole = drawn(loaded(endless, 48, times=None), 24)
    for world in (2, 4):
        parts = [
            drawn(
                _on(loaded(endless, 48, times=None), endless, rank, world),
                24 // world,
            )
            for rank in range(world)
        ]
        assert [parts[m % world][m // world] for m in range(24)] == whole


def _on(pipe: tp.Pipeline, state: dict[str, Any], rank: int, world: int) -> tp.Pipeline:
    own = pipe.distributed(rank=rank, world_size=world)
    own.load_state_dict(state, allow_changes=ALLOWED)
    return own


def test_a_changed_run_resumes_without_allowing_anything_more() -> None:
    changed = loaded(state_of_the_end(), 48)
    iterator = iter(changed)
    drawn(iterator, 5)
    pipe = packed(48)
    pipe.load_state_dict(iterator.state_dict())
    assert drawn(pipe) == drawn(iterator)


def test_batch_size_and_pack_length_change_together() -> None:
    pipe = packed(48, size=3)
    pipe.load_state_dict(state_of_the_end(), allow_changes=["batch_size", "pack_length"])
    assert drawn(pipe) == second_epoch(48, size=3)


@pytest.mark.parametrize("times", [1, 2, None])
def test_within_an_epoch_it_is_refused_with_the_way_out(times: int | None) -> None:
    iterator = iter(packed(32, times=times))
    drawn(iterator, 6)
    state = iterator.state_dict()
    with pytest.raises(
        tp.StateError,
        match=r"pack/max_length: saved 32, now 48; it may change only between epochs, and shard-0000 is "
        r"within epoch 0 \(m = 6\): load the state of an epoch's start or end, or continue with "
        r"max_length=32",
    ):
        packed(48, times=times).load_state_dict(state, allow_changes=ALLOWED)
    again = packed(32, times=times)  # the same length is no change
    again.load_state_dict(state, allow_changes=ALLOWED)
    assert drawn(again, 3) == drawn(iterator, 3)


def test_only_what_is_allowed_changes() -> None:
    state = state_of_the_end()
    with pytest.raises(tp.StateError, match="stages/pack/max_length: saved 32, now 48"):
        packed(48).load_state_dict(state, allow_changes=["batch_size"])
    with pytest.raises(tp.StateError, match="stages/batch/batch_size: saved 2, now 3"):
        packed(48, size=3).load_state_dict(state, allow_changes=ALLOWED)
    with pytest.raises(tp.StateError, match="stages/pack/method"):
        packed(48, method="concat").load_state_dict(state, allow_changes=ALLOWED)


def test_a_damaged_state_is_told_as_such() -> None:
    state = {**state_of_the_end(), "shard-0001": "{"}
    with pytest.raises(tp.StateError, match="shard-0001"):
        packed(48).load_state_dict(state, allow_changes=ALLOWED)


def test_a_stream_takes_it_at_the_start_and_at_the_end() -> None:
    def make(length: int) -> tp.Pipeline:
        rows = tp.from_iterable(DOCUMENTS.to_pylist, version="1").sharding_filter(2).shuffle(20)
        return rows.pack(length, buffer_size=8).batch(2)

    iterator = iter(make(32))
    drawn(iterator, 4)
    with pytest.raises(tp.StateError, match="it may change only between epochs"):
        make(48).load_state_dict(iterator.state_dict(), allow_changes=ALLOWED)
    drawn(iterator)
    pipe = make(48)
    pipe.load_state_dict(iterator.state_dict(), allow_changes=ALLOWED)
    fresh = make(48)
    drawn(fresh)
    assert drawn(pipe) == drawn(fresh)
