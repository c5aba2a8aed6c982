"""Files that are damaged, or of another kind than what they are read as: one error with the file, the place
and what to do. Files that only look odd are read."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from damaged_files import arrow, footer_of, tar
from interpreters import python

# What files hold


def messages(content: bytes) -> list[int]:
    """Where the messages of an Arrow file begin."""
    return [at for at in range(len(content)) if content.startswith(b"\xff" * 4, at)]


def with_bytes(content: bytes, place: int, new: bytes, instead_of: int = 0) -> bytes:
    return content[:place] + new + content[place + instead_of :]


def other_name(content: bytes, place: int) -> bytes:
    return with_bytes(content, place, b"c9", 2)


def one_batch_less_in_the_footer() -> bytes:
    content = arrow()
    start = content.index((2).to_bytes(4, "little"), footer_of(content).start)
    while content[start + 4 + 24 : start + 4 + 28] == b"\0" * 4:
        start = content.index((2).to_bytes(4, "little"), start + 1)
    return with_bytes(content, start, b"\1", 1)


def with_room() -> bytes:
    """Some writers begin at multiples of 64 bytes, also with the first message."""
    content = arrow(table=pa.table({"x": range(10)}))
    batch = 16 + int.from_bytes(content[12:16], "little")  # where the footer says
    start = content.index(batch.to_bytes(8, "little"), footer_of(content).start)
    content = with_bytes(content, start, (batch + 56).to_bytes(8, "little"), 8)
    return with_bytes(content, 8, bytes(56))


def text(offsets: list[int], data: bytes, nested: bool) -> pa.Table:
    ends = pa.py_buffer(np.array(offsets, np.int32))
    rows = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(data)])
    if nested:
        rows = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([rows], ["t"]))
    return pa.table({"t": rows})


def with_offsets(lie: list[int], nested: bool) -> bytes:
    content = arrow(True, table=text([0, 1, 3], b"abc", nested))
    place = content.rindex(np.array([0, 1, 3], np.int32).tobytes())
    return with_bytes(content, place, np.array(lie, np.int32).tobytes(), 12)


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(16)


def saved(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    return sink.getvalue()


def nested(depth: int) -> str:
    """A row of so many brackets within each other."""
    return '{"b": 1, "a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


FILE, STREAM = arrow(), arrow(True)
PAIRS = tar(*((f"{n}.{kind}", b"x") for n in range(3) for kind in ("jpg", "cls")))
TIMES = [
    pa.array([0, 1 << 62], pa.timestamp("s")), pa.array([0, 1 << 30], pa.date32()),
    pa.array([{"tokens": 0, "day": 0}, {"tokens": 0, "day": 1 << 30}],
             pa.struct({"tokens": pa.int64(), "day": pa.date32()})),
]  # fmt: skip
LARGE = 2**64 - 59  # and the one after it are the same float64
GOOD = b'{"a":1,"b":"x"}\n'
NPY = b"{'descr': '<i8', 'fortran_order': False, 'shape': "
#: Its name, what it holds, what reads it with which options, and what is said of it.
BAD: list[tuple[str, bytes, str, dict[str, Any], str]] = [
    # of another kind
    ("a.jsonl", b'{"a": 1}', "parquet", {}, r"a\.jsonl: .*; read_json\(\) is for such files"),
    ("a.tsv.gz", b"a\tb\n", "arrow", {}, r"read_csv\(\) is for such files"),
    ("a.npz", b"PK", "json", {}, r"not JSON: .*b'PK'; read_numpy\(\) is for such files"),
    ("a.feather", b"PAR1....", "arrow", {}, r"Parquet file: use read_parquet\(\)$"),
    ("a.arrow", b"FEA1" + bytes(40), "arrow", {}, "version 1"),
    ("a.arrow", b"", "arrow", {}, "empty"),
    ("a.bin", b"short", "webdataset", {}, r"not a tar archive \(starts with b'short'\)$"),
    ("a.csv", "a,b\n".encode("utf-32"), "csv", {}, r"is UTF-32: .* iconv -f utf-32 -t utf-8"),
    ("a.csv", b"a" * 200_000 + b"\n", "csv", {}, "its first line does not name columns: "),
    ("a.csv", bytes(400), "csv", {}, "its first line is no text"),
    ("a.csv", b"a,b\r1,2\r3,4\r", "csv", {}, "its lines end with a carriage return alone"),
    ("b.csv", b"1,2\r3,4\r", "csv", {"column_names": ["a", "b"]}, "the line has 2 rows"),
    # JSON
    ("a.jsonl", b'[{"a":1},\n{"a":2', "json", {}, "cut off: its array has no end"),
    ("a.jsonl", b"[1, 2]", "json", {}, "rows are objects"),
    ("a.jsonl", b" [ null ] ", "json", {}, "its array has 0 objects"),
    ("a.jsonl", b'[{"a":1}, 2]', "json", {}, "rows are objects"),
    ("a.jsonl", b'[{"a":1}] {"a":2}', "json", {}, "more after the array's end"),
    ("a.jsonl", b"7\n8\n", "json", {}, "rows are objects"),
    ("a.jsonl", GOOD.decode().encode("utf-16"), "json", {}, "UTF-16"),
    ("a.jsonl", b"\x89PNG\r\n", "json", {}, "rows are objects"),
    ("a.json", b'[{"a": "b"},\n{"a": "t\nwo"}]', "json", {}, "line 2: a text has a line end in it"),
    ("a.jsonl", b'{"id": 1}\n{"id": %d}\n' % LARGE, "json", {}, r"line 2: .* floats would round"),
    ("a.json", b'[{"id": %d},\n {"id": 1}]' % LARGE, "json", {}, r"line 1: .* floats would round"),
    ("a.jsonl", b'{"a": {"id": [0.5, %d]}}\n' % (2**53 + 1), "json", {}, "line 1: .* floats would"),
    ("a.csv", b"id\n1\n%d\n" % LARGE, "csv", {}, r"line 3: .* floats would round; say its type"),
    ("a.csv", b"id\n1\n%d\n" % LARGE, "csv", {"infer": "all"}, "floats would round"),
    *((f"a.{kind}", head + b"\n".join(row % n for n in (b"1", b"%d" % (2**53 + 1), b"0.5")), kind, options,
       rf"line {line}: .* {2**53 + 1}, .* floats would round; say its type by schema=")
      for kind, head, row, line in (("csv", b"h\n", b"%s", 3), ("json", b"", b'{"h": %s}', 2))
      for options in ({}, {"infer": "all"}, {"infer": "all", "block_rows": 1})),
    ("a.jsonl", b'{"h": %d}\n' % 2**63, "json", {}, f"line 1: .* {2**63}, .* floats would round"),
    # Python converts some 4,300 digits.
    ("a.jsonl", b'{"h": 0.5}\n{"h": -%s}\n' % (b"8" * 5000), "json", {}, r"line 2: .* -8+…8+, .*round"),
    ("a.csv", b"h\n0.5\n%s\n" % (b"0" * 9 + b"8" * 5000), "csv", {}, r"line 3: .* 8+…8+, .*round"),
    # Arrow
    ("a.arrow", FILE[: messages(FILE)[-2]] + FILE[messages(FILE)[-1] :], "arrow", {},
     f"its footer has a message at byte {messages(FILE)[-2]:,}, where none begins or fits"),
    *(("a.arrow", with_bytes(FILE, messages(FILE)[n] - 8, b"\0"), "arrow", {},
       "its footer has a message at byte .*none beg") for n in (1, 2)),
    ("a.arrows", with_bytes(STREAM, len(STREAM) - 20, b"\0"), "arrow", {}, "no message at byte"),
    *(("a.arrow", other_name(FILE, FILE.index(b"c1", place)), "arrow", {}, "have different schemas")
      for place in (0, footer_of(FILE).start)),
    ("a.arrows", STREAM + STREAM, "arrow", {}, r"a\.arrows: it goes on behind its end"),
    *(("a.arrow", arrow(table=pa.table({"when": times})), "arrow", {},
       "column 'when' holds a value that Python .*row 1") for times in TIMES),
    *(("a.arrow", arrow(table=pa.table({"tokens": pa.array([0, 1], kind)})), "arrow", {},
       r"'tokens' holds a time in nanoseconds.*cast it to .*row 1")
      for kind in (pa.timestamp("ns"), pa.duration("ns"), pa.time64("ns"))),
    *(("a.arrows", arrow(True, table=text([0, 1, 3], b"a\xff\xfe", nested)), "arrow", {},
       r"'t' holds text that is not UTF-8.*a\.arrows, row 1") for nested in (False, True)),
    *(("a.arrows", with_offsets(lie, nested), "arrow", {}, r"a\.arrows, row 0") for nested in (False, True)
      for lie in ([0, 1, 1 << 24], [0, 4, 3], [-9, 1, 3])),
    # tar
    ("a.tar", tar(("0.txt", b""), ("é" * 80 + ".txt", b""))[: 512 * 3] + bytes(1024), "webdataset", {},
     "damaged at byte 2,048"),
    ("a.tar", PAIRS + PAIRS, "webdataset", {}, "goes on behind its end"),
    ("a.tar", PAIRS[: 6 * 1024], "webdataset", {}, "mark of its end is missing"),
    ("a.tar", PAIRS[:1000] + PAIRS[1001:], "webdataset", {}, "no header of a member at byte 1,024"),
    ("a.tar", tar(("0.txt", b"a"), ("0.TXT", b"b")), "webdataset", {}, "two members with the ext"),
    ("a.tar", tar(("0.txt", b"a\xff")), "webdataset", {"text": "txt"}, "row 0.*'txt' here is not text"),
    # NumPy
    *(("a.npy", npy(header), "numpy", {}, r"a\.npy") for header in (
        NPY + b"(" + b"1, " * 71 + b"), }", NPY.replace(b"<i8", b"<f16") + b"(1,), }",
        NPY + b"(1000000000000, 0), }", NPY + b"(2,), 'more': 1}", NPY + b"(True,)}",
    )),
    ("a.npy", saved(np.array(3)), "numpy", {}, "first dimension"),
    ("a.npy", pickle.dumps([1]), "numpy", {}, "a pickle"),
    # Arrays that are far shorter and far longer than their headers say.
    ("a.npz", zipped(saved(np.arange(100)).replace(b"(100,)", b"(999,)")), "numpy", {}, "cut short"),
    ("a.npz", zipped(saved(np.arange(100))[:200]), "numpy", {}, "cut short"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_file_is_named_with_what_is_wrong_and_where(tmp_path: Path, number: int) -> None:
    name, content, reader, options, said = BAD[number]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(tp.UnreadableError, match=f"(?m){said}") as caught:
        list(getattr(tp.list_files(path), f"read_{reader}")(**options))
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


MARK = b"\xef\xbb\xbf"
BRACKETS = [
    {"a": "[{" * 500, "b": [[1, 2]] * 300, "c": '\\"[[' * 90, "d": [{"e": "]}"}] * 200},
    {"a": "]}" * 500, "b": [[3, 4]] * 300, "c": "\\\\[[" * 90, "d": [{"e": '"[{'}] * 200},
]
COUNTED = [{"c0": n, "c1": n} for n in range(200)]
CELLS = [{"text": f"\ufeffx{n}", "id": 1} for n in range(7)]
LINES = "".join(f"{row['text']},1\n" for row in CELLS).encode()
#: What looks odd, and its rows.
ODD: list[tuple[str, bytes, str, dict[str, Any], list[Any]]] = [
    ("a.arrow", one_batch_less_in_the_footer(), "arrow", {}, COUNTED),
    ("a.arrow", with_room(), "arrow", {}, [{"x": n} for n in range(10)]),
    ("a.arrows", STREAM + bytes(100), "arrow", {}, COUNTED),
    ("a.jsonl", "\n".join([nested(64)] * 3).encode(), "json", {}, [json.loads(nested(64))] * 3),
    ("a.jsonl", "\n".join(map(json.dumps, BRACKETS)).encode(), "json", {}, BRACKETS),
    ("a.json", json.dumps(BRACKETS, indent=1).encode(), "json", {}, BRACKETS),
    ("a.json", b'[{"a": "one \\" \\n"},\n{"a": "t\\nwo"}\r\n]', "json", {},
     [{"a": 'one " \n'}, {"a": "t\nwo"}]),
    ("a.jsonl", b'{"v": 1e300, "t": "90071992547409939007"}\n{"v": 9007199254740992, "t": "x"}\n', "json", {},
     [{"v": 1e300, "t": "90071992547409939007"}, {"v": 2.0**53, "t": "x"}]),
    ("a.csv", b"v,t\n1e300,90071992547409939007x\n9007199254740992,\n", "csv", {},
     [{"v": 1e300, "t": "90071992547409939007x"}, {"v": 2.0**53, "t": None}]),
    *((f"a.{kind}", head + b"%d\n" % LARGE if kind == "csv" else b'{"id": %d}\n' % LARGE, reader,
       {"schema": pa.schema([("id", type)])}, [{"id": value}])
      for kind, reader, head in (("csv", "csv", b"id\n"), ("jsonl", "json", b""))
      for type, value in ((pa.uint64(), LARGE), (pa.float64(), float(LARGE)))),
    # Only the mark of the order of bytes at a file's start is left out, wherever its blocks end.
    *(case for block_rows in (None, 1, 4) for case in (
        ("x.csv", MARK + b"text,id\n" + LINES, "csv", {"block_rows": block_rows}, CELLS),
        ("y.csv", MARK + LINES, "csv", {"column_names": ["text", "id"], "block_rows": block_rows}, CELLS),
        ("x.txt", MARK + LINES, "text", {"block_rows": block_rows},
         [{"text": f"{row['text']},1"} for row in CELLS]),
        ("x.jsonl", MARK + b'{"a": 1}\n{"a": 2}\n', "json", {"block_rows": block_rows}, [{"a": 1}, {"a": 2}]),
    )),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD)))
def test_a_file_that_only_looks_odd_is_read(tmp_path: Path, number: int) -> None:
    name, content, reader, options, rows = ODD[number]
    (tmp_path / name).write_bytes(content)
    assert list(getattr(tp.list_files(tmp_path / name), f"read_{reader}")(**options)) == rows


def test_a_mark_before_a_later_row_of_json_is_no_json_in_any_block(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(MARK + b'{"a": 1}\n' + MARK + b'{"a": 2}\n')
    for block_rows in (None, 1):
        with pytest.raises(tp.UnreadableError, match=r"x\.jsonl, line 2"):
            list(tp.read_json(tmp_path / "x.jsonl", block_rows=block_rows))


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    np.save(tmp_path / "x.npy", np.array([Trap(), Trap()], object), allow_pickle=True)
    with pytest.raises(tp.UnreadableError, match="runs code"):
        list(tp.read_numpy(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_hard_links_are_refused_and_no_row_is_lost(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("same")
    (tmp_path / "2.txt").hardlink_to(tmp_path / "1.txt")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for n in (1, 2):
            archive.add(tmp_path / f"{n}.txt", f"{n}.txt")
    with pytest.raises(tp.UnreadableError, match="--hard-dereference"):
        len(tp.read_webdataset(tmp_path / "x.tar"))


# JSON, in a process of its own, which some of it would end

#: Reads each file, and says its path and its rows or what is wrong.
READ_JSON = """
import json, sys, trainpipes as tp
for path, columns in json.loads(sys.argv[1]):
    try:
        print(path, len(list(tp.read_json(path, columns=columns))))
    except tp.UnreadableError as error:
        print(path, error)
"""


def test_json_that_nests_too_deep_or_is_null_is_an_error_and_ends_no_process(
    tmp_path: Path,
) -> None:
    rows, deep = ['{"b": 2}'] * 3, nested(20_000)
    files = {
        f"{depth}.jsonl": "\n".join([*rows, nested(depth), *rows])
        for depth in (65, 500, 5000, 20_000, 1_000_000)
    }
    files |= {
        "array.json": "[" + ",\n".join([*rows, deep]) + "]",
        "lines.jsonl.gz": "\n".join([*rows, deep, *rows]),
        "returns.jsonl": "\r\n".join([*rows, deep, *rows]),
        "open.jsonl": "\n".join([*rows, '{"a":' * 20_000, *rows]),
        "pretty.jsonl": "\n".join([*rows, deep.replace("[", "[\n")]),  # in lines of their own
    }
    nulls = {
        f"null-{n}.jsonl": f'{{"b": 1}}\n{text}\n{{"b": 2}}\n'
        for n, text in enumerate(["null", "  null", 'null{"b": 3}'])
    }
    for name, text in {**files, **nulls, "null.json": '[{"b": 1},\nnull{"b": 2}]'}.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    names = [*files, *nulls, "null.json"]
    asked = [(str(tmp_path / name), columns) for name in names for columns in (None, ["b"])]
    command = [*python(), "-c", READ_JSON, json.dumps(asked)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout[-500:] + found.stderr[-1000:]
    for (path, _), line in zip(asked, found.stdout.splitlines(), strict=True):
        if "null" in path:
            assert line.startswith(f"{path} {path}, line 2: a row is null, and no object: ")
        else:
            assert line.startswith(f"{path} {path}, line 4: ")
            assert "nests deeper than 64 brackets" in line or "pretty" in path
    for name in nulls:
        assert len(list(tp.read_json(tmp_path / name, on_error="skip"))) == 2


def test_brackets_of_a_late_row_of_a_remote_file_are_an_error() -> None:
    rows = [json.dumps({"b": n, "text": "words " * 200}) for n in range(4000)]  # two blocks
    path = "memory:///late/x.jsonl"
    fsspec.filesystem("memory").pipe(path, "\n".join([*rows, nested(700)]).encode())
    with pytest.raises(tp.UnreadableError, match=r"late/x\.jsonl, line 4,001: it nests deeper"):
        list(tp.read_json(path, columns=["b"]))


# Checksums


def test_a_changed_number_in_a_mapped_npz_is_an_error_as_it_is_of_numpy(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, x=np.arange(500), y=np.arange(500.0))
    content = good.read_bytes()
    for number, name in enumerate(("x", "y")):
        place = content.index(f"{name}.npy".encode()) + 1000
        path = tmp_path / f"{number}.npz"
        path.write_bytes(with_bytes(content, place, b"\xa5", 1))
        with pytest.raises(zipfile.BadZipFile, match="CRC"):
            np.load(path)[name]
        for pipe in (tp.read_numpy(path), tp.read_numpy(path).shuffle(scope="global", seed=0)):
            with pytest.raises(tp.UnreadableError, match=f"{number}.npz.*'{name}'.*checksum diff"):
                list(pipe)
    other = tp.read_numpy(tmp_path / "1.npz", columns=["x"])  # what is not asked for is not read
    assert [int(row["x"]) for row in other] == list(range(500))


def test_the_checksum_of_an_npz_is_compared_once(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(5000))
    rows = iter(tp.Loader(tp.read_numpy(path, block_rows=100), threads=0))
    next(rows)
    place, stat = path.read_bytes().index(np.arange(9).tobytes()) + 8 * 4999, path.stat()
    with open(path, "r+b") as file:  # which what is mapped shows
        file.seek(place)
        file.write(np.int64(77).tobytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [int(row["x"]) for row in rows][-1] == 77


def test_the_last_checksum_of_a_compressed_file_is_compared_though_an_index_is_kept(
    tmp_path: Path,
) -> None:
    path, index = tmp_path / "x.jsonl.gz", tmp_path / "index.arrow"
    content = gzip.compress(b'{"a": 1}\n' * 1000)
    path.write_bytes(content)
    os.utime(path, (10**9, 10**9))
    assert len(list(tp.read_json(path, index=str(index)))) == 1000
    assert index.exists()
    path.write_bytes(with_bytes(content, len(content) - 8, bytes([content[-8] ^ 1]), 1))
    os.utime(path, (10**9, 10**9))
    with pytest.raises(tp.UnreadableError, match=r"x\.jsonl\.gz"):
        list(tp.read_json(path, index=str(index)))


# What is said of names


def test_names_of_damaged_columns_do_not_fill_a_message(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a" * 20_000 + ",b\n1,2\n")
    said = r"no column 'c' in .*x\.csv; there are \['aa"
    with pytest.raises(tp.SchemaError, match=said) as caught:
        list(tp.read_csv(path, columns=["c"]))
    assert len(str(caught.value)) < 2000


def test_a_folder_is_no_file_of_labels(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"...")
    said = r"cannot be read as CSV: .*; give the path of a CSV"
    with pytest.raises(tp.UnreadableError, match=said):
        list(tp.list_files(tmp_path).read_images(str(tmp_path)))


def test_an_array_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(2), label=np.arange(2))
    said = r"no column 'labels' \(did you mean 'label'\?\) in .*'x', 'label'"
    with pytest.raises(tp.SchemaError, match=said):
        list(tp.list_files(tmp_path / "a.npz").read_numpy(["x", "labels"]))


def test_a_folder_says_which_files_are_looked_for_and_that_it_is_empty(tmp_path: Path) -> None:
    with pytest.raises(tp.MissingFilesError) as caught:
        list(tp.list_files(tmp_path).read_json())
    assert str(caught.value) == (
        "no file that ends in .jsonl, .json or .ndjson, compressed or not, in the folder "
        f"'{tmp_path}' or below it; it is empty"
    )


# Options

ROWS = tp.from_arrow(pa.table({"x": [1, 2, 3]}))


def number() -> Any:
    return 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: tp.list_files(d, suffix=5), r"list_files\(suffix\) must be an end .*, got 5"),
        (lambda d: tp.list_files(d).read_parquet(partitioning="x"),
         r'read_parquet\(partitioning\) must be "hive" or None, got \'x\''),
        (lambda d: tp.list_files(d).read_csv(quote=","),
         r"quote\) must be another character than the delimiter, got ','"),
        (lambda d: list(tp.from_iterable(number)), r"number \(.*\) returned 5"),
        (lambda d: ROWS.write_parquet(None), r"write_parquet\(folder\) must be a path, got None"),
        (lambda d: ROWS.write_json(""), r"write_json\(folder\) must be a path, got ''"),
        (lambda d: ROWS.write_arrow(d, overwrite="no"), r"overwrite\) must be True or False, got 'no'"),
        (lambda d: ROWS.write_memmap(d, overwrite=1), r"overwrite\) must be True or False, got 1"),
        (lambda d: ROWS.write_arrow(d / "x", num_files=4), r"at most the number of rows, 3, got 4"),
    ],
)  # fmt: skip
def test_an_option_of_another_kind_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(tp.ConfigError, match=message):
        make(tmp_path)


NO_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "read_csv": [
        {"delimiter": ",,"}, {"delimiter": "\0"}, {"delimiter": "é"}, {"quote": "\n"}, {"delimiter": '"'},
        {"null_values": "NA"}, {"block_rows": 0}, {"column_names": []}, {"schema": {"a": "int"}},
        {"columns": []}, {"infer": "none"}, {"index": 7},
    ],
    "read_webdataset": [
        {"block_rows": 0}, {"columns": []}, {"missing": "skip"}, {"text": [3]}, {"index": 3},
    ],
    "read_arrow": [{"block_rows": 0}, {"columns": []}, {"columns": ["y", "y"]}],
    "read_numpy": [{"block_rows": 0}, {"columns": []}, {"output_column": ""}],
    "read_images": [{"labels": ""}, {"labels": 3}, {"block_rows": 0}],
    "read_bytes": [{"block_rows": 0}],
    "read_files": [
        {"fn": 3}, {"fn": len, "count": 3}, {"fn": len, "schema": 3}, {"fn": len, "index": 3},
    ],
}  # fmt: skip


def test_options_are_checked_when_they_are_written_down() -> None:
    for reader, each in NO_OPTIONS.items():
        for options in each:
            with pytest.raises(tp.ConfigError, match=reader):
                getattr(tp, reader)("x", **options)
