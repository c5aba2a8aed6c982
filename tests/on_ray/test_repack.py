"""``repack`` on a Ray cluster writes the rows that threads of one machine write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainpipes.prepare import repack
from trainpipes.writers import Ray

#: So little memory that there are several parts.
ONE: dict[str, Any] = {"rows_per_file": 800, "memory_limit": "64KB"}
CHOICES: list[dict[str, Any]] = [
    {},
    {"shuffle": True, "seed": 3, "row_group_size": 64},
    {"shuffle": True, "num_files": 3, "rows_per_file": None, "compression": "snappy"},
    {"shuffle": True, "columns": ["x", "key"], "rows_per_file": 90},
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files whose row groups are smaller and larger than a part of the input."""
    folder, count = tmp_path_factory.mktemp("given"), 3000
    table = pa.table(
        {
            "n": range(count),
            "key": pa.array([None if i % 7 == 0 else i * 37 % 100 for i in range(count)]),
            "x": [float("nan") if i % 11 == 0 else (i % 5) / 2 for i in range(count)],
            "text": [f"é{i % 500}" * (i % 4) for i in range(count)],
            "ids": [list(range(i % 6)) if i % 13 else None for i in range(count)],
        }
    )
    for number, group in enumerate((100, 1000, 37)):
        part = table.slice(number * 1000, 1000)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=group)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """The rows of all files, as text, where NaN is NaN."""
    assert all(p.suffix == ".parquet" or p.name == "_manifest.json" for p in folder.iterdir())
    paths = sorted(folder.glob("*.parquet"))
    return {path.name: repr(pq.read_table(path).to_pylist()) for path in paths}


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_files_are_those_of_threads(
    options: dict[str, Any], cluster: None, given: Path, tmp_path: Path
) -> None:
    wanted = repack(given, tmp_path / "threads", **{**ONE, **options})
    assert len(wanted.files) > 1
    done = repack(given, tmp_path / "tasks", executor=Ray(), **{**ONE, **options})
    assert done.rows == wanted.rows
    assert contents(tmp_path / "tasks") == contents(tmp_path / "threads")
