"""A file that is being written: it knows its size and checksum, and errors name it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from trainpipes.errors import ConfigError


class OutputFile:
    """A file that counts its bytes and keeps their CRC-32. Arrow's writers can write to it."""

    def __init__(self, path: Path, asker: str) -> None:
        self._path = path
        self._asker = asker
        self.size = self.check = 0
        self.closed = False
        with writing(path, asker):
            self._file = open(path, "wb")  # noqa: SIM115  (``close`` does)

    def write(self, data: Any) -> int:
        """Write bytes, or a buffer of them."""
        with writing(self._path, self._asker):
            self._file.write(data)
        self.check = crc32(data, self.check)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        with writing(self._path, self._asker):
            self._file.flush()

    def sync(self) -> None:
        """Flush all of it to the disk."""
        self.flush()
        with writing(self._path, self._asker):
            os.fsync(self._file.fileno())

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Close it. Arrow's writers may have closed it already."""
        self.closed = True
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing(path: Path, asker: str) -> Iterator[None]:
    """Raise ConfigError, with the path, for a disk that is full or a folder that cannot be written to."""
    try:
        yield
    except OSError as error:
        # A file without a name is one of storage at a URL, until it is sent there.
        place = f"a file in {tempfile.gettempdir()}" if str(path).startswith("/proc/") else path
        raise ConfigError(
            f"{asker}(): {place} cannot be written: {error.strerror or error}; free space there or allow "
            "writing, or give another folder",
            path=str(path),
        ) from error
