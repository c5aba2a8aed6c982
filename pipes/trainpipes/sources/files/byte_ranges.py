"""Bytes of a file from a place on, or between two places: on a local disk, or on a server."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.file import RemoteFile
from trainpipes.sources.remote.retry import Requests


def size_of(files: FileList, file: int, requests: Requests) -> int:
    """Bytes of a file."""
    size = int(files.sizes[file])
    if size < 0:
        size = requests.call(files.system(file), "size", files.paths[file]) or 0
    return size


def open_at(files: FileList, file: int, size: int, at: int, requests: Requests) -> Any:
    """A file to be read from a place on, with ``read`` and ``close``."""
    system, path = files.system(file), files.paths[file]
    if is_local(system):
        handle = pa.OSFile(path)
        handle.seek(at)
        return handle
    remote = RemoteFile(system, path, size, requests)
    remote.expect([(at, size)])
    remote.seek(at)
    return remote


def read_bytes(system: Any, path: str, start: int, stop: int, requests: Requests) -> bytes:
    """Bytes ``start`` to ``stop`` of a file, fewer if it ends before."""
    if not is_local(system):
        return requests.ranges(system, path, [start], [stop], stop)[0][0]
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # half the time of open()
    try:
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, stop - start)
    finally:
        os.close(file)


def read_range(
    files: FileList, file: int, size: int, start: int, stop: int, requests: Requests
) -> bytes:
    """Bytes ``start`` to ``stop`` of a file, fewer if it ends before."""
    system, path = files.system(file), files.paths[file]
    if is_local(system):
        return read_bytes(system, path, start, stop, requests)
    return requests.ranges(system, path, [start], [stop], size)[0][0]


def present_size(files: FileList, file: int, requests: Requests) -> int | None:
    """Bytes that a file has now; None where the server does not say.

    Raises:
        FileNotFoundError: it is gone.
        UnreachableError: the server does not answer, or denies access.
    """
    system, path = files.system(file), files.paths[file]
    if is_local(system):
        return os.stat(path).st_size
    system.invalidate_cache()
    found: int | None = requests.call(system, "size", path)
    return found
