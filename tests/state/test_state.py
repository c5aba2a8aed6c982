"""The state: its format, what it is checked against, and what each refusal says."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from drawn import Keep, build, table_of_rows, write_parquet
from hundred_rows import TABLE, given_by, loaded
from mutants import resealed
from oracle import Spec
from trainpipes.state.cursor import unsealed
from trainpipes.state.format import FORMAT, first_difference


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE)


def pipeline(num_shards: int = 4, buffer_size: int = 15, seed: int = 2) -> tp.Pipeline:
    """13 batches an epoch."""
    return rows().sharding_filter(num_shards).shuffle(buffer_size, seed=seed).batch(8)


def filtered() -> tp.Pipeline:
    """Batches whose number is not known in advance."""
    return rows().sharding_filter(4).shuffle(15, seed=2).filter(pc.field("row") != 20).batch(8)


def saved(pipe: tp.Pipeline, taken: int = 5) -> dict[str, Any]:
    """The state after some batches."""
    run = iter(pipe)
    given_by(run, taken)
    return run.state_dict()


def refusal(pipe: tp.Pipeline, state: Any) -> str:
    """What a pipeline says to a state that it does not take."""
    with pytest.raises(tp.StateError) as error:
        pipe.load_state_dict(state)
    assert isinstance(error.value, ValueError)
    return str(error.value)


# Format


COMMON = ["trainpipes", "epoch", "batches", "num_shards", "pipeline", "batch_sizes"]


def test_a_state_is_a_flat_dict_of_integers_and_strings() -> None:
    state = saved(pipeline())
    assert list(state) == COMMON
    assert [type(value) for value in state.values()] == [int] * 4 + [str] * 2
    assert list(state.values())[:4] == [FORMAT, 0, 5, 4] == [2, 0, 5, 4]


def test_a_state_of_a_pipeline_that_is_not_counted_says_where_each_shard_stands() -> None:
    state = saved(filtered())
    assert list(state) == [*COMMON, *(f"shard-000{shard}" for shard in range(4))]
    delivered = [json.loads(state[f"shard-000{shard}"])["delivered"] for shard in range(4)]
    assert delivered == [2, 1, 1, 1]


def test_a_state_of_24_shards_is_less_than_a_kilobyte(tmp_path: Path) -> None:
    write_parquet(tmp_path, [[200, 100], [300]])
    pipe = (
        tp.list_files(tmp_path).read_parquet(columns=["row", "tokens"]).sharding_filter(num_shards=24)
        .shuffle(buffer_size=8, seed=0).truncate(512, columns="tokens").batch(2).pad_collate()
    )  # fmt: skip
    sizes = [len(json.dumps(pipe.state_at(m, epoch=m))) for m in (0, 7, 299)]
    assert max(sizes) < 1024


def test_a_state_can_be_read_by_people() -> None:
    told = json.loads(saved(pipeline())["pipeline"])
    assert told["data"]["rows"] == 100
    names = " ".join(stage["stage"] for stage in told["stages"])
    assert names == "from_arrow sharding_filter shuffle batch"
    assert told["stages"][2]["buffer_size"] == 15


def test_the_state_of_64_shards_and_a_buffer_of_a_million_rows_is_small() -> None:
    rows = Spec((4000,) * 8, num_shards=64, buffer_size=1_000_000, batch_size=32)
    pipe = build(replace(rows, keep=Keep(7, 2)))
    run = iter(pipe)
    largest = 0
    for number, _ in enumerate(run):
        if number % 25:
            continue
        largest = max(largest, len(json.dumps(run.state_dict())))
    assert 0 < largest < 16 * 1024


def test_a_state_does_not_grow_over_epochs() -> None:
    sizes = []
    pipe = filtered().repeat()
    run = iter(pipe)
    for _ in range(10):
        given_by(run, 40)
        sizes.append(len(json.dumps(run.state_dict())))
    assert max(sizes) - min(sizes) < 40


def test_a_state_is_a_fresh_copy_that_can_be_loaded_again_and_again() -> None:
    run = iter(pipeline())
    given_by(run, 3)
    state = run.state_dict()
    kept = copy.deepcopy(state)
    whole = given_by(pipeline())
    pipe = pipeline()
    for _ in range(3):
        pipe.load_state_dict(state)
        assert given_by(pipe) == whole[3:]
        assert given_by(run, 3) != []
        assert state == kept
    pipe.load_state_dict(state)
    state.clear()
    assert given_by(pipe) == whole[3:]


def test_a_state_of_one_pipeline_object_loads_into_an_equal_one_only_by_its_record() -> None:
    written_otherwise = rows().shuffle(15, seed=2).sharding_filter(4).batch(8)
    written_otherwise.load_state_dict(saved(pipeline()))
    assert given_by(written_otherwise) == given_by(pipeline())[5:]


# By number


@pytest.mark.parametrize("make", [
    pipeline,
    lambda: rows().sharding_filter(4).batch(8),
    lambda: rows().sharding_filter(6).shuffle(15, seed=2).batch(8, drop_last=True),
    lambda: pipeline().skip(3).take(7),
    lambda: pipeline().repeat(2),
    lambda: rows().sharding_filter(4).shuffle(15, seed=2).repeat().batch(8),
    filtered,
    lambda: filtered().repeat(),
    lambda: rows().sharding_filter(4).shuffle(15, seed=2),
    lambda: tp.from_iterable(lambda: range(30), version="1").batch(4),
], ids=[
    "known", "file order", "drop_last", "skip and take", "repeated", "rolling", "filtered",
    "filtered, endless", "rows", "stream",
])  # fmt: skip
def test_the_state_at_a_number_is_the_state_of_the_run_there(
    make: Callable[[], tp.Pipeline],
) -> None:
    pipe = make()
    endless = "repeat(times=None)" in repr(pipe) or "repeat()" in repr(pipe)
    for epoch in range(1 if endless else 3):
        run = iter(pipe)
        assert make().state_at(0, epoch=epoch) == run.state_dict()
        for taken, _ in enumerate(islice(run, 20), 1):
            assert make().state_at(taken, epoch=epoch) == run.state_dict(), taken


@pytest.mark.parametrize(("make", "taken", "said"), [
    (pipeline, -1, "counts from 0, got -1"),
    (pipeline, True, "got True"),
    (pipeline, 14, "13 batches for each of 1 ranks, got 14"),
    (filtered, 99, "an epoch has 15 batches .*, got 99"),
])  # fmt: skip
def test_a_number_of_batches_that_is_none_or_past_the_end_is_refused(
    make: Callable[[], tp.Pipeline], taken: Any, said: str
) -> None:
    with pytest.raises(tp.StateError, match=said):
        make().state_at(taken)


# Refusals: another pipeline


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: pipeline(seed=3), "shuffle/seed: saved 2, now 3"),
        (lambda: pipeline(buffer_size=16), "shuffle/buffer_size: saved 15, now 16"),
        (lambda: pipeline(num_shards=8), "num_shards: saved 4, now 8"),
        (
            lambda: rows().sharding_filter(4).shuffle(15, seed=2).batch(9),
            "batch/batch_size: saved 8, now 9",
        ),
        (
            lambda: rows().sharding_filter(4).shuffle(15, seed=2).batch(8, drop_last=True),
            "batch/drop_last: saved false, now true",
        ),
        (
            lambda: rows().sharding_filter(4, split="stride").shuffle(15, seed=2).batch(8),
            'sharding_filter/split: saved "spans", now "stride"',
        ),
        (
            lambda: rows().sharding_filter(4).batch(8),
            "stages: saved from_arrow -> sharding_filter -> shuffle -> batch, now from_arrow -> "
            "sharding_filter -> batch",
        ),
        (
            lambda: pipeline().take(3),
            "now from_arrow -> sharding_filter -> shuffle -> batch -> take",
        ),
    ],
    ids=["seed", "buffer", "shards", "batch size", "drop_last", "split", "fewer", "more"],
)
def test_another_pipeline_is_refused_and_the_first_difference_named(
    other: Callable[[], tp.Pipeline], said: str
) -> None:
    told = refusal(other(), saved(pipeline()))
    assert said in told
    cures = "as it was when the state was saved", "use .sharding", "allow_changes=["
    assert any(cure in told for cure in cures)


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"row": row["row"] * 2}


def triple(row: dict[str, Any]) -> dict[str, Any]:
    return {"row": row["row"] * 3}


def test_another_function_is_refused_unless_its_version_says_it_is_the_same() -> None:
    state = saved(rows().map(double).batch(8))
    assert "map/fn: saved" in refusal(rows().map(triple).batch(8), state)
    state = saved(rows().map(double, version="2").batch(8))
    loaded(rows().map(triple, version="2").batch(8), state)
    told = refusal(rows().map(double, version="3").batch(8), state)
    assert 'map/fn: saved "version 2", now "version 3"' in told


def test_another_expression_is_refused() -> None:
    state = saved(filtered())
    other = rows().sharding_filter(4).shuffle(15, seed=2).filter(pc.field("row") != 21).batch(8)
    assert 'filter/predicate: saved "(row != 20)", now "(row != 21)"' in refusal(other, state)


# Refusals: other data


def of_files(folder: Path) -> tp.Pipeline:
    return tp.list_files(folder).read_parquet().sharding_filter(4).shuffle(15).batch(8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_parquet(tmp_path, [[20, 20], [7, 10, 43]])
    return tmp_path


def test_the_same_files_in_another_place_and_time_are_the_same_data(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = saved(of_files(folder))
    moved = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
        os.utime(moved / path.name, (1, 1))
    assert given_by(loaded(of_files(moved), state)) == given_by(of_files(folder))[5:]


def more_rows(folder: Path) -> None:
    pq.write_table(table_of_rows(0, 41), folder / "part-000.parquet")


def more_files(folder: Path) -> None:
    pq.write_table(table_of_rows(0, 1), folder / "part-002.parquet")


def other_bytes(folder: Path) -> None:
    path = folder / "part-000.parquet"
    pq.write_table(pq.read_table(path), path, compression="gzip", row_group_size=20)


def another_name(folder: Path) -> None:
    (folder / "part-000.parquet").rename(folder / "part-0000.parquet")


def other_row_groups(folder: Path) -> None:
    path = folder / "part-001.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=30)


@pytest.mark.parametrize(("change", "said"), [
    (more_rows, ["data/rows: saved 100, now 101"]),
    (more_files, ["data/files: saved 2, now 3", "load the state with the files or rows it was"]),
    (other_bytes, ["data/bytes: saved", "(file 1 of 2 is not the saved one: ", "part-000.parquet)"]),
    (another_name, []),
    (other_row_groups, []),
])  # fmt: skip
def test_other_files_are_refused(
    change: Callable[[Path], None], said: list[str], folder: Path
) -> None:
    state = saved(of_files(folder))
    change(folder)
    told = refusal(of_files(folder), state)
    assert told.startswith("data/")
    assert all(part in told for part in said)


def test_of_many_files_the_few_are_named_that_one_of_is_another(tmp_path: Path) -> None:
    for number in range(40):
        pq.write_table(table_of_rows(number, 1), tmp_path / f"{number:02d}.parquet")
    state = saved(of_files(tmp_path))
    pq.write_table(table_of_rows(7, 1), tmp_path / "07.parquet", compression="gzip")
    told = refusal(of_files(tmp_path), state)
    first, last = tmp_path / "07.parquet", tmp_path / "09.parquet"
    assert f"(one of the files 8 to 10 of 40 is not the saved one: {first} to {last})" in told


def test_a_renamed_file_is_refused(folder: Path) -> None:
    state = saved(of_files(folder))
    (folder / "part-000.parquet").rename(folder / "part-0000.parquet")
    assert refusal(of_files(folder), state).startswith("data/")


def test_other_row_groups_are_refused(folder: Path) -> None:
    state = saved(of_files(folder))
    path = folder / "part-001.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=30)
    assert refusal(of_files(folder), state).startswith("data/")


def test_another_table_is_refused() -> None:
    state = saved(pipeline())
    fewer = tp.from_arrow(table_of_rows(0, 99)).sharding_filter(4).shuffle(15, seed=2).batch(8)
    assert "data/rows: saved 100, now 99" in refusal(fewer, state)
    other = tp.from_arrow(table_of_rows(1, 101)).sharding_filter(4).shuffle(15, seed=2).batch(8)
    assert "data/sample: saved" in refusal(other, state)


# Refusals: not a state, or a damaged one


@pytest.mark.parametrize(("state", "said"), [
    (None, "a state must be the dict that state_dict() gave, got NoneType"),
    ([1, 2], "got list; of the states of all ranks make one with merge_states(states)"),
    ("run/last.pt", "got str; load what torch.load(path, weights_only=True) gives"),
    ({}, "a dict without the key 'trainpipes' (empty)"),
    ({"model": 1, "optimizer": 2}, "the key 'trainpipes' ('model', 'optimizer')"),
    ({"model": 1, "data": {"batches": 3}}, "load state['data'], which is in it"),
    ({"_snapshot": 3}, "got the state of a StatefulDataLoader; load it into a StatefulDataLoader"),
    ({"work_queue": 1}, "got the state of a WorkQueue; load it into a WorkQueue"),
    ({"root": {}, "num_yielded": 3}, "got the state of a torchdata.nodes.Loader; load it into"),
], ids=[
    "None", "list", "path", "empty", "dict", "around one", "StatefulDataLoader", "WorkQueue",
    "nodes.Loader",
])  # fmt: skip
def test_what_is_no_state_is_refused(state: Any, said: str) -> None:
    assert said in refusal(pipeline(), state)


@pytest.mark.parametrize(
    ("version", "old"),
    [
        *((version, "") for version in (0, 3, "2", True, None, 1.5)),
        (1, ", in which rows come in another order"),
    ],
)
def test_another_format_is_refused(version: Any, old: str) -> None:
    told = refusal(pipeline(), {**saved(pipeline()), "trainpipes": version})
    assert f"trainpipes: the state's format must be {FORMAT}, got {version!r}{old}; load" in told
    assert told.endswith("load it with the trainpipes that wrote it, or start a new run")


@pytest.mark.parametrize("version", [2.0, np.int64(2), torch.tensor(2)])
def test_a_state_whose_numbers_were_changed_says_so(version: Any) -> None:
    told = refusal(pipeline(), {**saved(pipeline()), "trainpipes": version})
    said = f"its numbers are integers, got a {type(version).__name__}: load it as it was saved"
    assert told.endswith(said)


@pytest.mark.parametrize("key", ["epoch", "batches", "num_shards", "pipeline"])
@pytest.mark.parametrize("value", [None, -1, 1.5, [], True])
def test_a_key_that_is_missing_or_of_another_type_is_named(key: str, value: Any) -> None:
    state = saved(pipeline())
    del state[key]
    if value is not None:
        state[key] = value
    told = refusal(pipeline(), state)
    assert told.startswith(f"{key}: must be")
    assert "load it as it was saved" in told


def test_a_missing_shard_is_named_when_the_state_is_loaded() -> None:
    state = saved(filtered())
    del state["shard-0003"]
    pipe = filtered()
    subjects = [pipe, iter(pipe), *(tp.Loader(pipe, num_workers=n) for n in (0, 2))]
    for subject in subjects:
        with pytest.raises(tp.StateError, match=r"no position for shards \[3\]"):
            subject.load_state_dict(state)


@pytest.mark.parametrize("key", ["shard-0009", "shard-x", "shard--1"])
def test_a_shard_that_there_is_not_is_named(key: str) -> None:
    assert f"{key}: no such shard among 4" in refusal(
        filtered(), {**saved(filtered()), key: saved(filtered())["shard-0000"]}
    )


@pytest.mark.parametrize("cursor", [
    "", "{", "null", "[]", "{}", '{"delivered":1}',
    '{"epoch":0,"window":0,"row":-1,"delivered":1,"at":1}',
    '{"epoch":0,"window":"a","row":0,"delivered":1,"at":1}', '{"below":3,"delivered":1,"at":1}', None, 3,
])  # fmt: skip
def test_a_damaged_cursor_is_named(cursor: Any) -> None:
    told = refusal(filtered(), {**saved(filtered()), "shard-0001": cursor})
    assert told.startswith("shard-0001: must be a position as state_dict() wrote it")


def test_an_edited_count_is_refused() -> None:
    state = saved(filtered())
    cursor = json.loads(state["shard-0001"])
    del cursor["check"]
    state["shard-0001"] = json.dumps({**cursor, "delivered": 2})
    told = refusal(filtered(), resealed(state))
    assert told.startswith("shard-0001/delivered: 2 batches, but batches = 5 means 1")
    assert "save on all ranks after the same step" in told


@pytest.mark.parametrize("m", [4, 6, 9])
def test_an_edited_m_is_refused(m: int) -> None:
    for make in (pipeline, filtered):
        state = {**saved(make()), "batches": m}
        assert "its checksum does not fit" in refusal(make(), state)
    assert "batches, but batches =" in refusal(filtered(), resealed(state))


@pytest.mark.parametrize(("make", "most"), [
    (pipeline, 13),
    (lambda: pipeline().skip(3).take(7), 7),
    (lambda: pipeline().repeat(2), 26),
    (lambda: rows().sharding_filter(4, tail="uneven").batch(8), 16),
], ids=["once", "some", "twice", "ragged"])  # fmt: skip
def test_an_m_beyond_the_epoch_is_refused(make: Callable[[], tp.Pipeline], most: int) -> None:
    state = make().state_at(0, epoch=2)
    for m in (0, most):
        make().load_state_dict(resealed({**state, "batches": m}))
    for m in (most + 1, 1 << 61):
        assert refusal(make(), resealed({**state, "batches": m})).startswith(
            "batches: epoch 2 of this pipeline has "
        )


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "{}", '{"stages":3}', '{"stages":[1]}', None]
)
def test_a_damaged_description_of_the_pipeline_is_named(text: str | None) -> None:
    state = saved(pipeline())
    without_checksum = unsealed(state["pipeline"])[0]
    told = refusal(pipeline(), {**state, "pipeline": without_checksum if text is None else text})
    assert told.startswith("pipeline: damaged")
    assert text is not None or "(it has no checksum)" in told


def test_the_first_difference_is_named_by_its_path() -> None:
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1}}, {"a": {}}) == ("a/b", 1, None)
    assert first_difference({"a": [1, [2]]}, {"a": [1, [2, 3]]}) == ("a/1/1", None, 3)
    assert first_difference({"a": True}, {"a": 1}) == ("a", True, 1)
    assert first_difference({"a": [2, 5]}, {"a": None}) == ("a", [2, 5], None)
    assert first_difference({"a": 4}, {"a": [4]}) == ("a", 4, [4])
