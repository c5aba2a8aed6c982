"""``repack`` that is killed at any moment goes on to the same files, and nothing else is left."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from cli.command import START, environment
from interpreters import python
from prepare.killed_repack import CASES
from prepare.repack_reference import contents, read
from trainpipes.prepare import repack
from trainpipes.prepare.repack import sorted_runs

TESTS = Path(__file__).parent.parent
MODULE = sys.modules["trainpipes.prepare.repack.repack"]


@pytest.mark.parametrize("name", CASES)
def test_killed_at_any_step_it_goes_on_to_the_same_files(name: str, tmp_path: Path) -> None:
    program = TESTS / "prepare" / "killed_repack.py"
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*python(), str(program), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "TRAINPIPES_CACHE": "off"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["odd"] == []
    assert found["kills"] == 8


def tokens(folder: Path, rows: int) -> None:
    """A file of rows of some 100 tokens."""
    lengths = np.random.default_rng(0).integers(1, 200, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.random.default_rng(1).integers(0, 50_000, offsets[-1], dtype=np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    pq.write_table(pa.table({"ids": ids, "n": np.arange(rows)}), folder / "rows.parquet")


def test_killed_at_any_time_the_command_goes_on_to_the_same_files(tmp_path: Path) -> None:
    tokens(tmp_path, 130_000)  # 50 MB
    command = [sys.executable, "-c", START, "repack", "rows.parquet"]
    options = ["--shuffle", "--rows-per-file", "20000", "--memory-limit", "32M"]
    whole = subprocess.run([*command, "whole", *options], cwd=tmp_path, env=environment())
    assert whole.returncode == 0
    wanted, draw, kills = contents(tmp_path / "whole"), random.Random(7), 0
    for _ in range(4):
        running = subprocess.Popen([*command, "out", *options], cwd=tmp_path, env=environment())
        begun = time.monotonic()
        while not (tmp_path / "out" / ".repack").exists() and running.poll() is None:
            time.sleep(0.005)
            assert time.monotonic() - begun < 100
        time.sleep(draw.uniform(0, 0.5))
        running.send_signal(signal.SIGKILL)
        kills += running.wait() == -signal.SIGKILL
    done = subprocess.run([*command, "out", *options], cwd=tmp_path, env=environment())
    assert done.returncode == 0
    assert kills
    found = contents(tmp_path / "out")
    assert found == wanted
    rows = pa.concat_tables(map(pq.read_table, (tmp_path / "out").glob("*.parquet")))
    assert sorted(rows["n"].to_pylist()) == list(range(130_000))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAST_MEMORY", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def some(rows: int = 1000) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": np.arange(rows), "text": ["some text " * 5] * rows}))


def failing(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception, after: int
) -> None:
    """Have a function of a module fail at a call."""
    real, calls = getattr(module, name), 0

    def instead(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(module, name, instead)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_full_disk_is_one_sentence_and_the_work_goes_on(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"shuffle": True, "memory_limit": 30_000, "threads": threads}
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        failing(patch, np, "save", full, 3)
        with pytest.raises(
            tp.ConfigError, match=r"cannot be written: No space left on device; free"
        ):
            repack(some(), tmp_path / "out", rows_per_file=200, **options)
    assert not list((tmp_path / "out").glob("part-*"))
    with monkeypatch.context() as patch:
        failing(patch, pq, "ParquetWriter", full, 3)
        with pytest.raises((tp.ConfigError, OSError), match="No space left"):
            repack(some(), tmp_path / "out", rows_per_file=200, **options)
    done = repack(some(), tmp_path / "out", rows_per_file=200, **options)
    whole = repack(some(), tmp_path / "whole", rows_per_file=200, **options)
    assert read(done.files) == read(whole.files)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *(f"part-0000{n}.parquet" for n in range(5)), "_manifest.json",
    }  # fmt: skip


@pytest.mark.usefixtures("little_memory")
def test_what_was_begun_with_other_options_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, np, "save", KeyboardInterrupt(), 5)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            repack(some(), tmp_path / "out", shuffle=True, memory_limit=30_000, threads=1)
    assert list((tmp_path / "out" / ".repack" / "read").iterdir())
    for options, said in (
        ({"shuffle": True, "seed": 5}, "seed: 0, now 5"),
        ({"sort": "x"}, "shuffle: true, now false"),
        ({"shuffle": True, "rows_per_file": 3}, "rows_per_file: null, now 3"),
    ):
        with pytest.raises(tp.ConfigError, match=said):
            repack(some(), tmp_path / "out", memory_limit=30_000, **options)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match="another pipeline"):
        repack(some(999), tmp_path / "out", shuffle=True)
    # Memory and threads are free, and so is where the temporary files are.
    done = repack(some(), tmp_path / "out", shuffle=True, threads=3, temp_dir=tmp_path / "other")
    assert sorted(row["x"] for row in read(done.files)) == list(range(1000))
    assert not (tmp_path / "out" / ".repack").exists()
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.usefixtures("little_memory")
def test_an_input_that_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": np.arange(1000)}), path)
    with monkeypatch.context() as patch:
        failing(patch, np, "save", KeyboardInterrupt(), 5)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            repack(path, tmp_path / "out", shuffle=True, memory_limit=3000, threads=1)
    os.utime(path, (1, 1))
    with pytest.raises(tp.DataChangedError, match="the input was changed"):
        repack(path, tmp_path / "out", shuffle=True, memory_limit=3000)
    done = repack(path, tmp_path / "out", shuffle=True, memory_limit=3000, overwrite=True)
    assert done.rows == 1000


@pytest.mark.parametrize("kind", ["file", "mix", "concat"])
def test_an_input_that_was_changed_since_all_was_written_is_refused(
    kind: str, tmp_path: Path
) -> None:
    path, other = tmp_path / "rows.txt", tmp_path / "other.txt"
    for each in (path, other):
        each.write_text("aaa\n" * 50)

    def data() -> Any:
        one, two = (tp.list_files(str(p)).read_text() for p in (path, other))
        kinds = {"mix": lambda: tp.mix({"a": one, "b": two}), "concat": lambda: one + two}
        return kinds[kind]() if kind in kinds else str(path)

    first = repack(data(), tmp_path / "out")
    manifest = (tmp_path / "out" / "_manifest.json").read_bytes()
    assert (first.kept, repack(data(), tmp_path / "out").kept) == (0, len(first.files))
    path.write_text("bbb\n" * 50)
    os.utime(path, (1, 1))
    with pytest.raises(tp.DataError, match=r"the input was changed.*overwrite=True"):
        repack(data(), tmp_path / "out")
    assert (tmp_path / "out" / "_manifest.json").read_bytes() == manifest
    assert repack(data(), tmp_path / "out", overwrite=True).rows == first.rows


def test_a_finished_folder_can_be_verified(tmp_path: Path) -> None:
    done = repack(some(), tmp_path / "out", verify=True)
    content = bytearray(Path(done.files[0]).read_bytes())
    content[60] ^= 1
    Path(done.files[0]).write_bytes(content)
    assert repack(some(), tmp_path / "out").rows == 1000
    with pytest.raises(tp.DataChangedError, match="its bytes are not those"):
        repack(some(), tmp_path / "out", verify=True)


@pytest.mark.parametrize(
    "options",
    [
        {"num_files": 10_000},
        {"num_files": 10_000, "shuffle": True},
        {"num_files": 900, "drop_duplicates": ["text"]},
        {},
    ],
)
def test_nothing_is_left_where_nothing_was_written(options: Any, tmp_path: Path) -> None:
    rows = some() if options else some().filter(lambda row: False)
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "new" / "out", tmp_path / "there"):
        with pytest.raises(tp.ConfigError):
            repack(rows, folder, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.usefixtures("little_memory")
def test_damaged_temporary_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing(patch, pq, "ParquetWriter", KeyboardInterrupt(), 3)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            repack(
                some(), tmp_path / "out", shuffle=True, memory_limit=30_000, threads=1, num_files=2
            )
    runs = sorted((tmp_path / "out" / ".repack" / "runs").glob("*.arrow"))
    runs[0].write_bytes(runs[0].read_bytes()[:-200])
    with pytest.raises(tp.DataError, match="temporary files are damaged"):
        repack(some(), tmp_path / "out", shuffle=True, memory_limit=30_000, threads=1, num_files=2)
    done = repack(some(), tmp_path / "out", shuffle=True, num_files=2, overwrite=True)
    assert done.rows == 1000


@pytest.mark.usefixtures("little_memory")
def test_rows_that_were_mixed_up_on_the_way_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sorted_runs.gathered

    def mixed(tables: Any, index: Any) -> Any:
        table = real(tables, index)
        return table.set_column(
            0, "x", table["x"].combine_chunks().take(pa.array(np.roll(np.arange(len(table)), 1)))
        )

    monkeypatch.setattr(sorted_runs, "gathered", mixed)
    rows = pa.table({"x": np.arange(1000), "y": np.arange(1000)})
    with pytest.raises(tp.DataError, match="not what was read"):
        repack(tp.from_arrow(rows), tmp_path / "out", shuffle=True, memory_limit=30_000)


@pytest.mark.usefixtures("little_memory")
def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    first = repack(some(), tmp_path / "out", shuffle=True, drop_duplicates=["text"])
    before = contents(tmp_path / "out")
    again = repack(some(), tmp_path / "out", shuffle=True, drop_duplicates=["text"])
    assert contents(tmp_path / "out") == before
    assert (again.rows, again.duplicates, again.rows_in) == (1, 999, 1000)
    assert again.files == first.files


def test_folders_that_cannot_be_the_output_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    for data in (tmp_path, tmp_path / "*.parquet", tmp_path / "a.parquet"):
        with pytest.raises(tp.ConfigError, match="holds files that are read"):
            repack(data, tmp_path)
    inside = tmp_path / "out"
    for data in (tmp_path, tmp_path / "**" / "*.parquet", str(tmp_path / "**")):
        with pytest.raises(tp.ConfigError, match="is within"):
            repack(data, inside)
    repack(tmp_path / "*.parquet", inside)  # which does not take in what is below
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "mine.txt").write_text("mine")
    with pytest.raises(tp.ConfigError, match="holds files that no writer has written"):
        repack(tmp_path / "*.parquet", tmp_path / "others")
    assert (tmp_path / "others" / "mine.txt").read_text() == "mine"


def test_a_disk_that_is_too_small_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        tp.ConfigError, match=r"needs about [\d.]+ kB on the disk of .* 1.0 kB free"
    ):
        repack(some(), tmp_path / "out", shuffle=True)
