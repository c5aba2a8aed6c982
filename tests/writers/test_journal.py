"""What is noted of a folder that is not finished: line by line, whatever is left of the last one."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.prepare import repack
from unfinished import noted

FILES = 5


class Stopped(Exception):
    pass


def rows(stop: int | None = None) -> tp.Pipeline:
    def maybe(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == stop:
            raise Stopped
        return row

    return tp.from_arrow(pa.table({"x": range(1000)})).shuffle(30).map(maybe, version=1)


def begun(folder: Path, files: int = 3) -> Path:
    """A folder in which so many files are whole; gives its journal."""
    order = [row["x"] for row in rows()]
    with pytest.raises(Stopped):
        rows(order[200 * files + 190]).write_parquet(folder, num_files=FILES)
    assert len(noted(folder)) == files
    (journal,) = folder.glob("_unfinished-*")
    return journal


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_goes_on(folder: Path, kept: int) -> None:
    """The same call keeps so many files, and ends as if nothing had been."""
    before = {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("part-*"))[:kept]}
    rows().write_parquet(folder, num_files=FILES)
    rows().write_parquet(folder.with_name("whole"), num_files=FILES)
    assert contents(folder) == contents(folder.with_name("whole"))
    assert all((folder / name).stat().st_mtime_ns == time for name, time in before.items())


@pytest.mark.parametrize(
    "left", [b"", b"{", b'{"file": {"file": "part-00', b"\0" * 40, b'{"file": 7}\n']
)
def test_a_line_that_was_half_written_is_ignored(left: bytes, tmp_path: Path) -> None:
    journal = begun(tmp_path / "out")
    with open(journal, "ab") as file:
        file.write(left)
    check_goes_on(tmp_path / "out", 3)


def test_a_line_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    journal = begun(tmp_path / "out")
    *_, last = journal.read_bytes().splitlines(keepends=True)
    with open(journal, "ab") as file:
        file.write(last)
    check_goes_on(tmp_path / "out", 3)


def test_files_after_a_damaged_line_are_made_again(tmp_path: Path) -> None:
    journal = begun(tmp_path / "out")
    lines = journal.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"{", b"(")
    journal.write_bytes(b"\n".join(lines))
    check_goes_on(tmp_path / "out", 1)


def test_a_folder_of_the_earlier_form_is_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    journal = begun(out)
    state = json.loads((out / "_unfinished.json").read_text())
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for name in ("row", "journal"):
        del state[name]
    state |= {"files": [line["file"] for line in lines], "next": lines[-1]["next"]}
    (out / "_unfinished.json").write_text(json.dumps(state, indent=1))
    journal.unlink()
    check_goes_on(out, 3)


def test_rows_go_on_where_the_cursor_stands_whatever_files_come_after(tmp_path: Path) -> None:
    """As where tasks of Ray have made later files, and one process then the first."""
    out = tmp_path / "out"
    journal = begun(out)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    first, *later = (line["file"] for line in lines)
    state = json.loads((out / "_unfinished.json").read_text())
    (out / "_unfinished.json").write_text(json.dumps({**state, "files": later}))
    journal.write_text(json.dumps({**lines[0], "file": first}) + "\n")
    check_goes_on(out, 3)


def test_a_journal_that_cannot_be_written_to_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, calls = tmp_path / "out", os.write, 0

    def full(file: int, data: Any) -> int:
        nonlocal calls
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return write(file, data)
        calls += 1
        if calls == 3:
            return write(file, data[:10])
        if calls > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            tp.ConfigError, match=r"_unfinished-.* cannot be written: No space left"
        ):
            rows().write_parquet(out, num_files=FILES)
    (journal,) = out.glob("_unfinished-*")
    assert len(journal.read_bytes().splitlines()) == 2
    assert journal.read_bytes().endswith(b"\n")
    check_goes_on(out, 2)


def test_a_note_takes_as_many_bytes_whatever_was_noted_before(tmp_path: Path) -> None:
    journal = begun(tmp_path / "out", 4)
    sizes = [len(line) for line in journal.read_bytes().splitlines()]
    assert max(sizes[1:]) - min(sizes[1:]) < 20
    assert not json.loads((tmp_path / "out" / "_unfinished.json").read_text())["files"]


def test_overwriting_an_unfinished_folder_leaves_nothing_of_it(tmp_path: Path) -> None:
    begun(tmp_path / "out")
    (tmp_path / "out" / "part-00007.parquet").write_bytes(b"that nobody has noted")
    (tmp_path / "out" / "part-of-the-readme.txt").write_text("not ours")
    repack(rows(), tmp_path / "out", num_files=2, overwrite=True)
    assert sorted(contents(tmp_path / "out")) == [
        "_manifest.json", "part-00000.parquet", "part-00001.parquet", "part-of-the-readme.txt",
    ]  # fmt: skip
