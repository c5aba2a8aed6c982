"""Arrow streams with a checksum, memory-mapped. Damaged files are removed, with one warning; another
user's are not used.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from trainpipes._internal.messages import warn_once
from trainpipes.storage.caching.private_file import NotOwnError, make_file, open_file

#: The key, in a file's schema, of what it is about; and the bytes of a file in which ours have it.
KEY = b"trainpipes:about"
HEAD = 1 << 16
#: A file's last bytes: this, and the CRC-32 of all bytes before both.
MAGIC = b"TPSUM001"
TRAILER = len(MAGIC) + 4
#: Chunks of one column may have dictionaries of their own, which a file that is no stream has not.
OPTIONS = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
#: Where an open file can be opened again by its handle, under any name.
HANDLES = "/dev/fd"

#: Files that this process has found to be whole: device, inode, size and time of the last change.
_whole: set[tuple[int, int, int, int]] = set()


class ForeignError(OSError):
    """A file that the user named, and that nothing of ours has written."""


def size_of(table: pa.Table, about: dict[str, Any]) -> int:
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, _with_about(table.schema, about)) as writer:
        writer.write_table(table)
    return int(sink.size()) + TRAILER


def trailer(content: bytes | memoryview | mmap.mmap) -> bytes:
    return MAGIC + zlib.crc32(content).to_bytes(4, "little")


def write(
    path: Path, tables: Iterable[pa.Table], about: dict[str, Any] | None, *, own: bool = True
) -> bool:
    """Write tables; without ``about`` as a plain Arrow file. False, and no file, if there are none."""
    rest = iter(tables)
    first = next(rest, None)
    if first is None:
        return False
    schema = first.schema if about is None else _with_about(first.schema, about)

    def fill(handle: int) -> None:
        with os.fdopen(handle, "r+b", closefd=False) as file:
            if about is None:
                writer = pa.ipc.new_file(file, schema, options=OPTIONS)
            else:
                writer = pa.ipc.new_stream(file, schema)
            with writer:
                for table in chain([first], rest):
                    writer.write_table(table.replace_schema_metadata(schema.metadata))
            if about is not None:
                file.flush()
                with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as content:
                    file.write(trailer(content))

    make_file(path, fill, own=own)
    return True


def read(
    path: Path, about: dict[str, Any], *, own: bool = True, trusted: bool = False
) -> pa.Table | None:
    """The rows of a file; None if it is not there, or not whole."""
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
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        mark = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        try:
            trusted = trusted or mark in _whole
            table, said = _parsed(_mapped(path, handle, found.st_size), trusted)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
            if not own and found.st_size and KEY not in file.read(HEAD):
                raise ForeignError(errno.EEXIST, "not a file of ours", os.fspath(path)) from None
            _drop_file(path, found)
            return None
    if said != about:
        return None
    if own:
        with suppress(OSError, NotImplementedError):
            # The least recently used ones go first. What tells files apart stays.
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns), follow_symlinks=False)
    if not trusted:
        _whole.add(mark)
    return table


def _mapped(path: Path, handle: int, size: int) -> pa.Buffer:
    if not size:
        return pa.py_buffer(b"")
    again = f"{HANDLES}/{handle}"
    with pa.memory_map(again if os.path.exists(again) else os.fspath(path)) as source:
        return source.read_buffer()


def _parsed(content: pa.Buffer, trusted: bool) -> tuple[pa.Table, Any]:
    if not trusted:
        view = memoryview(content)
        if bytes(view[-TRAILER:]) != trailer(view[:-TRAILER]):
            raise ValueError("the checksum differs")
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    metadata = dict(table.schema.metadata)
    about = json.loads(metadata.pop(KEY))
    return table.replace_schema_metadata(metadata or None), about


def _drop_file(path: Path, found: os.stat_result) -> None:
    with suppress(OSError):
        if os.path.samestat(found, os.lstat(path)):  # no other one has come in its place
            os.unlink(path)
    warn_once(
        f"{path} was damaged: cut short or changed after it was written. It is removed and made again; "
        "if that happens often, check the disk",
        ("damaged", str(path.parents[1])),
    )


def _with_about(schema: pa.Schema, about: dict[str, Any]) -> pa.Schema:
    return schema.with_metadata({**(schema.metadata or {}), KEY: json.dumps(about)})
