"""Arrow files that are whole, or as good as not there.

A file is written beside its place and renamed, and carries what it is about and a checksum. Read, it
is memory-mapped; what was cut short, damaged, or is another file is taken for missing.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from trainpipes.cache import PART
from trainpipes.runtime.caching.file_lock import in_folder

__all__ = ["pack", "put", "read"]

#: The key of our entry in a file's schema, and what in it the checksum follows.
KEY, MARK = b"trainpipes", b"trainpipes-crc32:"
BLANK = b"00000000"


def pack(table: pa.Table, about: dict[str, Any]) -> bytearray:
    """The bytes of an Arrow IPC file with these rows.

    Args:
        table: the rows; written in one piece.
        about: what the file is, of JSON types; ``read`` wants the same.
    """
    seal = json.dumps({"about": about, "sum": (MARK + BLANK).decode()})
    table = table.combine_chunks()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: seal})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content = bytearray(sink.getvalue())
    digits = b"%08x" % zlib.crc32(content)
    for place in _places(memoryview(content)):
        content[place : place + len(BLANK)] = digits
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


def put(path: Path, content: bytes | bytearray) -> None:
    """Write a file beside its place and rename it there; of two writers the last one wins.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    in_folder(path, lambda: _put(path, content))


def _put(path: Path, content: bytes | bytearray) -> None:
    beside = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{PART}")
    try:
        with open(beside, "xb", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view) or 0 :]
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def read(path: Path, about: dict[str, Any], *, trusted: bool = False) -> pa.Table | None:
    """The rows of a file, which lie in it; None if there is no such file, or it is not whole.

    Costs a pass over the file, 1 to 3 GB/s, none if ``trusted``.

    Args:
        path: the file.
        about: what it must be.
        trusted: leave out the checksum: the same file was read before.
    """
    try:
        with pa.memory_map(os.fspath(path)) as source:
            content = source.read_buffer()
        if not trusted and not _is_whole(memoryview(content)):
            return None
        with pa.ipc.open_file(content) as reader:
            table = reader.read_all()
        metadata = dict(table.schema.metadata)
        if json.loads(metadata.pop(KEY))["about"] != about:
            return None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
    return table.replace_schema_metadata(metadata or None)
