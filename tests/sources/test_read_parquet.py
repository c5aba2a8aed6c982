"""Reading rows of row groups: the right ones, in bounded memory, and loudly where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interpreters import python
from trainpipes.errors import (
    ConfigError,
    SchemaError,
    UnreadableError,
)
from trainpipes.sources import parquet_footers, read_parquet
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.read_parquet import ReadParquet, RowGroups


def source(urls: object, columns: list[str] | None = None) -> FileSource:
    return ReadParquet(columns=columns)._open_on([ListFiles(urls=urls)])


def text(row: int) -> str:
    return f"{row}:" + "x" * (row * 7 % 40)


def table(start: int, stop: int) -> pa.Table:
    rows = range(start, stop)
    return pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "text": pa.array([text(n) if n % 5 else None for n in rows], pa.string()),
            "tokens": pa.array([list(range(n % 4)) for n in rows], pa.list_(pa.int32())),
        }
    )


#: Rows of each row group of each file: uneven, tiny, empty, and one that is long.
FILES = ((7, 0, 1, 300), (), (0,), (1,), (5000, 64, 65), (2, 2, 2, 2))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    first = 0
    for number, groups in enumerate(FILES):
        with pq.ParquetWriter(folder / f"{number}.parquet", table(0, 0).schema) as writer:
            for rows in groups:
                writer.write_table(table(first, first + rows))
                first += rows
    return folder


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_parquet, "BATCH_BYTES", 1 << 10)


# Rows


def test_all_rows_come_in_file_order(uneven):
    found = source(uneven)
    assert found.lengths.tolist() == [n for groups in FILES for n in groups]
    reader = found.reader()
    parts = [reader.read(n, 0, rows) for n, rows in enumerate(found.lengths.tolist())]
    assert pa.concat_tables(parts).equals(table(0, int(found.lengths.sum())))


def test_reading_on_decodes_nothing_twice_and_reading_back_opens_anew(
    uneven, monkeypatch, small_batches
):
    begun: list[int] = []
    opened: list[int] = []
    decode, open_file = RowGroups.decode, read_parquet.ParquetFile

    def decoding(format: RowGroups, data: Any, layout: Any, block: int, columns: Any) -> Any:
        begun.append(block)
        return decode(format, data, layout, block, columns)

    def opening(format: RowGroups, data: Any, *more: Any) -> Any:
        opened.append(Path(data.name).name)
        return open_file(format, data, *more)

    monkeypatch.setattr(RowGroups, "decode", decoding)
    monkeypatch.setattr(read_parquet, "ParquetFile", opening)
    found = source(uneven)
    long = found.lengths.tolist().index(5000)
    reader = found.reader()
    for start in range(0, 3000, 100):
        reader.read(long, start, start + 100)
    reader.read(long, 4000, 4001)  # forward: skips
    assert begun == [0]
    reader.read(long + 1, 0, 64)
    reader.read(long, 10, 20)
    assert begun == [0, 1, 0]
    assert opened == ["4.parquet"]


def test_only_the_chosen_columns_are_read_in_their_order(uneven):
    rows = source(uneven, ["tokens", "id"]).reader().read(0, 2, 4)
    assert rows.to_pylist() == [{"tokens": [0, 1], "id": 2}, {"tokens": [0, 1, 2], "id": 3}]


def test_files_in_an_archive_and_in_memory_are_read_too(uneven, tmp_path):
    import zipfile

    memory = fsspec.filesystem("memory")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted(uneven.glob("*.parquet")):
            archive.write(path, path.name)
            memory.pipe(f"/uneven/{path.name}", path.read_bytes())
    try:
        local = source(uneven)
        for url in (f"zip://*.parquet::{tmp_path}/all.zip", "memory://uneven"):
            found = source(url)
            assert found.fingerprint() == local.fingerprint()
            reader, rows = found.reader(), found.lengths.tolist()
            parts = [reader.read(n, 0, count) for n, count in enumerate(rows)]
            assert pa.concat_tables(parts).equals(table(0, sum(rows)))
    finally:
        memory.rm("/uneven", recursive=True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], r"read_parquet\(columns\) must be a column name or several in a list, got \[\]"),
        ([1], r"got \[1\]"),
        ({"a", "b"}, r"in a list, got {"),  # its order differs between two processes
        (["a", "b", "a"], r"each column once, got 'a' twice"),
    ],
)
def test_columns_are_names_each_once(columns, message):
    with pytest.raises(ConfigError, match=message):
        ReadParquet(columns=columns)


def test_one_column_may_be_given_by_itself(uneven):
    assert ReadParquet(columns="id").options["columns"] == ["id"]


# Memory

HUGE = """
import sys
from pathlib import Path
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.read_parquet import ReadParquet

def kilobytes(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))

found = ReadParquet()._open_on([ListFiles(urls=sys.argv[1])])
reader = found.reader()
reader.read(0, 0, 1)  # loads code
before = kilobytes("VmRSS")
for start in (0, 30_000, 5_000):
    assert reader.read(0, start, start + 1000).num_rows == 1000
print(int(found.lengths[0]), 1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for memory")
def test_a_huge_row_group_is_never_held_whole(tmp_path):
    rows = 90_000  # 90 MB in one row group
    words = [f"{n % 1000:07d}-" * 128 for n in range(1000)]
    texts = pa.array([f"{n}{words[n % 1000]}" for n in range(rows)])
    pq.write_table(
        pa.table({"text": texts}),
        tmp_path / "1.parquet",
        row_group_size=rows,
        use_dictionary=False,
        compression="none",
    )
    del texts
    done = subprocess.run(
        [*python(), "-c", HUGE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    length, grown = map(int, done.stdout.split())
    assert length == rows
    assert grown < 50e6


# Files that change


@pytest.mark.parametrize("checksum", [True, False])
def test_damaged_pages_name_file_row_group_and_row(tmp_path, checksum, small_batches):
    path = tmp_path / "1.parquet"
    pq.write_table(
        table(0, 3000),
        path,
        row_group_size=1500,
        data_page_size=1000,
        write_batch_size=100,
        use_dictionary=False,
        write_page_checksum=checksum,
    )
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(1).column(1)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    for n in range(middle, middle + 300):
        data[n] ^= 0xFF
    path.write_bytes(data)
    reader = source(tmp_path).reader()
    assert reader.read(0, 0, 1500).num_rows == 1500
    with pytest.raises(UnreadableError, match="the rows here cannot be read: ") as caught:
        reader.read(1, 0, 1500)
    assert (caught.value.path, caught.value.row_group) == (str(path), 1)
    assert caught.value.row is not None
    assert 1500 < caught.value.row < 3000
    assert reader.read(0, 5, 6).to_pylist()[0]["id"] == 5


def test_a_value_that_the_wider_type_does_not_hold_names_column_and_place(tmp_path):
    pq.write_table(pa.table({"x": [2**60 + 1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "2.parquet")
    found = source(tmp_path)
    assert found.reader().read(1, 0, 1).to_pylist() == [{"x": 0.5}]
    with pytest.raises(
        SchemaError, match=r"row group 0, row 0: column 'x' is int64 here and double"
    ):
        found.reader().read(0, 0, 1)


def test_footers_stay_parsed_within_bounds(uneven, monkeypatch):
    parsed: list[int] = []
    parse = parquet_footers.parse_footer

    def count(footer: bytes) -> Any:
        parsed.append(len(footer))
        return parse(footer)

    monkeypatch.setattr(parquet_footers, "parse_footer", count)
    for limit, wanted in ((1 << 20, 0), (0, 6)):  # they were parsed when files were looked at
        monkeypatch.setattr(parquet_footers, "FOOTER_BYTES", limit)
        found, readers = source(uneven), []
        blocks = [0, 6, len(found.lengths) - 1]
        parsed.clear()
        for block in blocks * 2:
            readers.append(found.reader())
            assert readers[-1].read(block, 0, 1).num_rows == 1
        assert len(parsed) == wanted
