"""Samples of tar archives as rows, by an index of all members."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray, column_names
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import offset_dtype, python_to_arrow, to_arrow
from trainpipes.errors import SchemaError, shown
from trainpipes.interfaces.quarantine import OnBadRow, leaves_out
from trainpipes.interfaces.stage import Stage
from trainpipes.sources import compressed, tar_members
from trainpipes.sources.files import file_reader, formats
from trainpipes.sources.files.decoded_files import BAD, above_reader, without_bad_files
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.file_source import NumberedFiles
from trainpipes.sources.files.index_store import IndexStore

KEY = "__key__"
#: Bytes that are decoded at once, about; and of an Arrow column of bytes, at most.
BLOCK_BYTES, MOST_BYTES = 4 << 20, 1 << 30
#: Bytes of a member beyond which its column is of a large type.
MOST_MEMBER = (1 << 31) - 1
#: Bytes of local archives from which on an index of them is kept.
LARGE = 64 << 20


class ReadWebdataset(file_reader.FileReader, has_blocks=True, random_access=True):
    """Reads the samples of tar archives in WebDataset's layout: consecutive members with the same name up to
    the first dot, such as ``0001.jpg`` and ``0001.cls``.

    Rows are Arrow, with the key as ``__key__`` and a column of bytes for each extension. Members without an
    extension, hidden ones, folders and links are skipped. A compressed or remote archive is read once for its
    headers, unless an index of ``wds2idx`` lies beside it. Samples of plain local archives can be chosen by
    number (``shuffle(scope="global")``).

    Args:
        columns: extensions, and ``"__key__"``; None for those of the first sample.
        missing: where a sample lacks a member, "raise" raises; "null" gives null, and ``columns`` are by
            default all extensions of all archives.
        text: extensions whose members come as text, such as ``["txt"]``.
        block_rows: samples in a block (a shuffle permutes blocks first); if left out, about 4 MB.
        storage_options: more options of fsspec; never shown or saved.
        index: where to keep the headers; see ``read_parquet``. If left out, also from 64 MB on.
        on_error: for samples that lack a member or alone have a member, texts that are not UTF-8, and damaged
            archives; as in ``read_json``.

    Raises:
        UnreadableError: names all files that are no archives.
        SchemaError: a sample lacks a member that others have, or none has one that an option names; names it.
        DataChangedError: a file has changed since it was listed.

    >>> import io, pathlib, tarfile, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "digits.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name, content in [("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one"), ("1.cls", b"1")]:
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(content)
    ...         archive.addfile(member, io.BytesIO(content))
    >>> list(tp.list_files(path).read_webdataset(text=["txt"]))[1]
    {'__key__': '1', 'txt': 'one', 'cls': b'1'}
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    missing: Literal["raise", "null"] = "raise"
    text: Sequence[str] = ()
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None
    on_error: OnBadRow = "raise"

    def check(self) -> None:
        super().check()
        self._set(text=tuple(column_names(self.text, "read_webdataset(text)", least=0)))

    def _above(self) -> Sequence[Stage]:
        return above_reader(self)

    @without_bad_files
    def _open_on(self, files: Sequence[Stage]) -> NumberedFiles:
        caller, listed = str(self), self.listed(files)
        store = IndexStore(listed, self.name, TarSamples.name, "", self.options["index"], LARGE)
        store.complete(
            lambda job: TarSamples().scan(job.data, tar_members.beside(listed, job)),
            caller,
            job="reading headers of tar archives",
        )
        how = "null" if self.missing == "null" else "bad" if leaves_out(self.on_error) else "raise"
        members = members_in(store, self.columns, self.text, how, caller)
        edges, layouts = [], []
        for each in members:
            sizes_of_rows = each.row_bytes(np.arange(len(each.keys)))
            pieces = blocks = file_reader.cut_by_bytes(sizes_of_rows, BLOCK_BYTES)
            if self.block_rows is not None:
                blocks = file_reader.cut_evenly(len(sizes_of_rows), self.block_rows)
            elif each.compression:
                blocks = pieces[[0, -1]] if len(sizes_of_rows) else pieces
            pieces, ends = np.union1d(pieces, blocks), np.append(0, np.cumsum(sizes_of_rows))
            start, stop = ends[pieces[:-1]], ends[pieces[1:]]  # in the bytes of all members
            edges.append(blocks)
            layouts.append(replace(each, rows=np.diff(pieces), start=start, stop=stop))
        names = [KEY, *members[0].places] if self.columns is None else self.columns
        schema = pa.schema([(name, self._type(name, members)) for name in names])
        rows = sum(int(layout.rows.sum()) for layout in layouts)
        total = sum(int((layout.stop - layout.start).sum()) for layout in layouts)
        row_bytes = total / rows if rows else None
        source = NumberedFiles(
            store,
            TarSamples(schema, leaves_out(self.on_error)),
            layouts=layouts,
            edges=edges,
            schema=schema,
            row_bytes=row_bytes,
        )
        source.leave_out(self.on_error)
        return source

    def _type(self, name: str, members: Sequence[Members]) -> pa.DataType:
        is_text = name in (*self.text, KEY)
        if name != KEY and any(
            each.places[name][1].max(initial=0) > MOST_MEMBER for each in members
        ):
            return pa.large_string() if is_text else pa.large_binary()
        return pa.string() if is_text else pa.binary()


@dataclass(frozen=True, eq=False, kw_only=True)
class Members(formats.Layout):
    """Members of samples by extension: first byte (decompressed), size or -1, int64 ``[rows]``; and what is
    wrong with samples that are left out.
    """

    compression: str
    content: str
    keys: pa.Array
    places: dict[str, tuple[IntArray, IntArray]]
    bad: dict[int, str] = field(default_factory=dict)

    def row_bytes(self, rows: IntArray) -> IntArray:
        none = np.zeros(len(rows), dtype=np.int64)
        return sum((np.maximum(sizes[rows], 0) for _, sizes in self.places.values()), none)

    def ranges(self, rows: IntArray) -> list[tuple[int, int]]:
        """Where members of some rows lie with their headers, extension by extension."""
        spans: list[tuple[int, int]] = []
        for starts, sizes in self.places.values():
            there = rows[sizes[rows] >= 0]
            begins, ends = starts[there] - tar_members.BLOCK, starts[there] + sizes[there]
            spans += zip(begins.tolist(), ends.tolist(), strict=True)
        return spans


class TarSamples(formats.Format):
    """Tar archives as a format: a row is a sample."""

    name = "tar archives"
    random_access = True
    fit = "archives that are on this machine and not compressed"
    otherwise = "unpack it to .tar, or shuffle within a buffer"

    def __init__(self, schema: pa.Schema | None = None, leaves_out: bool = False) -> None:
        self.schema, self.leaves_out = schema or pa.schema([]), leaves_out
        self.again = compressed.ReadAgain()

    def scan(self, file: FileBytes, samples: dict[str, Any] | None = None) -> formats.Layout:
        if not file.size:
            raise formats.BadFileError("empty: 0 bytes")
        kind = compressed.kind_by_content(bytes(file.read([(0, min(file.size, 16))])[0]))
        if samples is None or kind:
            mapped = None if kind else file.mapped()
            with closing(file.stream()) as opened:
                parts = iter([] if mapped is None else [memoryview(mapped)])
                more = (
                    compressed.Stream(opened.read, kind).read
                    if mapped is None
                    else partial(next, parts, b"")
                )
                archive = tar_members.Archive(more)
                samples = tar_members.samples_of(tar_members.members_of(archive))
                samples["content"] = archive.content
        extra = formats.packed(compression=kind, **samples)
        rows, first, last = np.array([len(samples["keys"])]), np.array([0]), np.array([file.size])
        return formats.Layout(rows, first, last, pa.schema([]), extra)

    def content(self, layout: formats.Layout) -> str:
        assert isinstance(layout, Members)
        return layout.content

    def unfit(self, layout: formats.Layout, local: bool) -> bool:
        assert isinstance(layout, Members)
        return bool(layout.compression) or not local

    def open(self, data: FileBytes, layout: formats.Layout) -> Any:
        assert isinstance(layout, Members)
        return compressed.opened(data, layout.compression, self.again)

    def ranges(
        self, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        assert isinstance(layout, Members)
        return [] if layout.compression else layout.ranges(_rows_of(layout, block))

    def decode(
        self, data: Any, layout: formats.Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        assert isinstance(layout, Members)
        yield self._batch(data, layout, _rows_of(layout, block))

    def take(
        self, data: FileBytes, layout: formats.Layout, rows: IntArray, columns: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        assert isinstance(layout, Members)
        edges = file_reader.cut_by_bytes(layout.row_bytes(rows), MOST_BYTES)
        return [self._batch(data, layout, each) for each in np.split(rows, edges[1:-1])]

    def _batch(self, data: Any, layout: Members, rows: IntArray) -> pa.RecordBatch:
        columns, schema = {KEY: layout.keys.take(to_arrow(rows))}, self.schema
        bad: dict[int, str] = {}
        if layout.bad:
            bad = {n: layout.bad[row] for n, row in enumerate(rows.tolist()) if row in layout.bad}
        parts = iter(_parts(data, layout.ranges(rows)))
        for name, (_, whole) in layout.places.items():
            kind, sizes = self.schema.field(name).type, whole[rows]
            members = list(islice(parts, int((sizes >= 0).sum())))
            if members and not layout.compression:
                _check_headers(members)
            content = b"".join([part[tar_members.BLOCK :] for part in members])
            ends = np.append(0, np.cumsum(np.maximum(sizes, 0))).astype(offset_dtype(kind))
            valid = to_arrow(sizes >= 0).buffers()[1] if (sizes < 0).any() else None
            buffers = [valid, pa.py_buffer(ends), pa.py_buffer(content)]
            columns[name] = pa.Array.from_buffers(kind, len(rows), buffers)
            if kind in (pa.string(), pa.large_string()):
                if self.leaves_out:
                    columns[name] = _without_bad_text(columns[name], name, bad)
                else:
                    _check_text(columns[name], name)
        if self.leaves_out:
            columns[BAD.name] = pa.array([bad.get(n) for n in range(len(rows))], BAD.type)
            schema = schema.append(BAD)
        return pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)

    def describe(self, layouts: Sequence[formats.Layout]) -> list[tuple[str, str]]:
        lines = [("columns", ", ".join(self.schema.names))]
        if any(isinstance(each, Members) and each.compression for each in layouts):
            lines.append(
                ("read again", f"{self.again.bytes:,} bytes so far, to come to later samples of "
                "compressed archives: unpacked to .tar, there would be none")
            )  # fmt: skip
        return lines


def _rows_of(layout: formats.Layout, block: int) -> IntArray:
    stop = int(layout.rows[: block + 1].sum())
    return np.arange(stop - int(layout.rows[block]), stop, dtype=np.int64)


def _parts(data: Any, ranges: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
    whole = data.mapped()
    if whole is None:
        views: list[memoryview] = data.read(ranges)
        return views
    view = memoryview(whole)
    return [view[start:stop] for start, stop in ranges]


def _check_headers(parts: Sequence[memoryview]) -> None:
    for part in (parts[0], parts[-1]):
        if not tar_members.is_header(
            bytes(part[: tar_members.BLOCK]), len(part) - tar_members.BLOCK
        ):
            raise formats.OtherBytesError(
                "a member is not where the index, or the .idx beside it, says"
            )


def _check_text(column: pa.Array, name: str) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise formats.BadFileError(
            f"a member {name!r} here is not text in UTF-8: {formats.one_line(error)}; leave it out of "
            "read_webdataset(text=[...])"
        ) from error


def _without_bad_text(column: pa.Array, name: str, bad: dict[int, str]) -> pa.Array:
    """The texts, with null where a text is not UTF-8; ``bad`` then says so of its row."""
    try:
        column.validate(full=True)
        return column
    except pa.ArrowInvalid:
        kind = pa.large_binary() if column.type == pa.large_string() else pa.binary()
        contents = column.view(kind).to_pylist()
    for n, content in enumerate(contents):
        try:
            contents[n] = None if content is None else content.decode()
        except UnicodeDecodeError:
            contents[n] = None
            bad.setdefault(n, f"member {name!r} is not UTF-8")
    return pa.array(contents, column.type)


# The columns of a stage


def members_in(
    store: IndexStore,
    columns: Sequence[str] | None,
    text: Sequence[str],
    missing: str,
    caller: str,
) -> list[Members]:
    """Where members lie; where a sample lacks a member, it is "bad", or "raise" raises SchemaError."""
    nulls, bad = missing == "null", defaultdict[int, dict[int, str]](dict)
    layouts, paths = store.layouts(), store.files.names
    archives = [formats.unpacked(layout.extra) for layout in layouts]
    kinds = list(dict.fromkeys(kind for each in archives for kind in each["kinds"]))
    chosen = kinds if columns is None else [name for name in columns if name != KEY]
    filled = next((each for each in archives if each["keys"]), None)
    if filled is not None:
        named = [*chosen, *(name for name in text if name != KEY)]
        unknown = next((name for name in named if name not in kinds), None)
        if unknown is not None:
            raise SchemaError(
                f"{caller}: no sample has a member {unknown!r}{nearest(unknown, kinds)}; there are "
                f"{shown(kinds, 1000)}, and {KEY!r}",
                path=paths[0],
                stage=caller,
            )
        if columns is None and not nulls:
            chosen = [filled["kinds"][n] for n in filled["kind_of"][: filled["counts"][0]].tolist()]
    for name in () if nulls else kinds if columns is None else chosen:
        wanted, odd = name in chosen, []
        for file, each in enumerate(archives):
            rows = np.flatnonzero((_members(each, name)[1] < 0) == wanted)
            odd += [(file, row) for row in rows.tolist()]
        lack = f"{'has no' if wanted else 'alone has a'} member {name!r}"
        if missing == "bad":
            for file, row in odd:
                bad[file].setdefault(row, f"the sample {lack}")
        elif odd:
            file, row = odd[0]
            more = f", and {len(odd) - 1:,} more" if len(odd) > 1 else ""
            raise SchemaError(
                f"{caller}: sample {archives[file]['keys'][row]!r} of {paths[file]} {lack}{more}: choose "
                'with columns=[...] what all samples have, or pass missing="null"',
                path=paths[file],
                row=row,
                stage=caller,
            )
    return [
        Members(
            *(layout.rows, layout.start, layout.stop, layout.schema),
            compression=each["compression"],
            content=f"{zlib.crc32(layout.extra)}" if "content" in each else "",
            keys=python_to_arrow(each["keys"], pa.string()),
            places={name: _members(each, name) for name in chosen},
            bad=bad[file],
        )
        for file, (layout, each) in enumerate(zip(layouts, archives, strict=True))
    ]


def _members(archive: dict[str, Any], kind: str) -> tuple[IntArray, IntArray]:
    """The first byte and the size, -1 for none, of each row's member, int64 ``[rows]``."""
    rows = len(archive["keys"])
    starts, sizes = np.zeros(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    if kind in archive["kinds"]:
        which = archive["kind_of"] == archive["kinds"].index(kind)
        row_of = np.repeat(np.arange(rows), archive["counts"])[which]
        starts[row_of], sizes[row_of] = archive["starts"][which], archive["sizes"][which]
    return starts, sizes
