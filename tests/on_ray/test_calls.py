"""Functions that ``map`` and ``Loader`` call on a Ray cluster: the same batches as here, whatever dies."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

import trainpipes as tp
from trainpipes.errors import ConfigError, WorkerError
from trainpipes.interfaces.watched_calls import current

ROWS = 400


def files(folder: Path) -> str:
    for number in range(4):
        first = number * ROWS // 4
        rows = pa.table({"x": range(first, first + ROWS // 4)})
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=30)
    return f"{folder}/*.parquet"


def doubled(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    noise = float(rng.random())
    return {"x": row["x"], "double": np.full(9, 2 * row["x"]), "noise": noise}


def pipeline(folder: Path, fn: Any = doubled, **options: Any) -> tp.Pipeline:
    rows = tp.list_files(files(folder)).read_parquet().sharding_filter(8).shuffle(50, seed=3)
    return rows.map(fn, version="1", rng=fn is doubled, **options).batch(16).collate()


def listed(batches: Any) -> list[dict[str, list[Any]]]:
    return [{name: values.tolist() for name, values in batch.items()} for batch in batches]


@pytest.mark.parametrize("of", ["loader", "map"])
def test_batches_and_states_are_those_of_this_process(cluster, tmp_path, of):
    whole = listed(pipeline(tmp_path))
    executor = tp.Ray(num_workers=3)
    if of == "loader":
        loader = tp.Loader(pipeline(tmp_path), executor=executor)
    else:
        loader = tp.Loader(pipeline(tmp_path, executor=executor))
    batches = iter(loader)
    first = listed(next(batches) for _ in range(7))
    state = loader.state_dict()
    assert first == whole[:7]
    resumed = tp.Loader(pipeline(tmp_path))
    resumed.load_state_dict(state)
    assert listed(resumed) == whole[7:]
    back = tp.Loader(pipeline(tmp_path), executor=executor)
    back.load_state_dict(state)
    rest = list(back)
    assert listed(rest) == whole[7:]
    rest[0]["double"] += 1  # a batch belongs to whoever gets it


def test_functions_of_the_program_and_lambdas_reach_the_cluster(cluster, tmp_path):
    where = os.getpid()
    pipe = pipeline(tmp_path, lambda row: {"x": row["x"], "here": os.getpid() == where})
    batches = list(tp.Loader(pipe, executor="ray"))
    assert sum(len(batch["x"]) for batch in batches) == ROWS
    assert not any(batch["here"].any() for batch in batches)


class Sample:
    """As of a program that is a script."""

    __module__, __qualname__ = "__main__", "Sample"

    def __init__(self, x: int) -> None:
        self.x = x


class Bad(Exception):
    __module__, __qualname__ = "__main__", "Bad"


@pytest.mark.parametrize("of", ["loader", "map"])
def test_rows_results_and_errors_of_classes_of_the_program_travel(cluster, monkeypatch, of):
    def more(row: Sample) -> Sample:
        if row.x == 31:
            raise Bad(f"row {row.x}")
        return Sample(row.x + 1)

    for kind in (Sample, Bad):
        monkeypatch.setattr(sys.modules["__main__"], kind.__qualname__, kind, raising=False)
    executor, rows = tp.Ray(num_workers=2), tp.from_dataset([Sample(n) for n in range(32)])
    if of == "loader":
        made = iter(tp.Loader(rows.map(more, version="1"), executor=executor))
    else:
        made = iter(rows.map(more, version="1", executor=executor))
    row = next(made)
    assert (type(row), row.x) == (Sample, 1)
    with pytest.raises(Bad, match="row 31"):
        list(made)


def as_it_is(_: int) -> tuple[Any, ...]:
    time.sleep(0.1)  # so that every process has some
    collates = default_collate_fn_map[torch.Tensor] is collate_tensor_fn
    info, parallel = get_worker_info(), os.environ.get("TOKENIZERS_PARALLELISM")
    return (os.getpid(), random.random(), info, parallel, collates, current())


def test_tasks_of_a_program_find_a_process_as_they_left_it(cluster, tmp_path):
    def who(row: dict[str, Any]) -> dict[str, Any]:
        info = get_worker_info()
        return {"pid": os.getpid(), "worker": -1 if info is None else info.id}

    batches = list(tp.Loader(pipeline(tmp_path, who), executor=tp.Ray(num_workers=3)))
    pids = {pid for batch in batches for pid in batch["pid"].tolist()}
    assert {n for batch in batches for n in batch["worker"].tolist()} <= {0, 1, 2}
    task = ray.remote(as_it_is)
    found = ray.get([task.remote(n) for n in range(24)])
    assert pids & {pid for pid, *_ in found}
    assert {tuple(rest) for _, _, *rest in found} == {(None, None, True, None)}
    assert len({number for _, number, *_ in found}) == len(found)


def test_a_process_begins_once_with_a_time_limit_too(cluster, tmp_path):
    def note(worker: int) -> None:
        (tmp_path / f"{time.monotonic_ns()}.begun").touch()

    executor = tp.Ray(num_workers=2)
    loader = tp.Loader(
        pipeline(tmp_path, dict), executor=executor, timeout=100, worker_init_fn=note
    )
    assert len(list(loader)) == ROWS // 16
    assert 1 <= len(list(tmp_path.glob("*.begun"))) <= 4


class Model:
    """A function that notes where it comes to, and is counted while it is there."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.alive.add(self)
        (self.folder / f"{time.monotonic_ns()}.came").touch()

    def __call__(self, row: Any) -> Any:
        return row


def test_functions_stay_in_a_process_beside_others(cluster, tmp_path):
    pipe, executor = tp.from_dataset(range(200)), tp.Ray(num_workers=1)
    for name in "abc":
        pipe = pipe.map(Model(tmp_path, name), version=name, executor=executor)
    assert list(pipe) == list(range(200))
    assert len(list(tmp_path.glob("*.came"))) <= 3 * 4


def alive(name: str) -> int:
    time.sleep(0.1)
    gc.collect()
    return sum(one.name == name for one in Model.alive)


def test_passes_that_are_over_leave_nothing_in_a_process(cluster, tmp_path):
    pipe = tp.from_dataset(range(64)).map(Model(tmp_path, "passes"), version="1").batch(8)
    loader = tp.Loader(pipe, executor=tp.Ray(num_workers=1))
    for _ in range(6):
        assert len(list(loader)) == 8
    task = ray.remote(alive)
    assert 1 <= max(ray.get([task.remote("passes") for n in range(16)])) <= 2


def test_functions_of_writers_that_are_through_do_not_stay_in_a_process(cluster, tmp_path):
    rows = tp.from_dataset([{"x": n} for n in range(64)])
    for number in range(4):
        pipe = rows.map(Model(tmp_path, "written"), version="1")
        pipe.write_parquet(tmp_path / f"out-{number}", num_files=4, executor=tp.Ray())
    task = ray.remote(alive)
    assert max(ray.get([task.remote("written") for n in range(16)])) <= 2


def died_once(folder: Path, name: str) -> bool:
    """Whether this is the first call for a name, of any process."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_a_process_that_dies_costs_nothing(cluster, tmp_path, caplog):
    def dies_at_times(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] % 40 == 7 and died_once(tmp_path, f"{row['x']}.died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    pipe = pipeline(tmp_path, dies_at_times)
    batches = listed(tp.Loader(pipe, executor=tp.Ray(num_workers=3)))
    assert batches == listed(pipeline(tmp_path, dict))
    assert len(list(tmp_path.glob("*.died"))) == ROWS // 40
    assert "its rows are done again by another one" in caplog.text


def kills(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] == 123:
        os._exit(3)
    return row


def test_a_row_that_kills_its_process_is_named(cluster, tmp_path):
    with pytest.raises(WorkerError, match=r"1\.parquet, row group 0, row 23"):
        list(tp.Loader(pipeline(tmp_path, kills), executor=tp.Ray(num_workers=2)))


def test_a_row_that_kills_its_process_is_left_out(cluster, tmp_path):
    pipe = pipeline(tmp_path, kills, on_error="skip")
    batches = list(tp.Loader(pipe, executor=tp.Ray(num_workers=2)))
    assert sorted(x for batch in batches for x in batch["x"].tolist()) == [
        n for n in range(ROWS) if n != 123
    ]


def hangs(row: dict[str, Any]) -> dict[str, Any]:
    while row["x"] == 123:
        time.sleep(1)
    return row


def test_a_function_that_hangs_is_ended_by_the_time_limit(cluster, tmp_path):
    with pytest.raises(WorkerError, match=r"timeout.*1\.parquet, row group 0, row 23"):
        list(tp.Loader(pipeline(tmp_path, hangs), executor=tp.Ray(num_workers=2), timeout=1))


def fails(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] == 123:
        raise ZeroDivisionError("no such number")
    return row


def test_an_error_of_the_function_comes_with_its_row(cluster, tmp_path):
    with pytest.raises(ZeroDivisionError, match="no such number") as caught:
        list(tp.Loader(pipeline(tmp_path, fails), executor="ray"))
    assert "1.parquet, row group 0, row 23" in " ".join(caught.value.__notes__)


def test_what_does_not_pickle_is_said(cluster, tmp_path):
    with open(tmp_path / "log", "w") as log:
        pipe = pipeline(tmp_path, lambda row: log.write("") or row)
        with pytest.raises(ConfigError, match="must pickle to reach the nodes"):
            list(tp.Loader(pipe, executor="ray"))


def test_few_bytes_may_be_on_their_way(cluster, tmp_path):
    ray_executor = tp.Ray(num_workers=4, max_in_flight=1)
    batches = listed(tp.Loader(pipeline(tmp_path), executor=ray_executor))
    assert batches == listed(pipeline(tmp_path))


def changing(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("changing_nodes.py")
    files(folder)
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as place:
        return subprocess.run(
            [sys.executable, str(program), case, str(folder)], env={**os.environ, "RAY_TMPDIR": place},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


def test_nodes_may_die_and_join(tmp_path):
    ended = changing("nodes", tmp_path)
    assert not ended.returncode, ended.stderr
    batches, nodes = json.loads((tmp_path / "result.json").read_text())
    assert batches == [batch["x"] for batch in listed(pipeline(tmp_path, dict))]
    assert nodes == 3


@pytest.mark.slow
def test_where_the_head_is_lost_ray_ends_the_program(tmp_path):
    ended = changing("head", tmp_path)
    assert ended.returncode
    assert "GCS may have been killed" in ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executor": "rays"}, r"executor\) must be tp.Threads"),
        ({"executor": 4}, r"executor\) must be tp.Threads"),
        ({"executor": "ray", "num_workers": 4}, r"None where num_workers is given"),
        ({"executor": "threads:2", "threads": 2}, r"None where threads is given"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        tp.Loader(pipeline(tmp_path), **options)


def test_the_share_of_time_in_the_function_is_measured():
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ray_calls"]
    command += ["--workers", "2", "--rows", "128", "--repeats", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0].split(" of")[0] for row in rows[::2]] == ["nothing", "1 ms", "1 ms", "JPEG"]
    assert {row[1] for row in rows} == {"2 of Ray", "2 of processes"}
    assert all(0 < float(row[3]) <= 1 for row in rows[2:])
