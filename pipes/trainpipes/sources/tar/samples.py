"""Samples of tar archives as rows, by an index of all members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import offset_dtype, python_to_arrow, to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError, UnreachableError, UnreadableError
from trainpipes.sources.compressed.streams import (
    Decompressed,
    ReadAgain,
    Stream,
    kind_by_content,
)
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.format import Format, Layout, OtherBytesError, packed, unpacked
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.tar.members import (
    BLOCK,
    Archive,
    is_header,
    members_of,
    members_of_index,
    samples_of,
)

KEY = "__key__"
#: Zeros that end an archive, at most; of more, members may lie between.
MOST_PADDING = 1 << 20
#: Bytes that are decoded at once, about; and of one Arrow column of bytes, at most.
BLOCK_BYTES, MOST_BYTES = 4 << 20, 1 << 30
#: Bytes between two members over which both are read as one.
GAP = 64 << 10
#: Bytes of a member beyond which its column is of a large type.
MOST_MEMBER = (1 << 31) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Members(Layout):
    """Members of samples by extension: first byte (decompressed) and size, -1 for none, int64 ``[rows]``."""

    compression: str
    keys: pa.Array
    starts: dict[str, IntArray]
    sizes: dict[str, IntArray]

    def span(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        begins, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for starts, sizes in zip(self.starts.values(), self.sizes.values(), strict=True):
            there = rows[sizes[rows] >= 0]
            begins.append(starts[there] - BLOCK)
            ends.append(starts[there] + sizes[there])
        begin, end = np.concatenate(begins), np.concatenate(ends)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(end[order])
        apart = np.flatnonzero(begin[1:] > end[:-1] + GAP)
        kept = slice(0, len(begin))  # of none there is neither a first nor a last
        return begin[np.append(0, apart + 1)[kept]], end[np.append(apart, -1)[kept]]


class TarSamples(Format):
    name = "tar archives"
    random_access = True
    fit = "archives that are on this machine and not compressed"
    otherwise = "unpack it to .tar, or shuffle within a buffer"

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self.schema = schema or pa.schema([])
        self.again = ReadAgain()

    def scan(self, file: FileBytes, samples: dict[str, Any] | None = None) -> Layout:
        if not file.size:
            raise BadFileError("empty: 0 bytes")
        kind = kind_by_content(bytes(file.read([(0, min(file.size, 16))])[0]))
        if samples is None or kind:
            mapped = None if kind else file.mapped()
            with closing(file.stream()) as opened:
                parts = iter([] if mapped is None else [memoryview(mapped)])
                more = (
                    Stream(opened.read, kind).read if mapped is None else partial(next, parts, b"")
                )
                samples = samples_of(members_of(Archive(more)))
        extra = packed(compression=kind, **samples)
        rows, first, last = np.array([len(samples["keys"])]), np.array([0]), np.array([file.size])
        return Layout(rows, first, last, pa.schema([]), extra)

    def unfit(self, layout: Layout, local: bool) -> bool:
        assert isinstance(layout, Members)
        return bool(layout.compression) or not local

    def open(self, data: FileBytes, layout: Layout) -> Any:
        assert isinstance(layout, Members)
        if not layout.compression:
            return data
        return Decompressed(data, layout.compression, self.again)

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, Members)
        if layout.compression:
            return []
        begin, end = layout.span(_rows_of(layout, block))
        return list(zip(begin.tolist(), end.tolist(), strict=True))

    def decode(
        self, data: Any, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        assert isinstance(layout, Members)
        yield self._batch(data, layout, _rows_of(layout, block))

    def take(
        self, data: FileBytes, layout: Layout, rows: IntArray, columns: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        assert isinstance(layout, Members)
        sizes = sum(np.maximum(each[rows], 0) for each in layout.sizes.values())
        edges = cut_by_bytes(np.broadcast_to(sizes, len(rows)), MOST_BYTES)
        return [self._batch(data, layout, each) for each in np.split(rows, edges[1:-1])]

    def _batch(self, data: Any, layout: Members, rows: IntArray) -> pa.RecordBatch:
        places, parts = _content(data, layout, rows)
        columns = []
        for field in self.schema:
            if field.name == KEY:
                columns.append(layout.keys.take(to_arrow(rows)))
                continue
            starts, sizes = layout.starts[field.name][rows], layout.sizes[field.name][rows]
            number = np.searchsorted(places, starts, side="right") - 1
            own = starts - places[number] if len(places) else starts
            lengths = np.maximum(sizes, 0)
            if not layout.compression:
                _check_headers(parts, number, own, sizes)
            each = zip(number.tolist(), own.tolist(), (own + lengths).tolist(), strict=True)
            content = b"".join([parts[n][a:b] for n, a, b in each if a < b])
            offsets = np.append(0, np.cumsum(lengths)).astype(offset_dtype(field.type))
            valid = to_arrow(sizes >= 0).buffers()[1] if (sizes < 0).any() else None
            buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(content)]
            columns.append(pa.Array.from_buffers(field.type, len(rows), buffers))
            if field.type in (pa.string(), pa.large_string()):
                _check_text(columns[-1], field.name)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        lines = [("columns", ", ".join(self.schema.names))]
        if any(isinstance(each, Members) and each.compression for each in layouts):
            lines.append(
                ("read again", f"{self.again.bytes:,} bytes so far, to come to later samples of "
                "compressed archives: unpacked to .tar, there would be none")
            )  # fmt: skip
        return lines


def _rows_of(layout: Layout, block: int) -> IntArray:
    stop = int(layout.rows[: block + 1].sum())
    return np.arange(stop - int(layout.rows[block]), stop, dtype=np.int64)


def _content(data: Any, layout: Members, rows: IntArray) -> tuple[IntArray, list[memoryview]]:
    begin, end = layout.span(rows)
    if not len(begin):
        return begin, []
    if layout.compression:
        start, stop = int(begin[0]) + BLOCK, int(end[-1])
        content = data.read(start, stop)
        if len(content) < stop - start:
            raise OtherBytesError("it has become shorter")
        return np.array([start]), [memoryview(content)]
    mapped = data.mapped()
    if mapped is not None:
        return np.zeros(1, dtype=np.int64), [memoryview(mapped)]
    return begin, data.read(list(zip(begin.tolist(), end.tolist(), strict=True)))


def _check_headers(
    parts: Sequence[memoryview], number: IntArray, starts: IntArray, sizes: IntArray
) -> None:
    there = np.flatnonzero(sizes >= 0)
    for n in there[[0, -1]].tolist() if len(there) else []:
        begin = int(starts[n]) - BLOCK
        if not is_header(bytes(parts[number[n]][begin : begin + BLOCK]), int(sizes[n])):
            raise OtherBytesError("a member is not where the index, or the .idx beside it, says")


def _check_text(column: pa.Array, name: str) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise BadFileError(
            f"a member {name!r} here is not text in UTF-8: {one_line(error)}; leave it out of "
            "read_webdataset(text=[...])"
        ) from error


def cut_by_bytes(sizes: IntArray, most: int) -> IntArray:
    """Edges of ranges of rows with at most so many bytes, or one row."""
    edges, total = [0], 0
    for row, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            edges.append(row)
            total = 0
        total += size
    return np.unique(np.array([*edges, len(sizes)], dtype=np.int64))


def beside(files: FileList, job: Scan) -> dict[str, Any] | None:
    file, path, data = job.file, files.paths[job.file], job.data
    if not path.endswith(".tar") or not data.size:
        return None
    try:
        beside = f"{path.removesuffix('.tar')}.idx"
        content: bytes = job.requests.call(files.system(file), "cat_file", beside)
        members = members_of_index(content.decode(), data.size)
    except (OSError, UnreachableError, UnreadableError, UnicodeDecodeError):
        return None
    if not members:
        return None
    _, first, first_size = members[0]
    _, last, last_size = max(members, key=lambda member: member[1])
    end = last + -(-last_size // BLOCK) * BLOCK
    if data.size - end > MOST_PADDING:
        return None
    parts = [(first - BLOCK, first), (last - BLOCK, last), (min(end, data.size), data.size)]
    one, other, rest = map(bytes, data.read(parts))
    fits = is_header(one, first_size) and is_header(other, last_size) and not rest.strip(b"\0")
    return samples_of(members) if fits else None


# The columns of one stage


def members_in(
    store: IndexStore, columns: Sequence[str] | None, nulls: bool, caller: str
) -> list[Members]:
    """Where members lie; SchemaError where a sample lacks one that may not be null."""
    layouts = store.layouts()
    archives = [unpacked(layout.extra) for layout in layouts]
    kinds = list(dict.fromkeys(kind for each in archives for kind in each["kinds"]))
    chosen = kinds if columns is None else [name for name in columns if name != KEY]
    filled = next((each for each in archives if len(each["keys"])), None)
    if filled is not None:
        missing = next((name for name in chosen if name not in kinds), None)
        if missing is not None:
            raise SchemaError(
                f"{caller}: no sample has a member {missing!r}{nearest(missing, kinds)}; there are {kinds}, "
                f"and {KEY!r}",
                path=store.files.names[0],
                stage=caller,
            )
        if columns is None and not nulls:
            first = filled["kind_of"][: filled["counts"][0]].tolist()
            chosen = [filled["kinds"][n] for n in first]
    pairs, names = list(zip(layouts, archives, strict=True)), store.files.names
    found = [_members(*each, chosen) for each in pairs]
    if nulls:
        return found
    for name in chosen:
        lacking = [np.flatnonzero(each.sizes[name] < 0) for each in found]
        _refuse(lacking, f"has no member {name!r}", names, archives, caller)
    for name in kinds if columns is None else ():
        if name not in chosen:
            rows = [np.flatnonzero(_members(*each, [name]).sizes[name] >= 0) for each in pairs]
            _refuse(rows, f"alone has a member {name!r}", names, archives, caller)
    return found


def _members(layout: Layout, archive: dict[str, Any], chosen: Sequence[str]) -> Members:
    kinds, rows = archive["kinds"], len(archive["keys"])
    row_of = np.repeat(np.arange(rows, dtype=np.int64), archive["counts"])
    starts, sizes = {}, {}
    for kind in chosen:
        number = kinds.index(kind) if kind in kinds else -1
        which = np.flatnonzero(archive["kind_of"] == number)
        starts[kind] = np.zeros(rows, dtype=np.int64)
        sizes[kind] = np.full(rows, -1, dtype=np.int64)
        starts[kind][row_of[which]] = archive["starts"][which]
        sizes[kind][row_of[which]] = archive["sizes"][which]
    keys = python_to_arrow(archive["keys"], pa.string())
    numbers = layout.rows, layout.start, layout.stop, layout.schema
    compression = archive["compression"]
    return Members(*numbers, compression=compression, keys=keys, starts=starts, sizes=sizes)


def _refuse(
    rows: Sequence[IntArray],
    what: str,
    names: Sequence[str],
    archives: Sequence[dict[str, Any]],
    caller: str,
) -> None:
    count = sum(map(len, rows))
    if not count:
        return
    file = next(n for n, each in enumerate(rows) if len(each))
    row, path = int(rows[file][0]), names[file]
    more = f", and {count - 1:,} more" if count > 1 else ""
    raise SchemaError(
        f"{caller}: sample {archives[file]['keys'][row]!r} of {path} {what}{more}: choose with columns=[...] "
        'what all samples have, or pass missing="null"',
        path=path,
        row=row,
        stage=caller,
    )
