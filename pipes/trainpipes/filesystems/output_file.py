"""A file that is being written: it knows its size and checksum, and errors name it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from trainpipes.errors import ConfigError, UnreachableError


class TaskStopped(BaseException):
    """Raised in a task that is to end because another one failed."""


_here = threading.local()


def check_stop() -> None:
    """Raise ``TaskStopped`` in a task that is to end."""
    check = getattr(_here, "check", None)
    if check is not None:
        check()


def set_stop_check(check: Callable[[], None] | None) -> None:
    _here.check = check


class OutputFile:
    """A local file open for writing, whose bytes are counted and checksummed."""

    #: Opens a further file of the same task, by what its name ends with.
    beside: Callable[[str], OutputFile]
    closed = False

    def __init__(self, path: Path, caller: str, show: Callable[[int], None] | None) -> None:
        self._path, self._caller, self._show = path, caller, show
        self.size = self.check = 0
        with writing(path, caller):
            self._file = open(path, "wb")  # noqa: SIM115  (``close`` does)

    def advance(self, rows: int) -> None:
        """Show that so many more rows are done."""
        check_stop()
        if self._show is not None:
            self._show(rows)

    def write(self, data: Any) -> int:
        check_stop()
        with writing(self._path, self._caller):
            self._file.write(data)
        count = memoryview(data).nbytes
        self.check, self.size = crc32(data, self.check), self.size + count
        return count

    def write_beginning(self, data: bytes) -> None:
        """Write the first bytes again, of which ``check`` is as it was."""
        with writing(self._path, self._caller):
            self._file.seek(0)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        with writing(self._path, self._caller):
            self._file.flush()

    def sync(self) -> None:
        self.flush()
        with writing(self._path, self._caller):
            os.fsync(self._file.fileno())

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self._file.close()


@contextmanager
def writing(path: str | Path, caller: str) -> Iterator[None]:
    """Raise ConfigError, with the path, for a disk that is full or a folder that cannot be written to."""
    # A file without a name is one of a place at a URL, until it is sent there.
    place = f"a file in {tempfile.gettempdir()}" if str(path).startswith("/proc/") else path
    what = f"{caller}(): {place} cannot be written"
    try:
        yield
    except UnreachableError as error:
        error.message = f"{what}: {error.message.removeprefix(f'{error.path}: ')}"
        raise
    except (OSError, NotImplementedError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise ConfigError(
            f"{what}: {why}; free space there or allow writing, or give another folder",
            path=str(path),
        ) from error
