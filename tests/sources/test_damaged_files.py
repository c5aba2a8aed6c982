"""Damaged files of every format: an error that names the file, or the rows that its library reads."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

import damaged_formats
import trainpipes as tp
from interpreters import python

#: Seconds that so many damaged files take at most, beside the process's own.
MOST_SECONDS = 900


def read_damaged(folder: Path, seed: int, count: int) -> Counter[str]:
    """How often came what, of damaged files of all formats.

    Raises:
        AssertionError: a file gave other rows than its reference, another error than ours, a crash or a hang.
    """
    said: Counter[str] = Counter()
    wrong: list[str] = []
    first = 0
    while first < count:
        script = Path(damaged_formats.__file__)
        command = [*python(), str(script), str(folder), str(seed), str(first), str(count)]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
        *lines, last = found.stdout.split("\n")
        for line in lines:
            case, _, came = line.partition(": ")
            said[came.split(" ")[0]] += 1
            wrong += [line] if came.startswith("WRONG") else []
            first = int(case.split(" ")[0]) + 1
        if found.returncode:
            wrong.append(
                f"{last} the process ended with {found.returncode}: {found.stderr[-2000:]}"
            )
            first += 1
    assert not wrong, f"{len(wrong)} of {count} with seed {seed}:\n" + "\n".join(wrong[:20])
    return said


def test_damaged_files_give_the_rows_of_their_reference_or_an_error_that_names_them(
    tmp_path: Path,
) -> None:
    said = read_damaged(tmp_path, seed=1, count=165)
    assert said["refused"] > 50
    assert said["same"] + said["reference"] > 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files_give_the_rows_of_their_reference_or_an_error(
    tmp_path: Path,
) -> None:
    said = read_damaged(tmp_path, seed=int.from_bytes(os.urandom(4), "little"), count=10_000)
    assert said["same"] + said["reference"] > 1000


# Arrow


def arrow(stream: bool = False, columns: int = 2) -> bytes:
    """200 rows in two record batches."""
    table = pa.table({f"c{n}": range(200) for n in range(columns)})
    sink = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue()


def rows_of_flipped(folder: Path, content: bytes, places: range, every: int) -> Counter[object]:
    """How many rows come of a file with one bit flipped."""
    said: Counter[object] = Counter()
    bits = [(place, bit) for place in places for bit in range(8)][::every]
    for place, bit in bits:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path = folder / f"{place}-{bit}.arrow"
        path.write_bytes(changed)
        try:
            said[sum(len(rows) for rows in tp.read_arrow(path).batch(100))] += 1
        except tp.UnreadableError as error:
            said["refused" if str(path) in str(error) else str(error)] += 1
        path.unlink()
    return said


def footer_of(content: bytes) -> range:
    length = int.from_bytes(content[-10:-6], "little")
    return range(len(content) - 10 - length, len(content) - 10)


def header_of(content: bytes) -> range:
    """Of the second record batch of a stream."""
    start = content.rindex(b"\xff\xff\xff\xff", 0, content.rindex(b"\xff\xff\xff\xff"))
    return range(start, start + 8 + int.from_bytes(content[start + 4 : start + 8], "little"))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_bit_of_an_arrow_footer_loses_rows(tmp_path: Path, every: int) -> None:
    content = arrow()
    said = rows_of_flipped(tmp_path, content, footer_of(content), every)
    assert set(said) == {200, "refused"}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_no_bit_of_the_header_of_a_record_batch_loses_rows(
    tmp_path: Path, stream: bool, every: int
) -> None:
    content = arrow(stream, columns=1)
    header = header_of(arrow(True, columns=1))
    if not stream:  # the same messages behind 8 more bytes
        header = range(header.start + 8, header.stop + 8)
    said = rows_of_flipped(tmp_path, content, header, every)
    assert set(said) == {200, "refused"}


def test_a_footer_that_leaves_out_a_record_batch_loses_no_rows(tmp_path: Path) -> None:
    content = arrow()
    footer = footer_of(content)
    start = content.index((2).to_bytes(4, "little"), footer.start)  # the list of record batches
    while content[start + 4 + 24 : start + 4 + 28] == b"\0" * 4:
        start = content.index((2).to_bytes(4, "little"), start + 1)
    path = tmp_path / "x.arrow"
    path.write_bytes(content[:start] + b"\1" + content[start + 1 :])
    assert pa.ipc.open_file(path).num_record_batches == 1
    assert len(list(tp.read_arrow(path))) == 200


def test_a_record_batch_cut_out_is_noticed_where_its_footer_has_it(tmp_path: Path) -> None:
    content = arrow()
    *_, start, end = (at for at in range(len(content)) if content.startswith(b"\xff" * 4, at))
    path = tmp_path / "x.arrow"
    path.write_bytes(content[:start] + content[end:])
    said = f"its footer has a message at byte {start:,}, where none begins or fits"
    with pytest.raises(tp.UnreadableError, match=said):
        list(tp.read_arrow(path))


def test_bytes_put_into_a_record_batch_are_noticed_where_its_footer_has_the_next(
    tmp_path: Path,
) -> None:
    content, (place, batch) = arrow(), (16, 2)
    for number in range(batch):
        place = content.index(b"\xff\xff\xff\xff", place + 1)
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(content[: place - 8] + b"\0" + content[place - 8 :])
        with pa.ipc.open_file(path) as file, pytest.raises(OSError, match="Invalid"):
            file.read_all()
        with pytest.raises(
            tp.UnreadableError, match=r"its footer has a message at byte .*none beg"
        ):
            list(tp.read_arrow(path))


def test_a_byte_put_into_the_last_record_batch_of_a_stream_is_noticed(tmp_path: Path) -> None:
    content = arrow(stream=True)
    path = tmp_path / "x.arrows"
    path.write_bytes(content[:-20] + b"\0" + content[-20:])
    with pytest.raises(OSError, match="negative"):
        pa.ipc.open_stream(path).read_all()
    with pytest.raises(tp.UnreadableError, match="no message at byte"):
        list(tp.read_arrow(path))


def test_names_of_damaged_columns_do_not_fill_a_message(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a" * 20_000 + ",b\n1,2\n")
    with pytest.raises(
        tp.SchemaError, match=r"no column 'c' in .*x\.csv; there are \['aa"
    ) as caught:
        list(tp.read_csv(path, columns=["c"]))
    assert len(str(caught.value)) < 2000


def test_names_in_a_footer_and_in_the_first_message_are_the_same(tmp_path: Path) -> None:
    content = arrow()
    path = tmp_path / "x.arrow"
    for place in (content.index(b"c1"), content.index(b"c1", footer_of(content).start)):
        path.unlink(missing_ok=True)
        path.write_bytes(content[:place] + b"c9" + content[place + 2 :])
        with pytest.raises(tp.UnreadableError, match="have different schemas"):
            list(tp.read_arrow(path))


def test_no_bit_of_a_schema_hides_all_columns(tmp_path: Path) -> None:
    content = arrow(True, columns=1)
    stop = 8 + int.from_bytes(content[4:8], "little")
    for place in range(8, stop):
        for bit in range(2):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path = tmp_path / f"{place}-{bit}.arrows"
            path.write_bytes(changed)
            with suppress(tp.UnreadableError, tp.SchemaError):
                assert all(list(tp.read_arrow(path)))
            path.unlink()


def test_a_stream_behind_the_end_of_another_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.arrows"
    path.write_bytes(arrow(True) + arrow(True))
    with pytest.raises(tp.UnreadableError, match=r"x\.arrows: it goes on behind its end"):
        list(tp.read_arrow(path))
    path.unlink()
    path.write_bytes(arrow(True) + bytes(100))
    assert len(list(tp.read_arrow(path))) == 200


def test_an_arrow_file_may_leave_room_between_its_messages(tmp_path: Path) -> None:
    """Some writers begin at multiples of 64 bytes, also with the first message."""
    table = pa.table({"x": range(10)})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    batch = 16 + int.from_bytes(
        content[12:16], "little"
    )  # behind the schema, where the footer says
    start = content.index(batch.to_bytes(8, "little"), footer_of(content).start)
    moved = (batch + 56).to_bytes(8, "little")
    path = tmp_path / "x.arrow"
    path.write_bytes(content[:8] + bytes(56) + content[8:start] + moved + content[start + 8 :])
    assert pa.ipc.open_file(path).read_all() == table
    assert [row["x"] for row in tp.read_arrow(path)] == list(range(10))


@pytest.mark.parametrize(
    "state",
    [
        '{"_data_files": []}',
        '{"_data_files": [{"filename": "../a.arrow"}]}',
        "[" * 100_000,
        '{"_data_files": ' + "[" * 2000 + "]" * 2000 + "}",
    ],
    ids=["no files", "a file elsewhere", "brackets without end", "brackets"],
)
def test_a_saved_dataset_whose_state_is_damaged_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.arrow").write_bytes(arrow(True))
    (tmp_path / "a.arrow").write_bytes(arrow(True))
    (tmp_path / "x/state.json").write_text(state)
    with pytest.raises(tp.UnreadableError, match=r"x/state\.json"):
        list(tp.read_arrow(tmp_path / "x"))


def test_a_long_name_in_a_saved_dataset_does_not_fill_a_message(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "[" * 20_000}]}))
    (tmp_path / "a.arrow").write_bytes(arrow(True))
    with pytest.raises(tp.MissingFilesError, match=r"state\.json names \[\[") as caught:
        list(tp.read_arrow(tmp_path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value", [pa.array([0, 1 << 62], pa.timestamp("s")), pa.array([0, 1 << 30], pa.date32())]
)
def test_a_time_that_python_has_not_is_an_error_with_file_row_and_column(
    tmp_path: Path, value: pa.Array
) -> None:
    table = pa.table({"when": value})
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(
        tp.UnreadableError, match=r"column 'when' holds a value that Python .*row 1"
    ):
        list(tp.read_arrow(path))


# Tar


def test_an_archive_that_ends_behind_an_extended_header_is_refused_as_by_tarfile(
    tmp_path: Path,
) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("0.txt", "é" * 80 + ".txt"):
            archive.addfile(tarfile.TarInfo(name))
    content = sink.getvalue()
    path = tmp_path / "x.tar"
    path.write_bytes(content[: 512 * 3] + bytes(1024))
    with tarfile.open(path) as archive, pytest.raises(tarfile.ReadError):
        archive.getmembers()
    with pytest.raises(tp.UnreadableError, match=r"x\.tar: damaged at byte 2,048"):
        list(tp.read_webdataset(path))


# NumPy


def test_a_changed_number_in_a_mapped_npz_is_an_error_as_it_is_of_numpy(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, x=np.arange(500), y=np.arange(500.0))
    content = good.read_bytes()
    for number, name in enumerate(("x", "y")):
        place = content.index(f"{name}.npy".encode()) + 1000
        path = tmp_path / f"{number}.npz"
        path.write_bytes(content[:place] + b"\xa5" + content[place + 1 :])
        with pytest.raises(zipfile.BadZipFile, match="CRC"):
            np.load(path)[name]
        with pytest.raises(tp.UnreadableError, match=f"{number}.npz.*'{name}'.*checksum differs"):
            list(tp.read_numpy(path))
        with pytest.raises(tp.UnreadableError, match="checksum differs"):
            list(tp.read_numpy(path).shuffle(scope="global", seed=0))
    other = tp.read_numpy(tmp_path / "1.npz", columns=["x"])  # what is not asked for is not read
    assert [int(row["x"]) for row in other] == list(range(500))


def test_the_checksum_of_an_npz_is_compared_once(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(5000))
    pipe = tp.read_numpy(path, block_rows=100)
    rows = iter(tp.Loader(pipe, threads=0))
    next(rows)
    place, stat = path.read_bytes().index(np.arange(9).tobytes()) + 8 * 4999, path.stat()
    with open(path, "r+b") as file:  # which what is mapped shows
        file.seek(place)
        file.write(np.int64(77).tobytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [int(row["x"]) for row in rows][-1] == 77


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"1, " * 71 + b"), }",
        b"{'descr': '<f16', 'fortran_order': False, 'shape': (1,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 0), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), 'more': 1}",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}",
    ],
    ids=["71 dimensions", "float128", "10^12 rows of nothing", "more", "a length that is none"],
)
def test_an_array_that_none_can_be_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.npy"
    length = len(header).to_bytes(2, "little")
    path.write_bytes(b"\x93NUMPY\1\0" + length + header + bytes(16))
    with pytest.raises(tp.UnreadableError, match=r"x\.npy"):
        list(tp.read_numpy(path))


# JSON

#: Reads JSON in a process of its own, which some of it would end: for each file its path and columns.
READ_JSON = """
import json, sys, trainpipes as tp
for path, columns in json.loads(sys.argv[1]):
    try:
        print(path, len(list(tp.read_json(path, columns=columns))))
    except tp.UnreadableError as error:
        print(path, error)
"""


def nested(depth: int) -> str:
    """A row of so many brackets within each other."""
    return '{"b": 1, "a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_json_that_nests_too_deep_is_an_error_with_file_line_and_limit_and_ends_no_process(
    tmp_path: Path,
) -> None:
    rows = ['{"b": 2}'] * 3
    files = {
        f"{depth}.jsonl": "\n".join([*rows, nested(depth), *rows])
        for depth in (65, 500, 5000, 20_000, 1_000_000)
    }
    deep = nested(20_000)
    files |= {
        "array.json": "[" + ",\n".join([*rows, deep]) + "]",
        "lines.jsonl.gz": "\n".join([*rows, deep, *rows]),
        "returns.jsonl": "\r\n".join([*rows, deep, *rows]),
        "open.jsonl": "\n".join([*rows, '{"a":' * 20_000, *rows]),
        "pretty.jsonl": "\n".join([*rows, deep.replace("[", "[\n")]),  # in lines of their own
    }
    for name, text in files.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    asked = [(str(tmp_path / name), columns) for name in files for columns in (None, ["b"])]
    command = [*python(), "-c", READ_JSON, json.dumps(asked)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout[-500:] + found.stderr[-1000:]
    said = found.stdout.splitlines()
    assert len(said) == len(asked)
    for (path, _), line in zip(asked, said, strict=True):
        assert line.startswith(f"{path} {path}, line 4: ")
        assert "nests deeper than 64 brackets" in line or "pretty" in path


def test_a_row_that_is_null_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    texts = ["null", "  null", 'null{"b": 3}']
    files = {f"{n}.jsonl": f'{{"b": 1}}\n{text}\n{{"b": 2}}\n' for n, text in enumerate(texts)}
    files["array.json"] = '[{"b": 1},\nnull{"b": 2}]'
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    asked = [(str(tmp_path / name), columns) for name in files for columns in (None, ["b"])]
    command = [*python(), "-c", READ_JSON, json.dumps(asked)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout[-500:] + found.stderr[-1000:]
    for (path, _), line in zip(asked, found.stdout.splitlines(), strict=True):
        assert line.startswith(f"{path} {path}, line 2: a row is null, and no object: ")
    for n in range(len(texts)):
        assert len(list(tp.read_json(tmp_path / f"{n}.jsonl", on_error="skip"))) == 2


def test_brackets_of_a_late_row_of_a_remote_file_are_an_error(tmp_path: Path) -> None:
    rows = [json.dumps({"b": n, "text": "words " * 200}) for n in range(4000)]  # two blocks
    path = "memory:///late/x.jsonl"
    fsspec.filesystem("memory").pipe(path, "\n".join([*rows, nested(700)]).encode())
    with pytest.raises(tp.UnreadableError, match=r"late/x\.jsonl, line 4,001: it nests deeper"):
        list(tp.read_json(path, columns=["b"]))


def test_as_many_brackets_as_arrow_can_pass_on_are_read(tmp_path: Path) -> None:
    text = "\n".join([nested(64)] * 3)
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert list(tp.read_json(path)) == [json.loads(nested(64))] * 3
    sink = io.BytesIO()
    table = pa.table({"a": [json.loads(nested(64))["a"]]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def test_brackets_in_texts_and_side_by_side_are_no_depth(tmp_path: Path) -> None:
    rows = [
        {"a": "[{" * 500, "b": [[1, 2]] * 300, "c": '\\"[[' * 90, "d": [{"e": "]}"}] * 200},
        {"a": "]}" * 500, "b": [[3, 4]] * 300, "c": "\\\\[[" * 90, "d": [{"e": '"[{'}] * 200},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    (tmp_path / "y.json").write_text(json.dumps(rows * 3, indent=1))
    assert list(tp.read_json(tmp_path / "x.jsonl")) == rows * 3
    assert list(tp.read_json(tmp_path / "y.json")) == rows * 3


def test_a_line_end_within_a_text_of_an_array_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"a": "one"},\n{"a": "t\nwo"},\n{"a": "three"}]')
    with pytest.raises(tp.UnreadableError, match=r"x\.json, line 2: a text has a line end in it"):
        list(tp.read_json(path))
    path.write_text('[{"a": "one \\" \\n"},\n{"a": "t\\nwo"}\r\n]')
    assert [row["a"] for row in tp.read_json(path)] == ['one " \n', "t\nwo"]


# Marks of the order of bytes, and ends of compressed files


@pytest.mark.parametrize("block_rows", [None, 1, 2, 4])
def test_only_the_mark_at_a_files_start_is_left_out(tmp_path: Path, block_rows: int | None) -> None:
    mark = "\ufeff"
    cells = [f"{mark}x{n}" for n in range(7)]
    (tmp_path / "x.csv").write_text(f"{mark}text,id\n" + "".join(f"{c},1\n" for c in cells))
    (tmp_path / "y.csv").write_text(mark + "".join(f"{c},1\n" for c in cells))
    (tmp_path / "x.txt").write_text(mark + "".join(f"{c}\n" for c in cells))
    named = {"column_names": ["text", "id"]}
    for name, options in (("x", {}), ("y", named)):
        rows = tp.read_csv(tmp_path / f"{name}.csv", block_rows=block_rows, **options)  # type: ignore[arg-type]
        assert [row["text"] for row in rows] == cells
    assert [row["text"] for row in tp.read_text(tmp_path / "x.txt", block_rows=block_rows)] == cells


@pytest.mark.parametrize("block_rows", [None, 1])
def test_a_mark_before_a_row_of_json_is_no_json_in_any_block(
    tmp_path: Path, block_rows: int | None
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"a": 1}\n{"a": 2}\n')
    assert [row["a"] for row in tp.read_json(path, block_rows=block_rows)] == [1, 2]
    path.write_text('\ufeff{"a": 1}\n\ufeff{"a": 2}\n')
    with pytest.raises(tp.UnreadableError, match=r"x\.jsonl, line 2"):
        list(tp.read_json(path, block_rows=block_rows))


def test_the_last_checksum_of_a_compressed_file_is_compared_though_an_index_is_kept(
    tmp_path: Path,
) -> None:
    path, index = tmp_path / "x.jsonl.gz", tmp_path / "index.arrow"
    content = gzip.compress(b'{"a": 1}\n' * 1000)
    path.write_bytes(content)
    os.utime(path, (10**9, 10**9))
    assert len(list(tp.read_json(path, index=str(index)))) == 1000
    assert index.exists()
    path.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    os.utime(path, (10**9, 10**9))
    with pytest.raises(tp.UnreadableError, match=r"x\.jsonl\.gz"):
        list(tp.read_json(path, index=str(index)))


def test_bytes_of_zero_are_no_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(bytes(400))
    with pytest.raises(tp.UnreadableError, match="its first line is no text"):
        list(tp.read_csv(tmp_path / "x.csv"))
