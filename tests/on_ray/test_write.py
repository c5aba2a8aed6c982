"""Writers on a Ray cluster give the bytes that one process writes, after kills too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.writers import Ray

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # workers, too, import it

from unfinished import contents, noted

ROWS = 3000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table(
        {
            "x": range(ROWS),
            "text": [f"row {n} " + "and more " * (n % 9) for n in range(ROWS)],
            "ids": [[n] * (n % 5) for n in range(ROWS)],
        }
    )
    for n in range(3):
        part = table.slice(n * ROWS // 3, ROWS // 3)
        pq.write_table(part, folder / f"{n}.parquet", row_group_size=130)
    return str(folder)


def late(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": 2 * row["x"], "late": None if row["x"] < 280 else "a"}


CHAINS: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "tokens": lambda rows: rows.select("text").tokenize("bytes"),
    "shuffled": lambda rows: rows.sharding_filter(6).shuffle(400, seed=2),
    "functions": lambda rows: rows.map(late).skip(7).take(2500),
    "joined": lambda rows: tp.concat(rows.select("x"), rows.select("x").take(10)).shuffle(100),
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", CHAINS)
def test_the_bytes_are_those_of_one_process(name: str, files: str, tmp_path: Path):
    pipe = CHAINS[name](tp.read_parquet(files))
    here = pipe.write_parquet(tmp_path / "here", num_files=7)
    there = pipe.write_parquet(tmp_path / "there", num_files=7, executor=Ray())
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert there.rows == here.rows
    there.verify()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", ["write_arrow", "write_json", "write_memmap"])
def test_other_formats_too(method: str, files: str, tmp_path: Path):
    pipe = tp.read_parquet(files).select("x", "ids").shuffle(400, seed=2)
    for folder, executor in (("here", None), ("there", Ray())):
        getattr(pipe, method)(tmp_path / folder, rows_per_file=700, executor=executor)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


@pytest.mark.usefixtures("cluster")
def test_a_folder_goes_on_by_ray_and_by_one_process_alike(files: str, tmp_path: Path):
    pipe = tp.read_parquet(files).map(late).shuffle(400, seed=2)
    whole = tmp_path / "whole"
    pipe.write_parquet(whole, num_files=6)
    for name, executors in {"a": (Ray(), None), "b": (None, Ray())}.items():
        folder, stop = tmp_path / name, tmp_path / f"stop-{name}"
        stop.touch()
        failing = tp.read_parquet(files).map(Stops(stop, 1700), version=1).shuffle(400, seed=2)
        with pytest.raises(RuntimeError, match="stopped at 1700"):
            failing.write_parquet(folder, num_files=6, executor=executors[0])
        # A file that a task put in place as the other failed may not be noted, and is made again.
        paths = [folder / entry["file"] for entry in noted(folder)]
        made = {path: path.stat().st_mtime_ns for path in paths}
        stop.unlink()
        failing.write_parquet(folder, num_files=6, executor=executors[1])
        assert [path.read_bytes() for path in sorted(folder.glob("part-*"))] == [
            path.read_bytes() for path in sorted(whole.glob("part-*"))
        ]
        assert all(path.stat().st_mtime_ns == time for path, time in made.items())


class Stops:
    """Does what ``late`` does, until a row while a file is there."""

    def __init__(self, file: Path, row: int) -> None:
        self.file, self.row = file, row

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == self.row and self.file.exists():
            raise RuntimeError(f"stopped at {self.row}")
        return late(row)
