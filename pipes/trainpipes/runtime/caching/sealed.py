"""Arrow files that are whole, or as good as not there.

A file is written beside its place and renamed, and carries what it is about and a checksum. Read, it
is memory-mapped. What was cut short or damaged is removed, with one warning; what is another file, or
another user's, is taken for missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from trainpipes.runtime.caching.own_file import NotOwnError, make_file, open_file
from trainpipes.runtime.rows.utf8 import check_whole
from trainpipes.runtime.warn_once import warn_once

__all__ = ["ForeignError", "Marks", "pack", "put", "read", "write"]

#: The key of our entry in a file's schema, and what in it the checksum follows.
KEY, MARK = b"trainpipes", b"trainpipes-crc32:"
BLANK = b"00000000"
#: Bytes written at a time.
STEP = 64 << 20
#: Bytes at a file's start in which ours have their seal.
HEAD = 1 << 16
#: Where an open file can be opened again by its handle, whatever has become of its name.
HANDLES = "/dev/fd"

#: Files that were found to be whole: device, inode, size and time of the last change.
Marks = set[tuple[int, int, int, int]]


class ForeignError(OSError):
    """A file that the user named, and that nothing of ours has written."""


def _sealed(schema: pa.Schema, about: dict[str, Any]) -> pa.Schema:
    seal = json.dumps({"about": about, "columns": _columns(schema), "sum": (MARK + BLANK).decode()})
    return schema.with_metadata({**(schema.metadata or {}), KEY: seal})


def _columns(schema: pa.Schema) -> str:
    """A digest of names and types."""
    fields = [(field.name, str(field.type), field.nullable) for field in schema]
    return hashlib.sha256(repr(fields).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _seal(content: Any) -> None:
    """Write the checksum of a file's bytes into them."""
    digits = b"%08x" % zlib.crc32(content)
    with memoryview(content) as view:
        for place in _places(view):
            content[place : place + len(BLANK)] = digits


def pack(table: pa.Table, about: dict[str, Any]) -> bytearray:
    """The bytes of an Arrow IPC file with these rows.

    Args:
        table: the rows; written in one piece.
        about: what the file is, of JSON types; ``read`` wants the same.
    """
    table = table.combine_chunks()
    table = table.replace_schema_metadata(_sealed(table.schema, about).metadata)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content = bytearray(sink.getvalue())
    _seal(content)
    return content


def _places(content: memoryview) -> list[int]:
    """Where the checksum stands: in the schema at a file's start, and in that in its footer.

    Raises:
        ValueError: one is not there.
    """
    start = 16 + int.from_bytes(content[12:16], "little")
    footer = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    if not start <= footer < len(content):
        raise ValueError("no Arrow file")
    ends = (0, bytes(content[:start])), (footer, bytes(content[footer:]))
    return [offset + part.index(MARK) + len(MARK) for offset, part in ends]


def _is_whole(content: memoryview) -> bool:
    """Whether the checksum is that of the file with blanks in its place."""
    found, done, said = 0, 0, set()
    for place in _places(content):
        found = zlib.crc32(BLANK, zlib.crc32(content[done:place], found))
        done = place + len(BLANK)
        said.add(bytes(content[place:done]))
    return said == {b"%08x" % zlib.crc32(content[done:], found)}


def put(path: Path, content: bytes | bytearray, *, own: bool = True) -> None:
    """Write a file beside its place and rename it there; of two writers the last one wins.

    Args:
        path: the file.
        content: what ``pack`` made.
        own: whether it is in a cache, for its owner alone; else the user named it.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    make_file(path, lambda handle: _write_all(handle, content), own=own)


def _write_all(handle: int, content: bytes | bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view[:STEP]) :]


def write(
    path: Path, tables: Callable[[], Iterable[pa.Table]], about: dict[str, Any] | None
) -> int:
    """Write tables of one schema to a file as they come; as ``put`` does.

    Args:
        path: the file.
        tables: gives the rows; again, if others remove the file before it has its name.
        about: what the file is, in a cache; None for a plain Arrow file that the user named.

    Returns:
        How many tables there were; without any, no file is made.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    written = 0

    def fill(handle: int) -> None:
        nonlocal written
        written = 0
        with os.fdopen(handle, "r+b", closefd=False) as file:
            writer = None
            for table in tables():
                if writer is None:
                    schema = table.schema if about is None else _sealed(table.schema, about)
                    writer = pa.ipc.new_file(file, schema)
                writer.write_table(table.replace_schema_metadata(schema.metadata))
                written += 1
            if writer is None:
                raise _NothingError
            writer.close()
        if about is not None:
            with mmap.mmap(handle, 0) as content:
                _seal(content)

    with suppress(_NothingError):
        make_file(path, fill, own=about is not None)
    return written


class _NothingError(Exception):
    """There are no tables."""


def read(
    path: Path,
    about: dict[str, Any],
    *,
    own: bool = True,
    known: Marks | None = None,
    trusted: bool = False,
    check: Callable[[pa.Table], bool] | None = None,
    any_text: bool = False,
) -> pa.Table | None:
    """The rows of a file, which lie in it; None if there is no such file, or it is not whole.

    Costs a pass over the file, 1 to 3 GB/s, once for each file in ``known``.

    Args:
        path: the file.
        about: what it must be.
        own: whether it is in a cache, for its owner alone; else the user named it.
        known: files that were found to be whole, to which this one is added.
        trusted: leave out the checksum: another process of ours has just read it.
        check: whether the rows are what they must be.
        any_text: whether text may be other than UTF-8, as that of a user's files may.

    Raises:
        ForeignError: the user named a file that is none of ours.
    """
    try:
        handle = open_file(path, own=own)
    except NotOwnError as error:
        warn_once(
            f"{path} is not used, for {error.strerror}: each user keeps files of their own. Name a folder "
            "of yours by TRAINPIPES_CACHE or cache(path=...)",
            ("not own", str(path.parents[1])),
        )
        return None
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        mark = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        trusted = trusted or (known is not None and mark in known)
        table, said = _read(path, handle, trusted, any_text)
        if table is not None and said != about:
            return None
        if table is None or not (trusted or check is None or check(table)):
            if not own and found.st_size and MARK not in os.read(handle, HEAD):
                raise ForeignError(errno.EEXIST, "not a file of ours", os.fspath(path))
            _drop_file(path, found)
            return None
        if own:
            with suppress(OSError, NotImplementedError):
                # The least recently used ones go first. What tells files apart stays.
                times = time.time_ns(), found.st_mtime_ns
                os.utime(path, ns=times, follow_symlinks=False)
    except ForeignError:
        raise
    except OSError:
        return None
    finally:
        os.close(handle)
    if known is not None:
        known.add(mark)
    return table


def _read(path: Path, handle: int, trusted: bool, any_text: bool) -> tuple[pa.Table | None, Any]:
    """The rows of an open file, and what it is about; None if it is damaged."""
    if not os.fstat(handle).st_size:
        return None, None
    again = f"{HANDLES}/{handle}" if os.path.exists(f"{HANDLES}/{handle}") else os.fspath(path)
    with pa.memory_map(again) as source:
        content = source.read_buffer()
    try:
        if not trusted and not _is_whole(memoryview(content)):
            return None, None
        with pa.ipc.open_file(content) as reader:
            table = reader.read_all()
        if not trusted:
            if any_text:
                check_whole(table)
            else:
                table.validate(full=True)
        metadata = dict(table.schema.metadata)
        seal = json.loads(metadata.pop(KEY))
        said = seal["about"]
        if seal.get("columns") != _columns(table.schema):
            return (None, None) if "columns" in seal else (table, "an older form")
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None
    return table.replace_schema_metadata(metadata or None), said


def _drop_file(path: Path, found: os.stat_result) -> None:
    """Remove a file that is damaged, and say so once."""
    with suppress(OSError):
        if os.path.samestat(found, os.lstat(path)):  # no other one has come in its place
            os.unlink(path)
    warn_once(
        f"{path} was damaged: cut short or changed after it was written. It is removed and made again; "
        "if that happens often, check the disk",
        ("damaged", str(path.parents[1])),
    )
