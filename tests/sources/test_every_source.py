"""The same rows in any format give the same batches, and a resume reads no more than it must."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trainpipes as tp
from sources.native_formats import opened
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.testing import check_resume, digest


@dataclass(frozen=True)
class Writer:
    """A format under test.

    Args:
        write: the bytes of a file of these rows, in blocks of so many.
        read: the rows of files, in blocks of so many.
        suffix: what names of its files end with.
        text: whether a row is a line of JSON in one column of text.
        reads: how often each file is read, column by column.
    """

    write: Callable[[pa.Table, int], bytes]
    read: Callable[..., tp.Pipeline]
    suffix: str
    text: bool = False
    reads: int = 1


def parquet(table: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema) as file:
        if len(table):  # else it would write a row group without rows
            file.write_table(table, row_group_size=rows)
    return bytes(sink.getvalue())


def arrow(table: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=rows)
    return bytes(sink.getvalue())


def lines_of(table: pa.Table) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in table.to_pylist()]


def json_lines(table: pa.Table, rows: int) -> bytes:
    return b"".join(lines_of(table))


def array(table: pa.Table, rows: int) -> bytes:
    return json.dumps(table.to_pylist()).encode()


def members(pack: Callable[[bytes], bytes], table: pa.Table, rows: int) -> bytes:
    """Compressed in members that end where they will, not where blocks do."""
    data = json_lines(table, rows)
    step = max(50, len(data) // 400)
    return b"".join(pack(data[n : n + step]) for n in range(0, len(data), step))


def gzipped(table: pa.Table, rows: int) -> bytes:
    return members(lambda data: gzip.compress(data, mtime=0), table, rows)


def zstd(table: pa.Table, rows: int) -> bytes:
    return members(lambda data: pa.Codec("zstd").compress(data, asbytes=True), table, rows)


def comma_separated(table: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pcsv.write_csv(table, sink)
    return bytes(sink.getvalue())


def arrow_stream(table: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as file:
        file.write_table(table, max_chunksize=max(1, rows // 3))
    return bytes(sink.getvalue())


def feather(table: pa.Table, rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(table, sink, compression="zstd", chunksize=rows + 7)
    return bytes(sink.getvalue())


def tar(table: pa.Table, rows: int) -> bytes:
    """Samples of two members, one of them the row as JSON."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for row, line in zip(table.to_pylist(), lines_of(table), strict=True):
            for kind, content in (("text", line), ("cls", b"1")):
                member = tarfile.TarInfo(f"{row['x']:06}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def of_tar(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_webdataset(files, ["text"], text="text", block_rows=rows, **options)


def own(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    """Lines of JSON by functions of the user's own, block by block."""

    def count(file: BinaryIO) -> list[int]:
        lines = sum(1 for _ in file)
        return [min(rows, lines - start) for start in range(0, lines, rows)]

    def read(file: BinaryIO, block: int) -> Iterator[pa.Table]:
        lines = islice(file, block * rows, (block + 1) * rows)
        while found := [json.loads(line) for line in islice(lines, 7)]:
            yield pa.Table.from_pylist(found)

    return tp.read_files(files, read, count, **options)


class Lines(tp.Format):
    """Lines of JSON, so many a block."""

    name, suffixes = "lines", (".lines",)
    schema = pa.schema([("x", pa.int64()), ("y", pa.float64()), ("text", pa.string())])

    def __init__(self, rows: int) -> None:
        self.rows, self.key = rows, str(rows)

    def scan(self, file: FileBytes) -> tp.Layout:
        with file.stream() as lines:
            ends = np.cumsum([0, *map(len, lines)])
        firsts = np.arange(0, len(ends), self.rows)[: -(-(len(ends) - 1) // self.rows)]
        edges = np.append(firsts, len(ends) - 1)
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema.serialize()))
        if file.size and b'{"z"' in file.read([(0, file.size)])[0].tobytes():
            schema = schema.set(0, pa.field("x", pa.struct([("z", pa.int64())])))
        return tp.Layout(np.diff(edges), ends[edges[:-1]], ends[edges[1:]], schema)

    def decode(self, data: FileBytes, layout: tp.Layout, block: int, columns: Any) -> Any:
        [content] = data.read(self.ranges(layout, block, columns))
        rows = [json.loads(line) for line in content.tobytes().splitlines()]
        for first in range(0, len(rows), 7):
            yield pa.RecordBatch.from_pylist(rows[first : first + 7], schema=layout.schema)


def of_format(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_files(files, Lines(rows), **options)


def by_rows(read: Callable[..., tp.Pipeline]) -> Callable[..., tp.Pipeline]:
    return lambda files, rows, **options: read(files, block_rows=rows, **options)


def of_text(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_text(files, block_rows=rows, **options)


def side_by_side(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    """The columns by two readers, whose blocks do not end at the same rows."""
    numbers = tp.read_json(files, ["x"], block_rows=rows, **options)
    return numbers.zip(tp.read_json(files, ["y", "text"], block_rows=rows // 2 + 1, **options))


WRITERS = {
    "parquet": Writer(parquet, lambda f, rows, **o: tp.read_parquet(f, **o), ".parquet"),
    "arrow": Writer(arrow, lambda f, rows, **o: tp.read_arrow(f, **o), ".arrow"),
    "arrow stream": Writer(arrow_stream, by_rows(tp.read_arrow), ".arrows"),
    "feather": Writer(feather, by_rows(tp.read_arrow), ".feather"),
    "own functions": Writer(json_lines, own, ".own"),
    "own format": Writer(json_lines, of_format, ".lines"),
    "tar": Writer(tar, of_tar, ".tar", text=True),
    "json lines": Writer(json_lines, by_rows(tp.read_json), ".jsonl"),
    "json array": Writer(array, by_rows(tp.read_json), ".json"),
    "json lines, gzip": Writer(gzipped, by_rows(tp.read_json), ".jsonl.gz"),
    "json lines, zstd": Writer(zstd, by_rows(tp.read_json), ".jsonl.zst"),
    "csv": Writer(comma_separated, by_rows(tp.read_csv), ".csv"),
    "text": Writer(json_lines, of_text, ".txt", text=True),
    "zip": Writer(json_lines, side_by_side, ".jsonl", reads=2),
}
every = pytest.mark.parametrize("name", WRITERS)


def table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "x": pa.array(numbers, pa.int64()),
            "y": pa.array([n / 7 for n in numbers], pa.float64()),
            "text": pa.array([f'row {n}, "{"é" * (n % 5)}"' for n in numbers], pa.string()),
        }
    )


def write(folder: Path, name: str, counts: tuple[int, ...], rows: int) -> list[str]:
    first, paths = 0, []
    for number, count in enumerate(counts):
        path = folder / f"{number}{WRITERS[name].suffix}"
        path.write_bytes(WRITERS[name].write(table(first, count), rows))
        paths.append(str(path))
        first += count
    return paths


def numbers(name: str, items: list[Any]) -> list[list[int]]:
    """The numbers of the rows in batches."""
    if WRITERS[name].text:
        return [[json.loads(row["text"])["x"] for row in batch] for batch in items]
    return [[row["x"] for row in batch] for batch in items]


COUNTS = (100, 0, 1, 333, 64)


@pytest.mark.parametrize("rows", [10, 64])
def test_the_same_rows_in_any_format_give_the_same_batches(tmp_path, rows):
    seen: dict[str, list[str]] = {}
    orders = {}
    for name, writer in WRITERS.items():
        folder = tmp_path / name
        folder.mkdir()
        paths = write(folder, name, COUNTS, rows)
        pipe = writer.read(paths, rows).sharding_filter(4).shuffle(60, seed=3).batch(8)
        items = list(pipe)
        orders[name] = numbers(name, items)
        if not writer.text:
            assert items[0][0].keys() == {"x", "y", "text"}
            seen[name] = [digest(item) for item in items]
        collated = writer.read(paths, rows).sharding_filter(4).shuffle(60, seed=3)
        if not writer.text:
            batches = collated.tokenize("bytes", "text").batch(8).pad_collate()
            seen[name] += [digest(batch) for batch in batches]
    assert len({tuple(found) for found in seen.values()}) == 1
    assert all(found == orders["parquet"] for found in orders.values())
    assert sorted(n for batch in orders["text"] for n in batch) == list(range(sum(COUNTS)))


@every
def test_a_state_of_any_number_of_ranks_goes_on_with_any_other(tmp_path, name):
    paths = write(tmp_path, name, COUNTS, 16)
    make = lambda: WRITERS[name].read(paths, 16).sharding_filter(4).shuffle(30, seed=1).batch(4)  # noqa: E731
    whole = numbers(name, list(make()))
    found: list[list[int]] = []
    states: list[dict[str, Any]] = []
    for world in (2, 4, 1):
        ranks = []
        for rank in range(world):
            loader = tp.Loader(make().distributed(rank=rank, world_size=world))
            if states:
                loader.load_state_dict(tp.merge_states(states))
            ranks.append(loader)
        each = [iter(loader) for loader in ranks]
        steps = 6 if world > 1 else 10**6
        for _ in range(steps):
            step = [item for one in each if (item := next(one, None)) is not None]
            if not step:
                break
            found += numbers(name, step)
        states = [loader.state_dict() for loader in ranks]
    assert found == whole


class Counted(MemoryFileSystem):
    """Files in memory, of which every byte that is fetched is counted."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fetched: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any):
        found = super().cat_file(path, start, end, **kwargs)
        Counted.fetched += len(found)
        return found


@pytest.fixture
def counted() -> Iterator[Counted]:
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.store.clear()
    yield Counted()
    Counted.store.clear()


@pytest.mark.parametrize(
    "name",
    [name for name, writer in WRITERS.items() if writer.suffix[:2] not in (".p", ".a", ".f", ".o")],
)
def test_a_resume_near_the_end_reads_little_more_than_what_is_left(tmp_path, counted, name):
    rows, shards, total = 40, 4, 8_000
    data = WRITERS[name].write(table(0, total), rows)
    counted.pipe_file(f"/d/a{WRITERS[name].suffix}", data)

    def make() -> tp.Pipeline:
        url = f"counted://d/a{WRITERS[name].suffix}"
        read = WRITERS[name].read(url, rows, index=str(tmp_path / "index"))
        return read.sharding_filter(shards).shuffle(rows, seed=1).batch(25)

    iterator = iter(make())
    for _ in range(int(0.9 * total / 25)):
        next(iterator)
    state = iterator.state_dict()
    rest = [digest(item) for item in iterator]
    again = make()
    again.load_state_dict(state)
    Counted.fetched = 0
    assert [digest(item) for item in again] == rest
    # What is left, and for each shard a window of two blocks at most, which lies in three.
    part = 0.1 + shards * 3 * rows / total
    member = (
        len(data) / 400 if "gzip" in name or "zstd" in name else 0
    )  # which a block may begin in
    most = part * len(data) + part * total / rows * 2 * member
    assert 0 < Counted.fetched < WRITERS[name].reads * most < WRITERS[name].reads * 0.4 * len(data)


def keep(row: dict[str, Any]) -> bool:
    return True


UNSHUFFLED: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "one shard": lambda rows: rows,
    "several": lambda rows: rows.sharding_filter(4),
    "in stride": lambda rows: rows.sharding_filter(4, split="stride"),
    "not counted": lambda rows: rows.sharding_filter(4).filter(keep),
}


@pytest.mark.parametrize(
    "name", ["json lines", "json lines, zstd", "csv", "text", "tar", "arrow", "own format"]
)
@pytest.mark.parametrize("kind", UNSHUFFLED)
def test_unshuffled_a_resume_reads_what_is_left_and_a_block_for_each_shard(
    tmp_path, counted, name, kind
):
    rows, total = 40, 8_000
    data = WRITERS[name].write(table(0, total), rows)
    counted.pipe_file(f"/d/a{WRITERS[name].suffix}", data)

    def make() -> tp.Pipeline:
        url = f"counted://d/a{WRITERS[name].suffix}"
        read = WRITERS[name].read(url, rows, index=str(tmp_path / "index"))
        return UNSHUFFLED[kind](read).batch(25)

    iterator = iter(make())
    for _ in range(int(0.9 * total / 25) + 1):
        next(iterator)
    state = iterator.state_dict()
    rest = [digest(item) for item in iterator]
    again = iter(make())
    again.load_state_dict(state)
    assert again.state_dict() == state  # whatever else must be read before the first row has been
    Counted.fetched = 0
    assert [digest(item) for item in again] == rest
    member = len(data) / 400 if "zstd" in name else 0  # which a block may begin in
    shards = 1 if kind == "one shard" else 4
    part = 0.1 + (shards + 0.5) * rows / total
    assert 0 < Counted.fetched < 1.06 * part * len(data) + 2 * part * total / rows * member


@every
def test_many_files_of_few_rows_and_one_of_many(tmp_path, name):
    sizes = (*(n % 3 for n in range(120)), 1500, 1)
    paths = write(tmp_path, name, sizes, 100)
    pipe = WRITERS[name].read(paths, 100).sharding_filter(4).shuffle(200, seed=0).batch(32)
    assert len(pipe) == -(-sum(sizes) // 32)
    found = numbers(name, list(pipe))
    assert sorted(n for batch in found for n in batch) == list(range(sum(sizes)))
    report = check_resume(pipe, epochs=1, every=19, processes=0)
    assert report.items == (len(pipe),)


@every
def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path, name):
    if name in ("text", "tar", "own functions", "zip"):
        pytest.skip("has no choice of columns here")
    paths = write(tmp_path, name, (5, 5), 10)
    assert list(WRITERS[name].read(paths, 10, columns=["y"]))[1] == {"y": 1 / 7}
    with pytest.raises(tp.SchemaError, match=r"no column 'texts' \(did you mean 'text'\?\)"):
        len(WRITERS[name].read(paths, 10, columns=["texts"]))


@every
def test_a_file_with_another_schema_is_refused_and_named(tmp_path, name):
    writer = WRITERS[name]
    if writer.text:
        pytest.skip("has one schema")
    paths = write(tmp_path, name, (50,) * 40, 10)
    other = pa.table({"x": [{"z": 1}], "y": [0.5], "text": ["t"]})
    if name == "csv":
        other = pa.table({"x": [1], "z": [0.5], "text": ["t"]})
    Path(paths[20]).write_bytes(writer.write(other, 10))
    with pytest.raises((tp.SchemaError, tp.UnreadableError)) as caught:
        list(writer.read(paths, 10))
    assert paths[20] in str(caught.value)


def test_rows_of_several_formats_are_joined_and_mixed(tmp_path):
    kept = {}
    for name in ("parquet", "json lines", "csv"):
        (tmp_path / name).mkdir()
        kept[name] = WRITERS[name].read(write(tmp_path / name, name, (30,), 10), 10)
    joined = tp.concat(*kept.values()).sharding_filter(2).shuffle(20, seed=1).batch(4)
    assert sorted(n for batch in numbers("csv", list(joined)) for n in batch) == sorted(
        [*range(30)] * 3
    )
    mixed = tp.mix({name: pipe.shuffle(10, seed=1) for name, pipe in kept.items()}).batch(4)
    assert len(list(mixed)) > 10
    check_resume(mixed, epochs=1, every=5, processes=0)


def test_rows_of_text_are_kept_by_a_cache(tmp_path):
    paths = write(tmp_path, "json lines", COUNTS, 50)
    read = WRITERS["json lines"].read(paths, 50)
    plain = read.tokenize("bytes", "text").shuffle(40, seed=1).batch(8).pad_collate()
    kept = read.tokenize("bytes", "text").cache(tmp_path / "kept").shuffle(40, seed=1)
    for _ in range(2):
        again = [digest(batch) for batch in kept.batch(8).pad_collate()]
        assert again == [digest(batch) for batch in tp.Pipeline(plain.stages)]
    assert tp.cache.info(tmp_path / "kept").blocks == len(opened(read).lengths)
