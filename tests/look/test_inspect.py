"""``inspect_files``: what data files hold, and what to fix before training."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import shlex
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import every_stage
import trainpipes as tp
from faulty_server import serving
from s3_store import s3_store
from tokenizer_fixtures import bracketed
from trainpipes.look import Inspection, inspect_files

DRAW = np.random.default_rng(0)
#: An image of one pixel.
FILE = io.BytesIO()
Image.new("RGB", (1, 1)).save(FILE, "PNG")
PNG = FILE.getvalue()


def parquet(path: Path, columns: Any, **options: Any) -> Path:
    """Write a table, or columns, as a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def kinds(found: Inspection) -> list[str]:
    return [one.kind for one in found.findings]


def said(found: Inspection, kind: str) -> str:
    """The text and the cure of the finding of a kind."""
    one = next(one for one in found.findings if one.kind == kind)
    return f"{one.text} -> {one.cure}"


def bytes_read(call: Callable[[], Any]) -> int:
    before = psutil.Process().io_counters().read_chars
    call()
    return psutil.Process().io_counters().read_chars - before


# What there is


def test_it_says_rows_row_groups_sizes_columns_and_nulls(tmp_path: Path) -> None:
    for n in range(3):
        rows = {"text": [f"a text {k}" if k % 7 else None for k in range(1000)], "n": range(1000)}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=300, compression="zstd")
    found = inspect_files(tmp_path)
    assert (found.reader, found.files, found.rows) == ("read_parquet", 3, 3000)
    assert (found.rows_counted, found.readable) == (True, True)
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert found.row_groups == {"count": 12, "least": 100, "median": 300, "most": 300}
    assert [(one.name, one.type, one.nulls) for one in found.columns] == [
        ("text", "string", 0.143), ("n", "int64", 0),
    ]  # fmt: skip
    sampled = inspect_files(tmp_path, sample=500)
    assert sampled.columns[0].nulls == pytest.approx(0.143, abs=0.05)
    whole = pa.concat_tables(map(pq.read_table, tmp_path.iterdir()))
    for one in (found, sampled):
        assert one.memory_bytes == pytest.approx(whole.nbytes, rel=0.2)


def test_it_prints_as_tables_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["one", None], "<b>": [1, 2]})
    (tmp_path / "b.txt").write_text("x")
    found = inspect_files(tmp_path)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (told["rows"], told["columns"][1]["name"]) == (2, "<b>")
    assert told["findings"][0]["kind"] == "other_formats"
    monkeypatch.setenv("COLUMNS", "30")
    narrow = str(found).splitlines()
    assert f"  -> {found.findings[0].cure}" in narrow, "commands are copied"
    assert max(len(line) for line in narrow if "->" not in line) <= 30
    monkeypatch.delenv("COLUMNS")
    text = str(found)
    assert "warning: read_parquet() does not read files of other formats: 1 beside the data" in text
    assert f"  -> trainpipes inspect {tmp_path}/b.txt" in text
    cells = [line.split() for line in text.splitlines()]
    assert ["text", "one", "null"] in cells
    assert ["text", "string", "50", "%"] in cells


def arrow() -> bytes:
    table, file = pa.table({"x": ["a", "b", "c"]}), io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def numpy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((3, 2)))
    return file.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


#: Contents of files of three rows, how they are read, and their columns.
FORMATS: dict[str, tuple[dict[str, bytes], str, list[str]]] = {
    "json lines": (
        {"a.jsonl": b'{"x": 1}\n{"x": 2}\n', "b.jsonl.gz": gzip.compress(b'{"x": 3}\n')}, "read_json", ["x"]
    ),
    "csv": ({"a.csv": b'\xef\xbb\xbfx,t\n1,a\n2,"b\nc"\n3,\n'}, "read_csv", ["x", "t"]),
    "text": ({"a.txt": b"one\ntwo\nthree\n"}, "read_text", ["text"]),
    "arrow": ({"a.arrow": arrow()}, "read_arrow", ["x"]),
    "saved": (
        {
            "a.arrow": arrow(), "cache-1.arrow": arrow(),
            "state.json": b'{"_data_files": [{"filename": "a.arrow"}]}',
        }, "read_arrow", ["x"],
    ),
    "numpy": ({"a.npy": numpy()}, "read_numpy", ["array"]),
    "tar": (
        {"a.tar": tar(dict.fromkeys(("0.txt", "0.cls", "1.txt", "2.txt"), b"hi"))},
        "read_webdataset", ["__key__", "txt", "cls"],
    ),
    "images": (
        {name: PNG + name.encode() for name in ("cat/1.png", "cat/2.png", "dog/1.png")},
        "read_images", ["path", "bytes", "class", "label"],
    ),
    "loose images": (
        dict.fromkeys(("0.png", "1.png", "2.png"), PNG), "read_images", ["path", "bytes"]
    ),
    "memmap": ({}, "from_memmap", ["x", "y"]),
    "memmaps": ({}, "from_memmap", ["x"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_looked_at(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "the data"
    contents, reader, columns = FORMATS[name]
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    if name == "memmap":
        tp.write_memmap(folder, {"x": np.arange(3), "y": np.ones((3, 2))})
    for part in "012" if name == "memmaps" else "":
        tp.write_memmap(folder / part, {"x": np.arange(1)})
    found = inspect_files(folder)
    assert (found.reader, found.rows, found.rows_counted) == (reader, 3, True)
    assert [column.name for column in found.columns] == columns
    assert list(found.shown[0]) == columns
    assert found.readable
    assert "other_formats" not in kinds(found)
    assert f"for {reader}()" in str(found)


def test_sounds_and_videos_are_told_by_their_headers(tmp_path: Path) -> None:
    from sound_fixtures import encoded, tone
    from video_fixtures import video

    videos = [
        video(10, codec="mpeg4", rate=10),
        video(30, codec="mpeg4", rate=10, size=(32, 32)),
        b"no video",
    ]
    sounds = [encoded(tone(0.5, 8000), 8000), None, encoded(tone(1.5, 8000), 8000, "FLAC")]
    hub = [{"bytes": content, "path": "a"} for content in videos]
    parquet(tmp_path / "a.parquet", {"video": hub, "sound": sounds})
    found = inspect_files(tmp_path)
    seen, heard = found.clips
    assert (seen.column, seen.kind, seen.rows) == ("video", "video", 2)
    assert seen.seconds == {"least": 1.0, "mean": 2.0, "most": 3.0}
    assert seen.forms == {
        "64 x 48 pixels, 10 frames a second": 1, "32 x 32 pixels, 10 frames a second": 1,
    }  # fmt: skip
    assert seen.hours == 4 / 3600
    assert (heard.column, heard.kind, heard.seconds["most"]) == ("sound", "sound", 1.5)
    assert heard.forms == {"8,000 Hz, 1 channel": 2}
    assert (found.bad_rows, found.readable) == (1, False)
    assert [*found.bad_places.values()] == [
        "column 'video': Invalid data found when processing input"
    ]
    assert ".decode_video(..., on_error=" in str(found)
    assert "hours in all" in str(found)
    assert "8,000 Hz, 1 channel" in str(found)


def test_videos_of_unknown_length_are_taken_to_be_as_long_as_others(tmp_path: Path) -> None:
    from video_fixtures import video

    known = video(20, codec="mpeg4", rate=10)
    stream = video(30, "matroska", "mpeg4", rate=10, container_options={"live": "1"})
    parquet(tmp_path / "a.parquet", {"video": [known, stream, None, known]})
    found = inspect_files(tmp_path)
    (clips,) = found.clips
    assert (clips.rows, clips.unknown, clips.hours) == (2, 1, pytest.approx(6 / 3600))
    assert "2 / 2 / 2, 1 of 3 unknown" in str(found)
    parquet(tmp_path / "a.parquet", {"video": [stream, None]})
    found = inspect_files(tmp_path)
    assert "? / ? / ?, 1 of 1 unknown" in str(found)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["clips"][0]["hours"] is None


@pytest.mark.parametrize("kind", ["delta", "lance", "iceberg"])
def test_of_a_table_the_newest_version_and_its_deleted_rows_are_told(
    kind: str, tmp_path: Path
) -> None:
    make = {"delta": every_stage.of_delta, "lance": every_stage.of_lance}
    folder = make.get(kind, every_stage.of_iceberg)(tmp_path)
    folder = str(Path(folder).parents[1]) if kind == "iceberg" else folder
    found = inspect_files(folder, rows=1)
    assert found.reader == f"read_{kind}"
    assert found.rows == 97 - 11 * (kind == "lance")
    assert found.table["deleted rows"].split()[0] == ("11" if kind == "lance" else "none")
    assert ", the newest" in str(found)
    assert found.to_dict()["table"] == found.table
    assert {column.name for column in found.columns} >= {"x", "text", "tokens"}


def test_every_type_of_column_is_told(tmp_path: Path) -> None:
    day, now = datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4)
    columns = {
        "struct": pa.array([{"a": 1, "b": {"c": "x"}}, None]),
        "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
        "decimal": pa.array([Decimal("1.50"), None]),
        "date": pa.array([day, None]),
        "timestamp": pa.array([now, None], pa.timestamp("ns", "UTC")),
        "duration": pa.array([datetime.timedelta(days=1), None]),
        "far": pa.array([2**60, None], pa.int64()).cast(pa.timestamp("ms")),
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
    assert first["struct"] == "{'a': 1, 'b': {'c': 'x'}}"
    assert (first["decimal"], first["date"], first["binary"]) == ("1.50", "2020-01-02", "<200 B>")
    assert (first["view"], first["large"]) == ("a view", str(2**64 - 1))
    assert set(second.values()) == {"null"}


def test_no_rows_no_columns_and_one_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.schema([("text", pa.string())]).empty_table())
    found = inspect_files(path)
    assert (found.rows, found.readable, found.shown) == (0, False, [])
    assert [column.name for column in found.columns] == ["text"]
    str(found)
    found = inspect_files(parquet(path, pa.table({"x": [1, 2]}).select([])))
    assert (found.columns, found.shown) == ([], [])
    str(found)
    found = inspect_files(parquet(path, {"text": ["a"]}), tokenizer="bytes", sample=1)
    assert (found.rows, found.lengths[0].most, found.findings) == (1, 1, [])


def test_thousands_of_columns_are_printed_in_part(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {f"c{n}": [n, n + 1] for n in range(3000)})
    found = inspect_files(tmp_path)
    assert len(found.columns) == 3000
    assert "2,960 more columns" in str(found)
    assert len(str(found)) < 20_000


# What is read


@pytest.mark.parametrize("files", [6, 200])
def test_of_much_text_some_whole_files_are_read(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspect_reading.SCANNED_BYTES", 1 << 19)
    line = json.dumps({"text": "some words " * 20}) + "\n"
    for n in range(files):
        (tmp_path / f"{n}.jsonl").write_text(line * (40_000 // files * (1 + (n == 0))))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    found: list[Inspection] = []
    assert bytes_read(lambda: found.append(inspect_files(tmp_path))) < size / 2
    assert not found[0].rows_counted
    assert found[0].rows == pytest.approx(40_000, rel=0.2)
    assert "about 4" in str(found[0])


def test_less_of_compressed_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes.look.inspect_reading.SCANNED_BYTES", 8000)
    line = b'{"text": "some words"}\n'
    for n in range(4):
        (tmp_path / f"{n}.jsonl").write_bytes(line * 50)
    assert inspect_files(tmp_path).rows_counted
    for n in range(4):
        (tmp_path / f"{n}.jsonl").unlink()
        content = b"".join(b'{"text": "%d"}\n' % one for one in DRAW.integers(0, 1 << 60, 100))
        (tmp_path / f"{n}.jsonl.gz").write_bytes(gzip.compress(content))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8000
    assert not inspect_files(tmp_path).rows_counted


def test_a_sample_is_spread_over_all_files_and_row_groups(tmp_path: Path) -> None:
    for n in range(4):
        rows = {"n": range(25_000 * n, 25_000 * (n + 1))}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=5000)
    found = inspect_files(tmp_path, sample=1000, rows=8)
    assert 900 <= found.sampled_rows <= 1000
    values = [int(row["n"]) for row in found.shown]
    assert values == sorted(values)
    assert {value // 12_500 for value in values} == set(range(8))
    assert "a sample of" in str(found)


@pytest.mark.parametrize(("rows", "sample"), [(1000, 1000), (1001, 1000), (997, 40), (50_000, 7)])
def test_no_row_is_sampled_twice(
    rows: int, sample: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspect_reading.DEPTH_BYTES", 1000)
    for n in range(2):
        own = {"n": np.arange(n * rows, (n + 1) * rows)}
        parquet(tmp_path / f"{n}.parquet", own, row_group_size=600 if n else 10**6)
    found = inspect_files(tmp_path, sample=sample, rows=sample)
    values = [int(row["n"]) for row in found.shown]
    assert 0 < len(values) <= sample
    assert len(set(values)) == len(values)


def test_of_a_huge_row_group_and_of_wide_rows_only_a_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"text": ["x" * 4000] * 25_000, "n": DRAW.integers(0, 1 << 40, 25_000)}
    path = parquet(tmp_path / "a.parquet", rows, compression="none", use_dictionary=False)
    size = path.stat().st_size
    assert size > 95_000_000
    assert bytes_read(lambda: inspect_files(path)) < size * 2 / 3
    monkeypatch.setattr("trainpipes.look.inspect_reading.LOCAL_BYTES", 400_000)
    assert 50 <= inspect_files(path).sampled_rows <= 100
    rows = {"text": ["x" * 4000, "y" * 4000] * 10_000}  # a footer says less than they are
    assert inspect_files(parquet(path, rows, use_dictionary=True)).sampled_rows < 1000


def test_of_images_elsewhere_few_are_fetched() -> None:
    files = fsspec.filesystem("memory")
    for n in range(100):
        files.pipe(f"/pictures/{'ab'[n % 2]}/{n}.png", PNG)
    found = inspect_files("memory://pictures")
    files.rm("/pictures", recursive=True)
    assert (found.rows, found.sampled_rows, found.readable) == (100, 64, True)
    assert found.lengths == [], "names have none"


def test_files_on_a_server_cost_a_request_for_each_footer_and_few_for_the_sample(
    tmp_path: Path,
) -> None:
    for n in range(40):
        parquet(tmp_path / f"{n}.parquet", {"n": range(10_000)}, row_group_size=1000)
    with serving(tmp_path) as server:
        found = inspect_files([f"{server.url}/{n}.parquet" for n in range(40)])
        asked = [one for one in server.asked if one.startswith("GET")]
    assert (found.rows, found.readable) == (400_000, True)
    assert len(asked) <= 40 + 16 * 8


# What cannot be read


def test_no_files_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(tp.MissingFilesError, match="it is empty"):
        inspect_files(tmp_path)
    with pytest.raises(tp.MissingFilesError, match="got none"):
        inspect_files([])
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(tp.ConfigError, match=r"must end in \.parquet.*a\.bin"):
        inspect_files(tmp_path)


def test_options_are_checked(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["a"], "n": [1]})
    with pytest.raises(tp.SchemaError, match="did you mean 'text'"):
        inspect_files(tmp_path, column="txt")
    with pytest.raises(tp.SchemaError, match="'n' of int64"):
        inspect_files(tmp_path, column="n")
    parquet(tmp_path / "b.parquet", {"text": [1], "n": [1]})
    with pytest.raises(tp.SchemaError, match="'text' of int64"):
        inspect_files(tmp_path, column="text")
    for option in ("rows", "sample"):
        with pytest.raises(tp.ConfigError, match=option):
            inspect_files(tmp_path, **{option: -1})  # type: ignore[arg-type]


def test_damaged_files_are_named_and_the_others_told(tmp_path: Path) -> None:
    rows = {"text": [f"row {n}" for n in range(10_000)]}
    whole = parquet(tmp_path / "a.parquet", rows, compression="zstd").read_bytes()
    bad = {
        "cut short": whole[:-20],
        "empty": b"",
        "not a Parquet file": b"this is something else",
        "encrypted": b"PARE" + whole[4:-4] + b"PARE",
        "cannot be read": whole[:1000] + bytes(8000) + whole[9000:],
    }
    for number, content in enumerate(bad.values()):
        (tmp_path / f"b{number}.parquet").write_bytes(content)
    found = inspect_files(tmp_path)
    assert (found.files, found.readable) == (1, False)
    told = {Path(path).stem: reason for path, reason in found.unreadable.items()}
    assert {*told} == {f"b{number}" for number in range(len(bad))}
    assert all(said in told[f"b{number}"] for number, said in enumerate(bad))
    assert sum(line.startswith("cannot be read: ") for line in str(found).splitlines()) == 5
    assert found.shown[0] == {"text": "row 0"}


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("b.jsonl", b'{"x": "\xff"}\n', "not UTF-8"),
    ("b.jsonl.gz", b"\x1f\x8bnothing", "gzip"),
    ("b.npy", b"junk" * 99, "neither .npy nor .npz"),
    ("b.arrow", b"junk" * 99, "not an Arrow file"),
    ("b.tar", b"junk" * 999, "not a tar archive"),
    ("b.png", b"", "empty: 0 bytes"),
])  # fmt: skip
def test_damaged_files_of_every_format_are_named(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    found = inspect_files(tmp_path / name)
    assert list(found.unreadable) == [str(tmp_path / name)]
    assert reason in found.unreadable[str(tmp_path / name)]
    assert not found.unreadable[str(tmp_path / name)].startswith(str(tmp_path))
    assert not found.readable
    str(found)


@pytest.mark.parametrize("end", ["jsonl", "csv", "jsonl.gz"])
def test_all_bad_rows_of_the_sample_are_counted_and_the_first_ten_placed(
    end: str, tmp_path: Path
) -> None:
    bad = range(3, 100, 4)
    for file in range(2):
        good, broken = ("1,2\n", "1\n") if end == "csv" else ('{"x": 1}\n', '{"x": 1\n')
        lines = [broken if n in bad else good for n in range(100)]
        text = "".join(["x,y\n"] * (end == "csv") + lines)
        with fsspec.open(str(tmp_path / f"{file}.{end}"), "wt", compression="infer") as opened:
            opened.write(text)
    found = inspect_files(tmp_path)
    assert (found.files, found.rows, found.sampled_rows) == (2, 200, 200)
    assert (found.bad_rows, found.readable, found.unreadable) == (2 * len(bad), False, {})
    places = [f"{tmp_path / f'0.{end}'}, row {n}" for n in bad[:10]]
    assert list(found.bad_places) == places
    assert "50 of 200 rows that were looked at cannot be used" in said(found, "bad_rows")
    assert f"read_{'csv' if end == 'csv' else 'json'}(..., on_error=" in said(found, "bad_rows")
    assert all(f"cannot be read: {place}: " in str(found) for place in places)
    assert all(row["x"] == "1" for row in found.shown)
    assert "trainpipes:bad" not in json.dumps(found.to_dict())
    small = inspect_files(tmp_path, sample=40)
    assert 0 < small.bad_rows < 20


@pytest.mark.parametrize("kind", ["files", "struct", "binary", "tar"])
def test_images_of_the_sample_that_cannot_be_decoded_are_counted(kind: str, tmp_path: Path) -> None:
    contents = [PNG[:45] if n % 10 == 3 else PNG for n in range(30)]
    if kind == "files":
        for n, content in enumerate(contents):
            (tmp_path / f"{n:02}.png").write_bytes(content)
    elif kind == "tar":
        members = {f"{n}.png": content for n, content in enumerate(contents)}
        (tmp_path / "a.tar").write_bytes(tar(members))
    else:
        cells = contents if kind == "binary" else [{"bytes": one, "path": ""} for one in contents]
        parquet(tmp_path / "a.parquet", {"image": cells, "other": [b"PNG"] * 30})
    found = inspect_files(tmp_path)
    assert (found.bad_rows, found.readable) == (3, False)
    assert ["truncated" in why for why in found.bad_places.values()] == [True] * 3
    if kind == "files":
        assert [*found.bad_places] == [str(tmp_path / f"{n}.png") for n in ("03", "13", "23")]
    else:
        assert [place.rpartition(" ")[2] for place in found.bad_places] == ["3", "13", "23"]
    assert "3 of 30 rows" in said(found, "bad_rows")
    assert "decode_image(..., on_error=" in said(found, "bad_rows")


ODD_NAMES = ("a\nb", "[red]x[/red]", "\x1b[31mz", "", "a.b", "\u202eabc", "<script>", "wide 日本")


def test_names_and_texts_cannot_harm_a_terminal_or_a_page(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\nb.parquet"
    parquet(path, {name: [f"{name}!"] * 20 + [None] for name in ODD_NAMES})
    (tmp_path / "bad\x1b.parquet").write_bytes(b"")
    found = inspect_files(tmp_path)
    assert all(c == "\n" or c.isprintable() for c in str(found))
    assert "[red]x" in str(found)
    assert "\\x1b[31mz" in str(found)
    assert [column.name for column in found.columns] == list(ODD_NAMES)


# How long rows are


@pytest.mark.parametrize("tokenizer", ["bytes", bracketed()], ids=["bytes", "with special tokens"])
def test_tokens_are_those_that_tokenize_makes(tokenizer: Any, tmp_path: Path) -> None:
    texts = ["é" * int(n) for n in DRAW.integers(0, 3000, 500)]
    path = parquet(tmp_path / "a.parquet", {"text": texts})
    (found,) = inspect_files(path, tokenizer=tokenizer).lengths
    made = [len(row["input_ids"]) for row in tp.read_parquet(path).tokenize(tokenizer)]
    assert (found.unit, found.rows, found.most) == ("tokens", 500, max(made))
    assert found.mean == pytest.approx(np.mean(made))
    assert found.percentiles["50"] == np.percentile(made, 50, method="higher")


MESSAGES = [[{"role": "u", "text": "abc"}, {"role": "a", "text": None}], None, []] * 5
MAPS = [[("key", ["a", "bc"])], None, [], [("k", None), ("kk", ["d"])]] * 3


@pytest.mark.parametrize(("column", "unit", "lengths"), [
    (pa.array(["é", "abc", None]), "bytes", [2, 3, 0]),
    (pa.array([b"\xff", None, b""]), "bytes", [1, 0, 0]),
    (pa.array([[1, 2], None, [], [3]]), "items", [2, 0, 0, 1]),
    (pa.array([[0.5, 2.5], None], pa.list_(pa.float32(), 2)), "items", [2, 0]),
    (pa.array(["a", None, "bcd"]).dictionary_encode(), "bytes", [1, 0, 3]),
    (pa.array(["a", None, "bcd"], pa.string_view()), "bytes", [1, 0, 3]),
    (pa.array([["a"], ["b", "cd"]], pa.list_(pa.string_view())), "bytes", [1, 3]),
    (pa.array(["{}", None, "[1]"], pa.json_()), "bytes", [2, 0, 3]),
    (pa.array(MESSAGES), "bytes", [5, 0, 0] * 5),
    (pa.array(MESSAGES).slice(1, 7), "bytes", [0, 0, 5, 0, 0, 5, 0]),
    (pa.array(MAPS, pa.map_(pa.string(), pa.list_(pa.string()))).slice(1, 7), "bytes",
        [0, 0, 4, 6, 0, 0, 4]),
])  # fmt: skip
def test_lengths_of_every_kind_of_column(
    column: pa.Array, unit: str, lengths: list[int], tmp_path: Path
) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"x": column}))
    (found,) = inspect_files(path).lengths
    assert (found.columns, found.unit, found.rows) == (["x"], unit, len(lengths))
    assert (found.most, found.mean) == (max(lengths), pytest.approx(np.mean(lengths)))


RUN_ENDS = pa.RunEndEncodedArray.from_arrays


@pytest.mark.parametrize(("column", "nulls", "lengths"), [
    (pa.array([["ab"], None, ["c"]], pa.list_view(pa.string())), 1, [2, 0, 1]),
    (pa.array([[1, 2], None, [3]], pa.list_view(pa.int8())), 1, [2, 0, 1]),
    (RUN_ENDS([2, 3], pa.array(["a", None])), 1, [1, 1, 0]),
    (RUN_ENDS([1, 3], pa.array(["ab", "c"], pa.string_view())), 0, [2, 1, 1]),
    (pa.ListArray.from_arrays([0, 1, 3], RUN_ENDS([2, 3], pa.array(["a", None]))), 0, [1, 1]),
    (RUN_ENDS([2, 3], pa.array([5, None])), 1, None),
])  # fmt: skip
def test_of_list_views_and_run_ends_nulls_and_lengths_are_told(
    column: pa.Array, nulls: int, lengths: list[int] | None, tmp_path: Path
) -> None:
    table, path = pa.table({"x": column}), tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    found = inspect_files(path, column="x" if lengths else None)
    assert found.columns[0].nulls == pytest.approx(nulls / len(column))
    assert [(one.most, one.mean) for one in found.lengths] == (
        [(max(lengths), pytest.approx(np.mean(lengths)))] if lengths else []
    )


def test_lengths_of_chats_say_that_they_are_without_the_template(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "hi" * n}] for n in range(1, 4)]
    path = parquet(tmp_path / "a.parquet", {"messages": chats, "text": ["a", "bc", "def"]})
    said = str(inspect_files(path, tokenizer="bytes"))
    assert "messages (texts, without the template)  tokens" in said
    assert "text (" not in said


def test_several_columns_count_as_one_row(tmp_path: Path) -> None:
    rows = {"prompt": ["ab", None, "c"], "response": ["d", "ef", ""]}
    path = parquet(tmp_path / "a.parquet", rows)
    parquet(tmp_path / "b.parquet", {"other": ["x" * 99]})
    parquet(tmp_path / "c.parquet", {"prompt": pa.nulls(1), "response": ["abc"]})
    found = inspect_files(tmp_path, tokenizer="bytes", column=["prompt", "response"])
    (one,) = found.lengths
    assert (one.columns, one.rows, one.most, one.mean) == (["prompt", "response"], 4, 3, 2.25)
    assert "prompt + response" in str(found)
    assert [one.columns for one in inspect_files(path).lengths] == [["prompt"], ["response"]]


def test_of_columns_of_one_size_the_first_ones_are_measured(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {f"x{n}": ["a", "bc"] for n in range(12)})
    measured = [found.columns for found in inspect_files(path).lengths]
    assert measured == [["x0"], ["x1"], ["x2"], ["x3"]]


def test_a_sample_of_bad_rows_alone_has_no_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("oops\n" + '{"text": "a"}\n' * 9)
    found = inspect_files(path, column="text", sample=1)
    assert (found.lengths, found.bad_rows) == ([], 1)


def test_columns_of_one_length_are_left_out(tmp_path: Path) -> None:
    rows = {"id": ["0001", "0002"], "vector": [[0.0] * 8] * 2, "text": ["a", "bc"]}
    path = parquet(tmp_path / "a.parquet", rows)
    assert [one.columns for one in inspect_files(path).lengths] == [["text"]]


def test_text_that_is_not_utf8_is_counted_and_not_shown(tmp_path: Path) -> None:
    good = pa.array([b"good", b"\xff\xfe" * 300, b"fine"])
    bad = pa.Array.from_buffers(pa.string(), 3, good.buffers())
    parquet(tmp_path / "a.parquet", {"text": bad})
    found = inspect_files(tmp_path, tokenizer="bytes", rows=3)
    assert [row["text"] for row in found.shown] == ["good", "<string>", "fine"]
    assert found.lengths[0].rows == 3


# What to fix


def test_large_row_groups_are_told_with_the_command_that_cuts_them(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    path = parquet(folder / "a.parquet", {"n": np.arange(150_000)}, row_group_size=50_000)
    assert kinds(inspect_files(folder)) == []
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema) as writer:  # as many groups, one of them large
        for count in (110_000, 20_000, 20_000):
            writer.write_table(table.slice(0, count))
    told = said(inspect_files(folder), "large_row_groups")
    assert "of up to 110,000 rows" in told
    assert f"trainpipes repack {shlex.quote(str(folder))} OUT --row-group-size 10000" in told


def test_fewer_row_groups_than_shards_that_need_their_own_are_told(tmp_path: Path) -> None:
    rows = {"n": np.arange(1_000_000)}
    path = parquet(tmp_path / "a.parquet", rows, row_group_size=90_000)
    assert "12 row groups for 24 shards" in said(inspect_files(path), "large_row_groups")
    parquet(path, rows, row_group_size=20_000)
    assert kinds(inspect_files(path)) == []


def test_small_row_groups_are_told_where_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "a.parquet", {"n": np.arange(20_000)}, row_group_size=100)
    assert "200 row groups have 100 rows" in said(inspect_files(path), "small_row_groups")
    parquet(path, {"n": range(1000)}, row_group_size=100)
    assert kinds(inspect_files(path)) == []
    monkeypatch.setattr("trainpipes.look.inspect.MANY", 10)
    for width in (4, 40_000):  # few wide rows are not small
        rows = {"text": [str(n).zfill(width) for n in range(500)]}
        parquet(path, rows, row_group_size=50, use_dictionary=False)
        assert ("small_row_groups" in kinds(inspect_files(path))) == (width == 4)


def test_files_with_other_columns_or_types_are_told(tmp_path: Path) -> None:
    for n in range(3):
        parquet(tmp_path / f"{n}.parquet", {"text": [f"{n}"], "n": [n]})
    parquet(tmp_path / "3.parquet", {"text": ["3"], "n": pa.array([1], pa.int16())})
    found = inspect_files(tmp_path)
    assert kinds(found) == [], "such types are read as one"
    assert found.columns[1].type == "int64"
    parquet(tmp_path / "4.parquet", {"text": ["4"], "n": ["four"]})
    found = inspect_files(tmp_path)
    assert found.columns[1].type == "int64 or int16 or string"
    told = said(found, "mixed_schemas")
    assert "4.parquet" in told
    assert "string" in told
    parquet(tmp_path / "4.parquet", {"text": ["4"]})
    told = said(inspect_files(tmp_path), "mixed_schemas")
    assert "'n'" in told
    assert "columns=[...]" in told


def test_files_of_csv_are_read_as_one_with_other_types_or_without_rows(tmp_path: Path) -> None:
    for name, text in {"0": "a\n1\n", "1": "a\nx\n", "2": "", "3": "a\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    found = inspect_files(tmp_path)
    assert kinds(found) == []
    assert [column.name for column in found.columns] == ["a"]
    assert [row["a"] for row in tp.read_csv(tmp_path)] == ["1", "x"]


def test_files_of_other_formats_are_told(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["x"]})
    (tmp_path / "b c.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "README").write_text("about")
    found = inspect_files(tmp_path)
    assert (found.reader, found.files) == ("read_parquet", 1)
    assert f"trainpipes inspect '{tmp_path}/b c.jsonl'" in said(found, "other_formats")
    assert kinds(found) == ["other_formats"]


def test_files_of_a_store_are_read_by_the_options_given():
    with s3_store("inspected") as options:
        rows = tp.from_arrow(pa.table({"x": range(100)}))
        for form in ("parquet", "json"):
            getattr(rows, f"write_{form}")(
                f"s3://inspected/{form}", rows_per_file=50, storage_options=options
            )
            found = inspect_files(f"s3://inspected/{form}", storage_options=options)
            assert (found.rows, found.unreadable) == (100, {})
