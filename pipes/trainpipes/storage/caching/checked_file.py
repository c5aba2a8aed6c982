"""Files with a checksum, memory-mapped. Damaged files are removed, with one warning; another user's are not
used.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from trainpipes._internal.messages import warn_once
from trainpipes.storage.caching.private_file import NotOwnError, make_file, open_file

T = TypeVar("T")

#: The key, in a table's schema, of what it is about; and the bytes of a file in which ours have it.
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


def write(
    path: Path, tables: Iterable[pa.Table], about: dict[str, Any] | None, *, own: bool = True
) -> bool:
    """Write tables; without ``about`` as a plain Arrow file. False, and no file, if there are none."""
    rest = iter(tables)
    first = next(rest, None)
    if first is not None:
        make_file(path, partial(fill, about, chain([first], rest), first.schema), own=own)
    return first is not None


def fill(
    about: dict[str, Any] | None, tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO
) -> None:
    if about is None:
        opened = pa.ipc.new_file(file, schema, options=OPTIONS)
    else:
        schema = schema.with_metadata({**(schema.metadata or {}), KEY: json.dumps(about)})
        opened = pa.ipc.new_stream(file, schema)
    with opened as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata))
    if about is not None:
        add_checksum(file)


def add_checksum(file: BinaryIO) -> None:
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        file.write(_trailer(content))


def _trailer(content: memoryview | mmap.mmap) -> bytes:
    return MAGIC + zlib.crc32(content).to_bytes(4, "little")


def read(
    path: Path, about: dict[str, Any], *, own: bool = True, trusted: bool = False
) -> pa.Table | None:
    """The rows of a file; None if it is not there, not whole, or about something else."""
    return read_content(path, partial(_table, about), own=own, trusted=trusted)


def read_content(
    path: Path, parse: Callable[[pa.Buffer], T | None], *, own: bool = True, trusted: bool = False
) -> T | None:
    """What ``parse`` makes of a file's content; None if it is not there, or not whole."""
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
        about = os.fstat(handle)
        mark = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        try:
            content = _mapped(path, handle)
            if not trusted and mark not in _whole:
                view = memoryview(content)
                if bytes(view[-TRAILER:]) != _trailer(view[:-TRAILER]):
                    raise ValueError("the checksum differs")
            found = parse(content.slice(0, content.size - TRAILER))
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
            if not own and about.st_size and KEY not in file.read(HEAD):
                raise ForeignError(errno.EEXIST, "not a file of ours", os.fspath(path)) from None
            _drop_file(path, about)
            return None
    if found is not None and own:
        with suppress(OSError, NotImplementedError):
            # The least recently used ones go first. What tells files apart stays.
            os.utime(path, ns=(time.time_ns(), about.st_mtime_ns), follow_symlinks=False)
    if not trusted:
        _whole.add(mark)
    return found


def _mapped(path: Path, handle: int) -> pa.Buffer:
    again = f"{HANDLES}/{handle}"
    with pa.memory_map(again if os.path.exists(again) else os.fspath(path)) as source:
        return source.read_buffer()


def _table(about: dict[str, Any], content: pa.Buffer) -> pa.Table | None:
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    metadata = dict(table.schema.metadata)
    if json.loads(metadata.pop(KEY)) != about:
        return None
    return table.replace_schema_metadata(metadata or None)


def _drop_file(path: Path, found: os.stat_result) -> None:
    with suppress(OSError):
        if os.path.samestat(found, os.lstat(path)):  # no other one has come in its place
            os.unlink(path)
    warn_once(
        f"{path} was damaged: cut short or changed after it was written. It is removed and made again; "
        "if that happens often, check the disk",
        ("damaged", str(path.parents[1])),
    )
