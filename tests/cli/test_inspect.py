"""``trainpipes inspect``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainpipes.cli.app import run


def written(path: Path, **columns: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def command(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainpipes", "inspect", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


def test_the_command_tells_what_is_in_a_folder_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    written(folder / "a.parquet", text=["one", "three", None])
    done = command(folder, "--tokenizer", "bytes", env={**os.environ, "COLUMNS": "40"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert ["text", "tokens"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert ".filter(pc.field('text').is_valid())" in done.stdout
    assert max(len(x) for x in done.stdout.splitlines() if not x.startswith("  ->")) <= 40


def test_json_is_one_value_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.parquet", text=["one", None])
    assert run(["inspect", str(path), "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["rows"], [one["kind"] for one in told["findings"]]) == (2, ["nulls"])
    assert printed.err == ""


def test_strict_makes_a_warning_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a" / "a.parquet", text=["one", "two"])
    assert run(["inspect", str(path.parent), "--strict"]) == 0
    assert run(["inspect", str(path.parent), "--strict", "--max-length", "2"]) == 1
    nulls = written(tmp_path / "b" / "a.parquet", text=["one", None])
    assert run(["inspect", str(nulls)]) == 0
    assert run(["inspect", str(nulls), "--strict"]) == 1
    capsys.readouterr()


def test_what_cannot_be_read_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.parquet", text=["one"])
    (tmp_path / "b.parquet").write_bytes(path.read_bytes()[:50])
    assert run(["inspect", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "cut short" in printed.out
    assert ["rows", "1,"] in [line.split()[:2] for line in printed.out.splitlines()]
    empty = written(tmp_path / "c.parquet", text=pa.array([], pa.string()))
    assert run(["inspect", str(empty)]) == 1
    capsys.readouterr()


def test_files_that_are_not_there_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(tmp_path / "nothing")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: there is no file or folder")
    assert "Traceback" not in printed.err


def test_storage_options_are_json_or_a_file_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.parquet", text=["one"])
    (tmp_path / "options.json").write_text('{"key": "hunter2"}')
    assert run(["inspect", str(path), "--storage-options", '{"key": "hunter2"}']) == 0
    assert run(["inspect", str(path), "--storage-options", f"@{tmp_path}/options.json"]) == 0
    assert run(["inspect", str(path), "--storage-options", "key=hunter2"]) == 2
    assert run(["inspect", str(path), "--storage-options", "@nowhere"]) == 2
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err


def test_escapes_and_markup_in_files_are_printed_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.parquet", **{"\x1b[31m": ["[red]\x1b[2J"], "[bold]": ["\x07"]})
    assert run(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "[red]\\x1b[2J" in printed


def test_several_columns_are_told_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.parquet", prompt=["a", "b"], response=["cd", "ef"])
    assert run(["inspect", str(path), "--column", "prompt", "--column", "response"]) == 0
    assert "prompt + response" in capsys.readouterr().out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--help"]) == 0
    assert "trainpipes inspect data" in capsys.readouterr().out


def test_what_makes_it_fail_is_said_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert run(["inspect", str(tmp_path / "empty.parquet")]) == 1
    assert capsys.readouterr().err == "error: there are no rows in these files\n"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "nulls.parquet")
    assert run(["inspect", str(tmp_path), "--json"]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["unreadable"]
    assert found.err.startswith("error: cannot be read: ")
    assert found.err.rstrip().endswith("bad.parquet")
    assert run(["inspect", str(tmp_path / "nulls.parquet"), "--strict"]) == 1
    assert capsys.readouterr().err == "error: --strict: there are warnings (1)\n"
