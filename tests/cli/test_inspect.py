"""``trainpipes inspect``: docs/inside.md has what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from command import Ran


def written(path: Path, **columns: object) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_how_it_ends(tmp_path: Path, ran: Ran) -> None:
    good = written(tmp_path / "good.parquet", text=["one", "two"])
    (tmp_path / "mixed").mkdir()
    mixed = str(Path(written(tmp_path / "mixed" / "a.parquet", text=["a"])).parent)
    (tmp_path / "mixed" / "b.txt").write_text("b")
    empty = written(tmp_path / "empty.parquet", text=pa.array([], pa.string()))
    bad_rows = tmp_path / "rows.txt"
    bad_rows.write_bytes(b"one\n\xff\n")
    (tmp_path / "bad.parquet").write_bytes(Path(good).read_bytes()[:50])
    for line, code, said in (
        ([good, "--strict"], 0, ""),
        ([mixed], 0, ""),
        ([mixed, "--strict"], 1, "error: --strict: there are warnings (1)\n"),
        ([empty], 1, "error: there are no rows in these files\n"),
        ([tmp_path], 1, f"error: cannot be read: {tmp_path / 'bad.parquet'}\n"),
        ([bad_rows], 1, "error: 1 row of the sample cannot be used\n"),
        ([tmp_path / "nothing"], 1, "error: there is no file or folder"),
    ):
        found, _, err = ran("inspect", *line)
        assert (found, err.count("\n")) == (code, code)
        assert err.startswith(said)


def test_json_is_one_value_and_nothing_else(tmp_path: Path, ran: Ran) -> None:
    path = written(tmp_path / "a.parquet", prompt=["a", None], response=["cd", "ef"])
    code, out, err = ran("inspect", path, "--json", "--column", "prompt", "--column", "response")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["rows"], told["columns"][0]["nulls"], told["findings"]) == (2, 0.5, [])
    assert told["lengths"][0]["columns"] == ["prompt", "response"]


def test_storage_options_are_json_or_a_file_and_never_shown(tmp_path: Path, ran: Ran) -> None:
    path = written(tmp_path / "a.parquet", text=["one"])
    (tmp_path / "options.json").write_text('{"key": "hunter2"}')
    for given, code in (
        ('{"key": "hunter2"}', 0),
        (f"@{tmp_path}/options.json", 0),
        ("key=hunter2", 2),
        ('["hunter2"]', 2),
        ("@nowhere", 2),
    ):
        found, out, err = ran("inspect", path, "--storage-options", given)
        assert found == code
        assert "hunter2" not in out + err
