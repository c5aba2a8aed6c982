"""``from_ray`` gives the rows of a dataset of Ray Data in its order, and goes on where it stopped; ``to_ray``
gives Ray Data the rows of a pipeline, cut by its plan."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import trainpipes as tp
from trainpipes.integrations.ray_data import PipelineDatasource
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.testing import check_resume

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:::ray"),
    pytest.mark.filterwarnings("ignore:.*ObjectRef.*:UserWarning"),
]

ROWS = 400


def columns(batch: dict[str, Any]) -> dict[str, Any]:
    ids = batch["id"]
    return {
        "id": ids,
        "text": [f"text {n}" for n in ids],
        "sometimes": [None if n < 300 else int(n) for n in ids],
        "tensor": ids[:, None, None] + np.arange(6, dtype=np.float32).reshape(2, 3),
    }


def dataset(blocks: int = 7) -> Any:
    return ray.data.range(ROWS, override_num_blocks=blocks).map_batches(columns)


def test_rows_come_as_they_are_with_nulls_and_tensors():
    pipe = tp.from_ray(dataset())
    assert len(pipe) == ROWS
    rows = list(pipe)
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert rows[7]["text"] == "text 7"
    assert [rows[n]["sometimes"] for n in (0, 299, 300)] == [None, None, 300]
    assert rows[3]["tensor"].tolist() == [[3, 4, 5], [6, 7, 8]]
    batch = next(iter(pipe.select("id", "tensor").batch(4).collate()))
    assert tuple(batch["tensor"].shape) == (4, 2, 3)
    assert "400" in str(pipe.explain())


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_it_resumes_exactly_also_in_a_fresh_process(processes: int):
    pipe = tp.from_ray(dataset(), block_rows=32).select("id", "text")
    chain = pipe.sharding_filter(4).shuffle(64, seed=1).batch(16)
    check_resume(chain, epochs=2, every=9, processes=processes, start_method="spawn")


def test_order_and_state_do_not_depend_on_how_ray_cuts_blocks():
    few, many = (
        tp.from_ray(dataset(blocks), block_rows=32).sharding_filter(4).shuffle(64, seed=1).batch(16)
        for blocks in (2, 11)
    )
    batches = list(few)
    few_state = few.state_at(5)
    assert few_state == many.state_at(5)
    many.load_state_dict(few_state)
    assert [[r["id"] for r in b] for b in many] == [[r["id"] for r in b] for b in batches[5:]]


def test_blocks_keep_their_order_and_the_dataset_its_options():
    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.3 if batch["id"][0] == 0 else 0)
        return batch

    data = ray.data.range(40, override_num_blocks=4).map_batches(slow)
    before = data.context.execution_options.preserve_order
    assert [row["id"] for row in tp.from_ray(data)] == list(range(40))
    assert data.context.execution_options.preserve_order == before


def test_a_state_is_refused_over_other_rows():
    pipe = tp.from_ray(ray.data.range(50)).batch(5)
    state = pipe.state_at(2)
    for other in (
        ray.data.range(51),
        ray.data.range(50).map_batches(lambda b: {"id": b["id"][::-1]}),
    ):
        with pytest.raises(tp.StateError, match=r"data/(rows|content)"):
            tp.from_ray(other).batch(5).load_state_dict(state)


def test_each_rank_reads_its_own_rows_of_the_same_blocks():
    pipe = tp.from_ray(dataset(), block_rows=32).select("id").sharding_filter(4).batch(5)
    parts = [list(pipe.distributed(rank=rank, world_size=2)) for rank in range(2)]
    ids = sorted(row["id"] for part in parts for batch in part for row in batch)
    assert ids == list(range(ROWS))


def test_a_pipeline_that_is_handed_to_a_task_reads_the_blocks_that_are_there():
    pipe = tp.from_ray(dataset()).select("id").batch(50)

    @ray.remote
    def train(given: tp.Pipeline) -> tuple[int, dict[str, Any]]:
        return sum(len(batch) for batch in given), given.state_at(3)

    rows, state = ray.get(train.remote(pipe))
    assert rows == ROWS
    assert state == pipe.state_at(3)


def test_workers_are_spawned_and_those_that_are_forked_are_refused():
    pipe = tp.from_ray(dataset()).select("id").sharding_filter(2).batch(20)
    loader = tp.Loader(pipe, num_workers=1, multiprocessing_context="spawn")
    assert [len(b) for b in loader] == [20] * 20
    with pytest.raises(tp.ConfigError, match=r'forked.*multiprocessing_context="spawn"'):
        list(tp.Loader(pipe, num_workers=1, multiprocessing_context="fork"))


def test_tables_of_pandas_and_types_that_differ_come_in_one_type():
    frames = [
        pd.DataFrame({"a": [1, 2], "s": ["x", None]}),
        pd.DataFrame({"a": [1.5, None], "s": [None, "y"]}),
    ]
    assert list(tp.from_ray(ray.data.from_pandas(frames))) == [
        {"a": 1.0, "s": "x"}, {"a": 2.0, "s": None}, {"a": 1.5, "s": None}, {"a": None, "s": "y"},
    ]  # fmt: skip
    narrow, wide = pa.table({"a": pa.array([1], pa.int32())}), pa.table({"a": [2**40]})
    assert [r["a"] for r in tp.from_ray(ray.data.from_arrow([narrow, wide]))] == [1, 2**40]
    nothing = pa.table({"a": pa.nulls(2)})
    assert [r["a"] for r in tp.from_ray(ray.data.from_arrow([nothing, narrow]))] == [None, None, 1]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": [1]}, {"a": ["x"]}, r"'a' is int64 in block 0.*string in block 1.*map_batches"),
        ({"a": [1]}, {"b": [1]}, r"block 0 .* has a column 'a', and block 1 has not"),
        ({"a": [2**60 + 1]}, {"a": [0.5]}, r"a value does not fit"),
    ],
    ids=["types", "names", "values"],
)
def test_what_no_one_type_holds_is_refused_with_its_block(
    first: dict[str, Any], second: dict[str, Any], said: str
):
    with pytest.raises(tp.SchemaError, match=said):
        list(tp.from_ray(ray.data.from_arrow([pa.table(first), pa.table(second)])))


def test_tensors_of_several_shapes_are_lists_of_lists():
    def ragged(batch: dict[str, Any]) -> dict[str, Any]:
        cells = np.empty(len(batch["id"]), object)
        for k, n in enumerate(batch["id"]):
            cells[k] = np.full((n % 3 + 1, n % 2 + 1), n)
        return {"id": batch["id"], "cells": cells}

    rows = list(tp.from_ray(ray.data.range(20, override_num_blocks=3).map_batches(ragged)))
    for n, row in enumerate(rows):
        assert np.asarray(row["cells"]).tolist() == np.full((n % 3 + 1, n % 2 + 1), n).tolist()


def test_python_objects_are_refused_with_the_column():
    data = ray.data.range(3).map_batches(
        lambda b: {"odd": np.array([Path("x") for _ in b["id"]], object)}
    )
    with pytest.raises(tp.SchemaError, match=r"column 'odd' holds Python objects.*drop_columns"):
        list(tp.from_ray(data))


def test_a_dataset_without_rows_gives_none():
    empty = ray.data.from_arrow(pa.table({"x": pa.array([], pa.int64())}))
    for data in (empty, ray.data.range(10).map_batches(lambda b: {"id": b["id"][:0]})):
        pipe = tp.from_ray(data)
        assert len(pipe) == 0
        assert list(pipe) == []
        assert list(pipe.sharding_filter(4).shuffle(8).batch(2)) == []


def test_what_is_no_dataset_is_refused_with_a_way_out():
    for other in ([1, 2], pa.table({"x": [1]}), "rows", None):
        with pytest.raises(tp.ConfigError, match=r"from_ray\(dataset\) takes a ray.data.Dataset"):
            tp.from_ray(other)
    with pytest.raises(tp.ConfigError, match=r"from_ray\(block_rows\)"):
        tp.from_ray(ray.data.range(1), block_rows=0)
    with pytest.raises(tp.ConfigError, match="memory"):
        tp.from_ray(ray.data.range(1)).to_yaml()


@ray.remote(num_cpus=0)
class Owner:
    """Makes a block that is gone with this actor."""

    def block(self) -> list[Any]:
        return [ray.put(pa.table({"id": range(200_000)}))]


def test_a_block_that_is_lost_is_named():
    owner = Owner.remote()
    pipe = tp.from_ray(ray.data.from_arrow_refs(ray.get(owner.block.remote())))
    assert pipe.peek() == {"id": 0}
    ray.kill(owner)
    with pytest.raises(
        tp.DataError,
        match=r"block 0 of the dataset is lost \(OwnerDiedError: .*\): make the dataset again",
    ):
        read_for_a_while(pipe)


def read_for_a_while(pipe: tp.Pipeline) -> None:
    for _ in range(300):  # Ray frees a block some time after its owner's end
        pipe.peek()
        time.sleep(0.1)


# To Ray


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table(
        {
            "x": range(900),
            "small": pa.array(range(900), pa.int16()),
            "l": [[n] * (n % 3) for n in range(900)],
        }
    )
    for n in range(3):
        pq.write_table(table.slice(300 * n, 300), folder / f"{n}.parquet", row_group_size=50)
    return str(folder)


@pytest.fixture
def in_order() -> Any:
    options = ray.data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    yield
    options.preserve_order = before


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": 2 * row["x"], "late": None if row["x"] < 280 else "a"}


def is_odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


@pytest.mark.usefixtures("in_order")
def test_a_dataset_has_the_rows_of_the_pipeline_in_their_order(files: str):
    rows = tp.read_parquet(files)
    chains = {
        "files": rows,
        "shuffled": rows.shuffle(128, seed=1),
        "functions": rows.map(doubled),
        "cut": rows.skip(17).take(500),
        "joined": tp.concat(rows, rows.take(10)),
        "not counted": rows.filter(is_odd),
    }
    for name, pipe in chains.items():
        assert pipe.to_ray().take_all() == list(pipe), name
    dealt = rows.sharding_filter(6).shuffle(128, seed=1)
    assert dealt.to_ray().take_all() == list(rows.shuffle(128, seed=1))


@pytest.mark.usefixtures("in_order")
def test_each_epoch_has_its_order(files: str):
    pipe = tp.read_parquet(files).shuffle(128, seed=1)
    epochs = [list(pipe), list(pipe)]
    assert [pipe.to_ray(epoch=n).take_all() for n in range(2)] == epochs


def test_rows_that_are_not_counted_come_shard_by_shard(files: str):
    pipe = tp.read_parquet(files).filter(is_odd).sharding_filter(4)
    assert sorted(r["x"] for r in pipe.to_ray().take_all()) == list(range(1, 900, 2))
    tasks = PipelineDatasource(EpochRows(pipe, "to_ray", dealt=True), 0).get_read_tasks(100)
    assert len(tasks) == 4
    assert all(0 < sum(map(len, task())) < 250 for task in tasks)


def test_types_are_kept_and_come_back(files: str):
    pipe = tp.read_parquet(files)
    data = pipe.to_ray()
    kinds = data.schema().base_schema
    assert kinds.field("small").type == pa.int16()
    assert kinds.field("l").type.value_type == pa.int64()
    assert sorted(r["x"] for r in tp.from_ray(data)) == list(range(900))


def test_a_task_reads_its_own_files_only(tmp_path: Path):
    step = 8192  # rows are read so many at a time
    for n in range(6):
        table = pa.table({"x": range(step * n, step * (n + 1))})
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=1024)
    rows = EpochRows(tp.read_parquet(str(tmp_path)), "to_ray")
    tasks = PipelineDatasource(rows, 0).get_read_tasks(3)
    assert [task.metadata.num_rows for task in tasks] == [2 * step] * 3
    for n in (0, 1, 4, 5):
        (tmp_path / f"{n}.parquet").unlink()
    tables = list(tasks[1]())
    assert [x for table in tables for x in table["x"].to_pylist()] == list(
        range(2 * step, 4 * step)
    )


def test_what_is_no_rows_is_refused_with_a_way_out(files: str):
    rows = tp.read_parquet(files)
    for pipe in (rows.batch(2), rows.repeat(), rows.batch(2).collate()):
        with pytest.raises(
            tp.ConfigError, match=r"to_ray\(\) .*before batch\(\), collate\(\) and repeat\(\)"
        ):
            pipe.to_ray()
    with pytest.raises(tp.ConfigError, match=r"leave \.distributed\(\) out"):
        rows.distributed(rank=0, world_size=2).to_ray()
    with pytest.raises(tp.SchemaError, match=r"to_ray\(\).*a row is no dict"):
        rows.map(len).to_ray()
    with pytest.raises(tp.ConfigError, match=r"to_ray\(epoch\)"):
        rows.to_ray(epoch=-1)


def test_a_pipeline_of_a_dataset_pickles_with_its_blocks():
    pipe = tp.from_ray(dataset()).select("id")
    again = pickle.loads(pickle.dumps(pipe))
    assert [row["id"] for row in again] == list(range(ROWS))
    assert again == pipe
