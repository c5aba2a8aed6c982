"""``repack`` that is killed at any moment goes on to the same rows, and nothing else is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import python
from prepare.repack_reference import read
from trainpipes.prepare import repack
from trainpipes.writers import Threads

LITTLE: dict[str, Any] = {"shuffle": True, "memory_limit": "64KB"}


def some(rows: int = 400) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": np.arange(rows), "text": ["some text " * 50] * rows}))


@pytest.mark.parametrize(("after", "threads"), [(7, 1), (12, 2)])
def test_a_full_disk_is_one_sentence_and_the_work_goes_on(threads, after, tmp_path, monkeypatch):
    options: dict[str, Any] = {**LITTLE, "executor": Threads(threads), "rows_per_file": 80}
    whole = repack(some(), tmp_path / "whole", **options)
    from trainpipes.filesystems.places import OutputFile

    real, calls = OutputFile.sync, 0

    def full(self: OutputFile) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise tp.ConfigError(
                "part cannot be written: No space left on device; free space there"
            )
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "sync", full)
        with pytest.raises(
            tp.ConfigError, match=r"cannot be written: No space left on device; free"
        ):
            repack(some(), tmp_path / "out", **options)
    for path in (tmp_path / "out").glob("part-*"):
        assert pq.read_table(path).equals(pq.read_table(tmp_path / "whole" / path.name))
    done = repack(some(), tmp_path / "out", **options)
    assert read(done.files) == read(whole.files)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *(f"part-0000{n}.parquet" for n in range(5)), "_manifest.json",
    }  # fmt: skip


def test_a_disk_that_is_really_full_leaves_whole_files(tmp_path):
    """No file of the process can have more than 3 kB."""
    code = (
        "import resource, signal, sys\n"
        "from prepare.test_repack_killed import LITTLE, some\n"
        "from trainpipes.prepare import repack\n"
        "rows = some()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))\n"
        "repack(rows, sys.argv[1], **LITTLE, compression=None)\n"
    )
    done = subprocess.run(
        [*python(), "-c", code, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "cannot be written: File too large; free space" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").glob("part-*"))
    assert repack(some(), tmp_path / "out", **LITTLE, compression=None).rows == 400


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a job between its two passes."""
    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", failing(pq.ParquetWriter, 2))
        with pytest.raises(KeyboardInterrupt):
            repack(some(), folder, executor=Threads(1), num_files=2, **LITTLE)


def failing(real: Any, after: int) -> Any:
    calls = 0

    def instead(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return real(*args, **options)

    return instead


def test_another_memory_limit_goes_on_to_the_same_rows(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", monkeypatch)
    done = repack(some(), tmp_path / "out", shuffle=True, num_files=2, memory_limit="1MB")
    whole = repack(some(), tmp_path / "whole", shuffle=True, num_files=2)
    assert read(done.files) == read(whole.files)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rows_that_are_written_between_the_passes_are_not_made_again(
    elsewhere, tmp_path, monkeypatch
):
    from trainpipes.prepare import shuffle as reading

    options: dict[str, Any] = {**LITTLE, "executor": Threads(1)}
    options |= {"temp_dir": tmp_path / "temporary"} if elsewhere else {}
    made: list[str] = []
    real = reading.scatter_part

    def noting(schema: Any, places: Any, edges: Any, unit: Any, task: Any, *more: Any) -> Any:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(task.name)
        return real(schema, places, edges, unit, task, *more)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "scatter_part", noting)
        with pytest.raises(KeyboardInterrupt):
            repack(some(), tmp_path / "out", **options)
    again: list[str] = []
    monkeypatch.setattr(
        reading, "scatter_part", lambda *given: [again.append(given[4].name), real(*given)][1]
    )
    done = repack(some(), tmp_path / "out", **options)
    assert made
    assert again
    assert not {*made} & {*again}
    assert read(done.files) == read(repack(some(), tmp_path / "whole", shuffle=True).files)


def test_temporary_rows_of_another_function_are_not_used_when_overwritten(tmp_path, monkeypatch):
    value = 1

    def valued(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["x"], "value": value}

    def again(**more: Any) -> Any:
        options: dict[str, Any] = {"num_files": 2, "temp_dir": tmp_path / "temporary"}
        return repack(
            some().map(valued, version="1"), tmp_path / "out", **LITTLE, **options, **more
        )

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", failing(pq.ParquetWriter, 2))
        with pytest.raises(KeyboardInterrupt):
            again(executor=Threads(1))
    value = 2
    done = again(executor=Threads(1), overwrite=True)
    assert {row["value"] for row in read(done.files)} == {2}


@pytest.mark.parametrize("damage", [b"", b"another"])
def test_damaged_temporary_files_are_found(damage, tmp_path, monkeypatch):
    interrupted(tmp_path / "out", monkeypatch)
    for path in (tmp_path / "out" / "_unfinished").rglob("*.pieces"):
        content = path.read_bytes()
        path.write_bytes((content[: -200 - len(damage)] + damage).ljust(len(content), b"\0"))
    with pytest.raises(tp.DataError, match="temporary files are damaged"):
        repack(some(), tmp_path / "out", executor=Threads(1), num_files=2, **LITTLE)
    done = repack(some(), tmp_path / "out", shuffle=True, num_files=2, overwrite=True)
    assert done.rows == 400


def test_rows_that_were_lost_on_the_way_are_found(tmp_path, monkeypatch):
    from trainpipes.prepare import shuffle as reading

    real = reading.read_pieces

    def with_one_lost(place: Any, pieces: Any) -> Any:
        (first, *others), places = real(place, pieces)
        return [first.slice(1), *others], places[1:]

    monkeypatch.setattr(reading, "read_pieces", with_one_lost)
    with pytest.raises(tp.DataError, match="are not all there, once"):
        repack(some(), tmp_path / "out", **LITTLE)


def test_an_input_that_gives_fewer_rows_than_it_counted_is_said(tmp_path, monkeypatch):
    from trainpipes.writers.epoch_rows import EpochRows

    real = EpochRows.tables
    monkeypatch.setattr(EpochRows, "tables", lambda self, a, b: real(self, a, b - 1))
    with pytest.raises(tp.DataError, match="the input has 399 rows from row 0 on, and 400"):
        repack(some(), tmp_path / "out", executor=Threads(1), shuffle=True)


@pytest.mark.parametrize("options", [{"num_files": 900}, {}], ids=str)
def test_nothing_is_left_where_nothing_was_written(options, tmp_path):
    rows = some() if options else some().filter(lambda row: False)
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "new" / "out", tmp_path / "there"):
        for shuffle in (False, True):
            with pytest.raises(tp.ConfigError):
                repack(rows, folder, shuffle=shuffle, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_temporary_files_may_lie_elsewhere_and_are_gone_at_the_end(tmp_path):
    temporary = tmp_path / "temporary"
    done = repack(some(), tmp_path / "out", temp_dir=temporary, **LITTLE)
    whole = repack(some(), tmp_path / "whole", shuffle=True)
    assert read(done.files) == read(whole.files)
    assert not list(temporary.iterdir())
