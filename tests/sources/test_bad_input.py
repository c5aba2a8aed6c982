"""Bad input is refused with what is wrong, the value, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp


def read(path: Path, content: bytes, reader: str, **options: Any) -> list[Any]:
    path.write_bytes(content)
    return list(getattr(tp.list_files(path), reader)(**options))


@pytest.mark.parametrize(
    ("reader", "name", "content", "message"),
    [
        ("read_parquet", "a.jsonl", b'{"a": 1}', r"a\.jsonl: .*; read_json\(\) is for such files"),
        ("read_arrow", "a.tsv.gz", b"a\tb\n", r"read_csv\(\) is for such files"),
        ("read_json", "a.npz", b"PK", r"not JSON: .*b'PK'; read_numpy\(\) is for such files"),
        ("read_arrow", "a.feather", b"PAR1....", r"Parquet file: use read_parquet\(\)$"),
        ("read_webdataset", "a.bin", b"short", r"not a tar archive \(starts with b'short'\)$"),
        ("read_csv", "a.csv", "a,b\n".encode("utf-32"), r"is UTF-32: .* iconv -f utf-32 -t utf-8"),
        ("read_csv", "a.csv", b"a" * 200_000 + b"\n", r"its first line does not name columns: "),
    ],
)
def test_a_file_of_another_kind_is_told_and_what_reads_it(
    tmp_path: Path, reader: str, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(tp.UnreadableError) as caught:
        read(tmp_path / name, content, reader)
    line = str(caught.value).splitlines()[1]
    assert line.strip().startswith(str(tmp_path / name))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: tp.list_files(d, suffix=5), r"list_files\(suffix\) must be an end .*, got 5"),
        (
            lambda d: tp.list_files(d).read_parquet(partitioning="x"),
            r'read_parquet\(partitioning\) must be "hive" or None, got \'x\'',
        ),
        (
            lambda d: tp.list_files(d).read_csv(quote=","),
            r"quote\) must be another character than the delimiter, got ','",
        ),
        (lambda d: list(tp.from_iterable(number)), r"number \(.*\) returned 5"),
        (lambda d: ROWS.write_parquet(None), r"write_parquet\(folder\) must be a path, got None"),
        (lambda d: ROWS.write_json(""), r"write_json\(folder\) must be a path, got ''"),
        (
            lambda d: ROWS.write_arrow(d, overwrite="no"),
            r"overwrite\) must be True or False, got 'no'",
        ),
        (lambda d: ROWS.write_memmap(d, overwrite=1), r"overwrite\) must be True or False, got 1"),
        (lambda d: ROWS.write_arrow(d / "x", num_files=4), r"there are 3 rows: give fewer files"),
    ],
)
def test_an_option_of_another_kind_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(tp.ConfigError, match=message):
        make(tmp_path)


ROWS = tp.from_arrow(pa.table({"x": [1, 2, 3]}))


def number() -> Any:
    return 5


def test_a_folder_is_no_file_of_labels(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"...")
    pipe = tp.list_files(tmp_path).read_images(str(tmp_path))
    with pytest.raises(
        tp.UnreadableError, match=r"cannot be read as CSV: .*; give the path of a CSV"
    ):
        list(pipe)


def test_an_array_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(2), label=np.arange(2))
    pipe = tp.list_files(tmp_path / "a.npz").read_numpy(["x", "labels"])
    with pytest.raises(
        tp.SchemaError, match=r"no column 'labels' \(did you mean 'label'\?\) in .*'x', 'label'"
    ):
        list(pipe)


def test_a_folder_says_which_files_are_looked_for_and_that_it_is_empty(tmp_path: Path) -> None:
    with pytest.raises(tp.MissingFilesError) as caught:
        list(tp.list_files(tmp_path).read_json())
    assert str(caught.value) == (
        "no file that ends in .jsonl, .json or .ndjson, compressed or not, in the folder "
        f"'{tmp_path}' or below it; it is empty"
    )


LARGE = 2**64 - 59  # and the one after it are the same float64


@pytest.mark.parametrize(
    ("reader", "name", "content", "line"),
    [
        ("read_json", "a.jsonl", f'{{"id": 1}}\n{{"id": {LARGE}}}\n', 2),
        ("read_json", "a.json", f'[{{"id": {LARGE}}},\n {{"id": 1}}]', 1),
        ("read_json", "a.jsonl", f'{{"a": {{"id": [0.5, {2**53 + 1}]}}}}\n', 1),
        ("read_csv", "a.csv", f"id\n1\n{LARGE}\n", 3),
    ],
)
def test_an_integer_that_a_float_does_not_hold_is_refused_unless_the_type_is_given(
    tmp_path: Path, reader: str, name: str, content: str, line: int
) -> None:
    path = tmp_path / name
    with pytest.raises(
        tp.UnreadableError, match=rf"line {line}: .* floats would round; say its type"
    ):
        read(path, content.encode(), reader)
    with pytest.raises(tp.UnreadableError, match="floats would round"):
        read(path, content.encode(), reader, infer="all")


@pytest.mark.parametrize("kind", [pa.uint64(), pa.float64()])
@pytest.mark.parametrize(("reader", "name"), [("read_json", "a.jsonl"), ("read_csv", "a.csv")])
def test_with_its_type_a_large_integer_is_what_the_type_makes_of_it(
    tmp_path: Path, reader: str, name: str, kind: pa.DataType
) -> None:
    content = f'{{"id": {LARGE}}}\n' if reader == "read_json" else f"id\n{LARGE}\n"
    rows = read(tmp_path / name, content.encode(), reader, schema=pa.schema([("id", kind)]))
    assert rows == [{"id": LARGE if kind == pa.uint64() else float(LARGE)}]


def test_large_floats_and_texts_of_digits_are_no_such_integers(tmp_path: Path) -> None:
    content = b'{"v": 1e300, "t": "90071992547409939007"}\n{"v": 9007199254740992, "t": "x"}\n'
    rows = read(tmp_path / "a.jsonl", content, "read_json")
    assert [row["v"] for row in rows] == [1e300, 2.0**53]
    content = b"v,t\n1e300,90071992547409939007x\n9007199254740992,\n"
    assert [row["v"] for row in read(tmp_path / "a.csv", content, "read_csv")] == [1e300, 2.0**53]


def test_csv_with_carriage_returns_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tp.UnreadableError, match="its lines end with a carriage return alone"):
        read(tmp_path / "a.csv", b"a,b\r1,2\r3,4\r", "read_csv")
    with pytest.raises(tp.UnreadableError, match="the line has 2 rows"):
        read(tmp_path / "b.csv", b"1,2\r3,4\r", "read_csv", column_names=["a", "b"])


ODD: dict[str, list[dict[str, Any]]] = {
    "read_csv": [
        {"delimiter": ",,"}, {"delimiter": "\0"}, {"delimiter": "é"}, {"quote": "\n"}, {"delimiter": '"'},
        {"null_values": "NA"},
        {"block_rows": 0}, {"column_names": []}, {"schema": {"a": "int"}}, {"columns": []},
        {"infer": "none"}, {"index": 7},
    ],
    "read_webdataset": [
        {"block_rows": 0}, {"columns": []}, {"missing": "skip"}, {"text": [3]}, {"index": 3},
    ],
    "read_numpy": [{"block_rows": 0}, {"columns": []}, {"output_column": ""}],
    "read_images": [{"labels": ""}, {"labels": 3}, {"block_rows": 0}],
    "read_bytes": [{"block_rows": 0}],
    "read_files": [
        {"fn": 3}, {"fn": len, "count": 3}, {"fn": len, "schema": 3}, {"fn": len, "index": 3},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("reader", "options"), [(r, each) for r in ODD for each in ODD[r]])
def test_options_are_checked_when_they_are_written_down(
    reader: str, options: dict[str, Any]
) -> None:
    with pytest.raises(tp.ConfigError, match=reader):
        getattr(tp, reader)("x", **options)
