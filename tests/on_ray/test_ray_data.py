"""``to_ray`` gives Ray Data the rows of a pipeline, cut by its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import trainpipes as tp
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.ray_dataset import PipelineDatasource

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:::ray"),
    pytest.mark.filterwarnings("ignore:.*ObjectRef.*:UserWarning"),
]


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


def test_types_are_kept_and_come_back(files: str, tmp_path: Path):
    data = tp.read_parquet(files).to_ray()
    kinds = data.schema().base_schema
    assert kinds.field("small").type == pa.int16()
    assert kinds.field("l").type.value_type == pa.int64()
    data.write_parquet(str(tmp_path / "rows"))
    assert sorted(r["x"] for r in tp.read_parquet(tmp_path / "rows")) == list(range(900))


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
