"""Storage that takes its time: the files of this machine, 20 ms a read call.

``slow:///folder/file`` is ``/folder/file``. Each call of ``cat_file``, each ``cat_ranges`` (whose ranges go
out together, as those of s3fs do) and each fetch of an opened file waits first.
"""

from __future__ import annotations

import os
import time
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

__all__ = ["SlowFileSystem", "register"]

SECONDS = 0.020


def register() -> None:
    """Let fsspec know ``slow://``."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)


class SlowFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


class SlowFileSystem(AbstractFileSystem):
    """This machine's files, each read call after 20 ms."""

    protocol = "slow"
    cachable = False
    root_marker = "/"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        names = sorted(os.path.join(path, name) for name in os.listdir(path))
        return [self.info(name) for name in names] if detail else names

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": found.st_size, "type": kind, "mtime": found.st_mtime}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        time.sleep(SECONDS)
        return self._read(path, start, end)

    def cat_ranges(
        self,
        paths: Any,
        starts: Any,
        ends: Any,
        max_gap: Any = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[bytes]:
        time.sleep(SECONDS)
        return [self._read(*part) for part in zip(paths, starts, ends, strict=True)]

    def _read(self, path: str, start: int | None, end: int | None) -> bytes:
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> SlowFile:
        return SlowFile(self, path, mode, block_size or "default", size=self.info(path)["size"])
