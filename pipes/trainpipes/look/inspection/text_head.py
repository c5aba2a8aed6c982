"""The beginning of a file of text that is too large to be read whole: its first rows, and about how many it
has."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.utf8 import is_utf8
from trainpipes.kinds.source import RowSource
from trainpipes.look.inspection.part import Part
from trainpipes.sources.compressed.streams import Stream, kind_by_content, open_stream
from trainpipes.sources.files.byte_ranges import open_at, read_range, size_of
from trainpipes.sources.files.each_file import BadFileError, one_line
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.format import Start, TextFormat

__all__ = ["read_head"]

#: Bytes, decompressed, in which a whole row is looked for; more where there is none in them.
HEAD_BYTES = (1 << 20, 32 << 20, 256 << 20)
#: Bytes, compressed and decompressed, in which a second member is looked for, at which a file could be
#: entered.
MEMBER_BYTES = 16 << 20


class _Head(RowSource):
    """Rows that are in memory."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.lengths = np.array([len(table)], dtype=np.int64)
        self.schema = table.schema

    def read(self, block: int, start: int, stop: int) -> Any:
        return self._table.slice(start, stop - start)

    def fingerprint(self) -> dict[str, Any]:
        return {}


class _Counted:
    """An open file that counts the bytes which are read of it."""

    def __init__(self, file: Any) -> None:
        self._file, self.bytes = file, 0

    def read(self, size: int) -> bytes:
        found: bytes = self._file.read(size)
        self.bytes += len(found)
        return found


def read_head(
    files: FileList, form: TextFormat, deep: Collection[int], file: int, requests: Requests
) -> Part:
    """The whole rows among a file's first bytes; how many it has in all is told from their size.

    Args:
        files: the files.
        form: their format.
        deep: those of which it is found out whether they can be entered at several places.
        file: which one.
        requests: makes those to servers.

    Raises:
        BadFileError: it cannot be read.
    """
    name, size = files.names[file], size_of(files, file, requests)
    if not size:
        raise BadFileError("empty: 0 bytes")
    kind = kind_by_content(read_range(files, file, size, 0, min(size, 16), requests))
    for most in HEAD_BYTES:
        data, whole, ratio = _first_bytes(files, file, size, kind, most, requests)
        start, end = _whole_rows(form, data, whole, name)
        if start is not None and end:
            break
    else:
        raise BadFileError(f"no row ends in its first {len(data):,} bytes")
    assert start is not None
    try:
        table = form.parse(data[start.at : start.at + end], start, name, form.fixed_schema)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise BadFileError(f"its first rows cannot be read: {one_line(error)}") from error
    for column in table.columns:
        if not all(map(is_utf8, column.chunks)):
            raise BadFileError('its text is not UTF-8: read it with errors="replace"')
    head = _Head(table)
    rows = len(table) if whole else int(size * ratio / end * len(table))
    # Of a file of one member, which can be entered at its start only, the block that it is.
    one = file in deep and kind and _is_one_member(files, file, size, kind, requests)
    return Part(
        name=name,
        size=size,
        rows=rows,
        counted=whole,
        lengths=head.lengths,
        block_bytes=np.array([size * ratio if one else 0.0]),
        row_bytes=table.nbytes / max(1, len(table)),
        schema=table.schema,
        open=lambda: head,
    )


def _first_bytes(
    files: FileList, file: int, size: int, kind: str, most: int, requests: Requests
) -> tuple[bytes, bool, float]:
    """The first bytes of a file, decompressed; whether they are all; and how many come of a compressed
    one."""
    parts, made, whole, ratio = [], 0, False, 1.0
    with closing(open_at(files, file, min(size, most), 0, requests)) as source:
        counted = _Counted(source)
        stream = open_stream(counted, kind)
        try:
            while made < most and not whole:
                parts.append(stream.read())
                made += len(parts[-1])
                whole = not parts[-1]
            if kind and not whole:
                ratio = _ratio(stream, counted, made)
        except BadFileError:  # it is cut off where reading stops
            if not made or size <= most:
                raise
    if kind and whole:
        ratio = made / size
    return b"".join(parts), whole and size <= most, ratio


def _ratio(stream: Stream, counted: _Counted, made: int) -> float:
    """How many bytes come of a compressed one, of which some are always read before they are needed: told
    when the next ones are, or when much has come."""
    first = counted.bytes
    while made < MEMBER_BYTES:
        chunk = stream.read()
        if counted.bytes > first or not chunk:
            return made / first
        made += len(chunk)
    return made / first


def _whole_rows(form: TextFormat, data: bytes, whole: bool, name: str) -> tuple[Start | None, int]:
    """Where the rows begin, and how many bytes behind that the last whole one ends."""
    start = form.start(data, whole, name)
    if start is None:
        return None, 0
    content = np.frombuffer(data, np.uint8)[start.at :]
    cutter = form.cutter(start, name)
    stops = cutter.stops(content, np.flatnonzero(content == 10))
    end = int(stops[-1]) if len(stops) else 0
    if whole and cutter.finish():
        end = len(content)
    return start, end


def _is_one_member(files: FileList, file: int, size: int, kind: str, requests: Requests) -> bool:
    """Whether no second member begins within the first MB of a compressed file."""
    made = 0
    with closing(open_at(files, file, min(size, MEMBER_BYTES), 0, requests)) as source:
        stream = open_stream(source, kind)
        try:
            while made < MEMBER_BYTES and len(stream.entries) < 2 and (chunk := stream.read()):
                made += len(chunk)
        except BadFileError:  # cut off where reading stops
            return len(stream.entries) < 2
    return len(stream.entries) < 2 and made >= MEMBER_BYTES
