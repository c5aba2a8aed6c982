"""Files that are damaged or strange: they are named, told in part, and harm nobody."""

from __future__ import annotations

import datetime
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from inspection.tables import parquet, said
from trainpipes.look.inspection import inspect_files
from trainpipes.look.inspection.cells import cell, harmless


def test_damaged_files_are_named_and_the_others_told(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", {"text": ["a"] * 100}).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    (tmp_path / "c.parquet").write_bytes(b"")
    (tmp_path / "d.parquet").write_bytes(b"this is something else")
    (tmp_path / "e.parquet").write_bytes(b"PARE" + whole[4:-4] + b"PARE")
    found = inspect_files(tmp_path)
    assert (found.files, found.rows, found.readable) == (1, 100, False)
    told = {Path(bad.path).name: bad.reason for bad in found.unreadable}
    assert "cut short" in told["b.parquet"]
    assert "empty" in told["c.parquet"]
    assert "not a Parquet file" in told["d.parquet"]
    assert "encrypted" in told["e.parquet"]
    assert "cannot be read: " in str(found)


def test_rows_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    rows = {"text": [f"row {n}" for n in range(10_000)]}
    content = bytearray(parquet(tmp_path / "a.parquet", rows, compression="zstd").read_bytes())
    content[1000:9000] = bytes(8000)
    (tmp_path / "b.parquet").write_bytes(content)
    found = inspect_files(tmp_path)
    assert [Path(bad.path).name for bad in found.unreadable] == ["b.parquet"]
    assert "cannot be decoded" in found.unreadable[0].reason
    assert found.shown


def test_broken_lines_of_text_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "c.jsonl").write_bytes(b'{"x": "\xff"}\n')
    found = inspect_files(tmp_path)
    assert [Path(bad.path).name for bad in found.unreadable] == ["b.jsonl", "c.jsonl"]
    assert found.unreadable[0].reason.startswith("line 2")
    assert "UTF-8" in found.unreadable[1].reason


def test_rows_that_have_other_types_than_those_before_are_told(tmp_path: Path) -> None:
    lines = [f'{{"x": {n}, "text": "{"word " * 200}"}}\n' for n in range(6000)]
    (tmp_path / "a.jsonl").write_text("".join(lines) + '{"x": "no number", "text": ""}\n')
    found = inspect_files(tmp_path)
    assert "column 'x' is string here" in said(found, "unlike_rows")


ODD_NAMES = ("a\nb", "[red]x[/red]", "\x1b[31mz", "", "a.b", "\u202eabc", "<script>", "wide 日本")


@pytest.mark.parametrize("width", [1, 40, 100, 1000])
def test_names_and_texts_cannot_harm_a_terminal_or_a_page(width: int, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\nb.parquet"
    parquet(path, {name: [f"{name}!"] * 20 + [None] for name in ODD_NAMES})
    (tmp_path / "bad\x1b.parquet").write_bytes(b"")
    found = inspect_files(tmp_path)
    shown = found.text(width)
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert "[red]x" in shown.replace("\n", "") or width == 1
    assert "<script>" not in found._repr_html_()
    assert [column.name for column in found.columns] == list(ODD_NAMES)


def test_lines_fit_a_narrow_terminal(tmp_path: Path) -> None:
    rows = {"a long name of a column": ["some words " * 50, None], "n": [1, 2]}
    parquet(tmp_path / "a.parquet", rows)
    found = inspect_files(tmp_path / "a.parquet", tokenizer="bytes")
    lines = found.text(40).splitlines()
    assert max(len(line) for line in lines if not line.startswith("  -> ")) <= 40


def test_every_type_of_column_is_told(tmp_path: Path) -> None:
    day, now = datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4)
    columns = {
        "struct": pa.array([{"a": 1, "b": {"c": "x"}}, None]),
        "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
        "decimal": pa.array([Decimal("1.50"), None]),
        "date": pa.array([day, None]),
        "timestamp": pa.array([now, None], pa.timestamp("ns", "UTC")),
        "time": pa.array([now.time(), None]),
        "duration": pa.array([datetime.timedelta(days=1), None]),
        "binary": pa.array([b"\0\xff" * 100, None]),
        "fixed": pa.array([b"ab", None], pa.binary(2)),
        "dictionary": pa.array(["a", None]).dictionary_encode(),
        "half": pa.array([np.float16(1), None], pa.float16()),
        "lists": pa.array([[["a"], []], None]),
        "array": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
        "null": pa.nulls(2),
        "bool": pa.array([True, None]),
        "view": pa.array(["a view", None], pa.string_view()),
        "uuid": pa.array([b"a" * 16, None], pa.uuid()),
        "large": pa.array([2**64 - 1, None], pa.uint64()),
    }
    parquet(tmp_path / "a.parquet", columns)
    found = inspect_files(tmp_path, tokenizer="bytes", rows=2)
    assert [column.name for column in found.columns] == list(columns)
    assert {column.nulls for column in found.columns} == {0.5, 1.0}
    first, second = found.shown
    assert first["struct"] == "{a: 1, b: {c: x}}"
    assert (first["decimal"], first["date"], first["binary"]) == ("1.50", "2020-01-02", "<200 B>")
    assert (first["lists"], first["view"], first["large"]) == (
        "[[a], []]",
        "a view",
        str(2**64 - 1),
    )
    assert set(second.values()) == {"null"}


def test_huge_texts_are_cut_in_the_middle(tmp_path: Path) -> None:
    texts = ["begin " + "x" * 20_000_000 + " end", "short"]
    parquet(tmp_path / "a.parquet", {"text": texts})
    found = inspect_files(tmp_path, tokenizer="bytes")
    shown = found.shown[0]["text"]
    assert (shown[:6], shown[-4:], len(shown) < 200) == ("begin ", " end", True)
    assert found.lengths[0].most == pytest.approx(20_000_010, rel=0.001)


def test_text_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    good = pa.array([b"good", b"\xff\xfe" * 300, b"fine"])
    bad = pa.Array.from_buffers(pa.string(), 3, good.buffers())
    parquet(tmp_path / "a.parquet", {"text": bad})
    found = inspect_files(tmp_path, tokenizer="bytes", rows=3)
    assert 'errors="replace"' in said(found, "not_utf8")
    assert found.shown[0]["text"] == "good"


def test_names_of_files_that_are_no_text_are_told(tmp_path: Path) -> None:
    parquet(tmp_path / "x.parquet", {"x": [1]})
    (tmp_path / "x.parquet").rename(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.parquet"))
    parquet(tmp_path / "b.parquet", {"x": [1]})
    found = inspect_files(tmp_path)
    assert "not UTF-8" in found.unreadable[0].reason
    str(found).encode()
    assert "\\udcff" in found.to_dict()["unreadable"][0]["path"]


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    arrays = [pa.array([1]), pa.array([2]), pa.array(["x"])]
    parquet(tmp_path / "a.parquet", pa.Table.from_arrays(arrays, ["a", "a", "b"]))
    found = inspect_files(tmp_path)
    assert "'a'" in said(found, "same_names")
    assert found.shown[0] == {"b": "x"}


def test_files_without_columns_are_told(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", pa.table({"x": [1, 2]}).select([]))
    found = inspect_files(tmp_path)
    assert (found.columns, found.shown) == ((), ())
    str(found)


def test_a_damaged_page_does_not_stop_the_search_for_duplicates(tmp_path: Path) -> None:
    rows = {"text": [f"row {n}" for n in range(10_000)]}
    content = bytearray(parquet(tmp_path / "a.parquet", rows, compression="zstd").read_bytes())
    content[1000:9000] = bytes(8000)
    (tmp_path / "b.parquet").write_bytes(content)
    parquet(tmp_path / "c.parquet", rows)
    found = inspect_files(tmp_path, sample=100, duplicates=True)
    assert "10,000 of 20,000 rows" in said(found, "duplicates")
    assert len(found.unreadable) == 1


def test_a_file_that_grows_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "a.parquet", {"x": [1, 2]})
    from trainpipes.look.inspection import inspect_files as module

    reading = module.__globals__["row_findings"]

    def written(*given: object) -> object:
        with path.open("ab") as file:
            file.write(b"more")
        return reading(*given)

    monkeypatch.setitem(module.__globals__, "row_findings", written)
    assert "changed meanwhile" in said(inspect_files(path), "being_written")


def test_control_characters_are_shown_as_escapes() -> None:
    assert harmless("a\x07b\u200f") == "a\\x07b\\u200f"
    assert cell(pa.array(["tab\there"]), 0) == "tab\\there"


def test_long_lists_and_structs_are_shortened() -> None:
    assert cell(pa.array([list(range(1000))]), 0) == "[0, 1, 2, … (1,000)]"
    wide = cell(pa.array([{f"f{n}": n for n in range(50)}]), 0)
    assert wide.startswith("{f0: 0, ")
    assert wide.endswith(", …}")
    deep = pa.array([[[[[[[1]]]]]]])
    assert cell(deep, 0) == "[[[[[1]]]]]"


def test_paths_below_the_working_folder_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parquet(tmp_path / "data" / "a.parquet", {"x": [1]})
    (tmp_path / "data" / "b.parquet").write_bytes(b"")
    found = inspect_files("data")
    assert "cannot be read: data/b.parquet: empty" in str(found)
    assert found.unreadable[0].path == str(tmp_path / "data" / "b.parquet")
