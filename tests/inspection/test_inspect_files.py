"""What files hold, told without reading all of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import serving
from inspection.tables import kinds, parquet, said
from trainpipes.look.inspection import inspect_files


def test_footers_say_rows_row_groups_sizes_and_columns(tmp_path: Path) -> None:
    for n in range(3):
        rows = {"text": [f"a text {k}" if k % 4 else None for k in range(1000)], "n": range(1000)}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=300, compression="zstd")
    found = inspect_files(tmp_path)
    assert (found.reader, found.files, found.rows, found.rows_counted) == (
        "read_parquet",
        3,
        3000,
        True,
    )
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    groups = found.groups
    assert groups is not None
    assert (groups.count, groups.rows.least, groups.rows.median, groups.rows.most) == (
        12,
        100,
        300,
        300,
    )
    text, n = found.columns
    assert (text.name, text.type, text.nulls, text.null_rows) == ("text", "string", 0.25, 750)
    assert text.nulls_counted
    assert (n.nulls, n.least, n.most) == (0.0, "0", "999")
    assert list(found.codecs) == ["zstd"]
    exact = pa.concat_tables(map(pq.read_table, tmp_path.iterdir())).nbytes
    assert found.memory_bytes == pytest.approx(exact, rel=0.2)


def test_it_prints_as_text_as_tables_and_as_json(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["one", None], "<b>": [1, 2]})
    found = inspect_files(tmp_path)
    assert "warning: nulls in 'text' (50 %, 1 row)" in str(found)
    html = found._repr_html_()
    assert "<b>" not in html.replace("<br>", "")
    assert "&lt;b&gt;" in html
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (told["rows"], told["columns"][1]["name"]) == (2, "<b>")
    assert told["findings"][0]["kind"] == "nulls"


def json_lines(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 3}\n'))


def csv(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b'\xef\xbb\xbfx,t\n1,a\n2,"b\nc"\n3,\n')


def text(folder: Path) -> None:
    (folder / "a.txt").write_text("one\ntwo\nthree\n")


def arrow(folder: Path) -> None:
    table = pa.table({"x": ["a", "b", "c"]})
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)


def saved(folder: Path) -> None:
    arrow(folder)
    (folder / "cache-1.arrow").write_bytes((folder / "a.arrow").read_bytes())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))


def numpy(folder: Path) -> None:
    np.save(folder / "a.npy", np.zeros((3, 2)))


def tar(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for n in range(3):
            member = tarfile.TarInfo(f"{n}.txt")
            member.size = 2
            archive.addfile(member, io.BytesIO(b"hi"))


def images(folder: Path) -> None:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())


def memmap(folder: Path) -> None:
    folder.rmdir()
    tp.write_memmap(folder, {"x": np.arange(3), "y": np.ones((3, 2))})


FORMATS = {
    json_lines: ("read_json", ["x"]),
    csv: ("read_csv", ["x", "t"]),
    text: ("read_text", ["text"]),
    arrow: ("read_arrow", ["x"]),
    saved: ("read_arrow", ["x"]),
    numpy: ("read_numpy", ["array"]),
    tar: ("read_webdataset", ["__key__", "txt"]),
    images: ("read_images", ["path", "bytes", "class", "label"]),
    memmap: ("from_memmap", ["x", "y"]),
}


@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__)
def test_every_format_is_looked_at(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "the data"
    folder.mkdir()
    make(folder)
    found = inspect_files(folder)
    reader, columns = FORMATS[make]
    assert (found.reader, found.rows, found.rows_counted) == (reader, 3, True)
    assert [column.name for column in found.columns] == columns
    assert list(found.shown[0]) == columns
    assert found.readable


def test_of_large_text_only_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.other_files.COUNTED_BYTES", 1 << 20)
    line = json.dumps({"text": "some words " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 20_000)
    before = psutil.Process().io_counters().read_chars
    found = inspect_files(tmp_path)
    assert (
        psutil.Process().io_counters().read_chars - before < (tmp_path / "a.jsonl").stat().st_size
    )
    assert not found.rows_counted
    assert found.rows == pytest.approx(20_000, rel=0.01)
    assert "about 20,000" in str(found)


def test_rows_of_large_text_may_be_longer_than_what_is_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.other_files.COUNTED_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "words " * 500_000}) + "\n") * 12)
    found = inspect_files(tmp_path)
    assert (found.readable, found.rows) == (True, 12)


@pytest.mark.parametrize("members", [1, 40])
def test_compressed_text_that_cannot_be_entered_is_told(
    members: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.other_files.COUNTED_BYTES", 1 << 20)
    draw = np.random.default_rng(0)
    line = json.dumps({"text": draw.bytes(500).hex()}).encode() + b"\n"
    lines = [line * 1000] * 40
    parts = [b"".join(lines)] if members == 1 else lines
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(part, 1) for part in parts))
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(draw.bytes(400_000).hex().encode()))
    found = inspect_files(tmp_path / "a.jsonl.gz")
    assert ("one_member" in kinds(found)) == (members == 1)


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


def test_of_a_huge_row_group_only_a_part_is_read(tmp_path: Path) -> None:
    text = ["x" * 4000] * 50_000
    rows = {"text": text, "n": np.random.default_rng(0).integers(0, 1 << 40, 50_000)}
    path = parquet(tmp_path / "a.parquet", rows, compression="none", use_dictionary=False)
    size = path.stat().st_size
    assert size > 190_000_000
    before, used = psutil.Process().io_counters().read_chars, pa.total_allocated_bytes()
    found = inspect_files(path)
    assert psutil.Process().io_counters().read_chars - before < size / 3
    assert pa.total_allocated_bytes() - used < size / 3
    assert found.beginnings
    assert "only the beginning" in str(found)


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


def test_no_files_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(tp.MissingFilesError, match="it is empty"):
        inspect_files(tmp_path)
    with pytest.raises(tp.MissingFilesError, match="got none"):
        inspect_files([])
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(tp.ConfigError, match=r"a\.bin.*known are \.parquet"):
        inspect_files(tmp_path)


def test_a_column_that_is_not_there_or_has_no_length_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["a"], "n": [1]})
    with pytest.raises(tp.SchemaError, match="did you mean 'text'"):
        inspect_files(tmp_path, column="txt")
    with pytest.raises(tp.SchemaError, match="'n' holds int64"):
        inspect_files(tmp_path, column="n")


@pytest.mark.parametrize("option", ["rows", "sample", "num_shards"])
def test_numbers_are_checked(option: str, tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["a"]})
    with pytest.raises(tp.ConfigError, match=option):
        inspect_files(tmp_path, **{option: -1})


def test_one_row_is_enough(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["a"]})
    found = inspect_files(tmp_path, tokenizer="bytes", sample=1)
    assert (found.rows, found.lengths[0].most, found.findings) == (1, 1, ())


def test_no_rows_is_not_readable(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", pa.schema([("text", pa.string())]).empty_table())
    found = inspect_files(tmp_path)
    assert (found.rows, found.readable) == (0, False)
    assert [column.name for column in found.columns] == ["text"]
    str(found)


def test_thousands_of_columns_are_told_in_part_and_kept_in_full(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {f"c{n}": [n, n + 1] for n in range(3000)})
    found = inspect_files(tmp_path)
    assert len(found.columns) == 3000
    assert "2,960 more columns" in str(found)
    assert len(str(found)) < 20_000


def test_files_whose_types_differ_are_still_told(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"n": pa.array([1], pa.int32())})
    parquet(tmp_path / "b.parquet", {"n": pa.array([1 << 40])})
    found = inspect_files(tmp_path)
    assert found.findings[-1].level == "note"
    assert "is int64, and int32 before" in said(found, "mixed_schemas")


def test_a_folder_of_memory_maps_is_looked_at(tmp_path: Path) -> None:
    for name in "ab":
        tp.write_memmap(tmp_path / name, {"x": np.arange(10)})
    found = inspect_files(tmp_path)
    assert (found.reader, found.files, found.rows) == ("from_memmap", 2, 20)
    assert "other_formats" not in kinds(found)


def test_of_several_splits_one_is_to_be_named(tmp_path: Path) -> None:
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        saved(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(tp.ConfigError, match="give one of these folders") as refused:
        inspect_files(tmp_path)
    assert str(tmp_path / "test") in str(refused.value)
    assert inspect_files(tmp_path / "test").rows == 3


def test_commands_name_many_files_by_a_pattern(tmp_path: Path) -> None:
    for n in range(5):
        parquet(tmp_path / "my data" / f"{n}.parquet", {"x": [1]})
    found = inspect_files(sorted((tmp_path / "my data").iterdir()))
    assert f"repack '{tmp_path}/my data'/*.parquet OUT" in said(found, "duplicates")
