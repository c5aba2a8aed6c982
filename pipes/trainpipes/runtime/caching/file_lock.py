"""A lock that processes and threads of one machine share by a file, and that dies with its holder."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainpipes.runtime.caching.own_file import in_folder, open_file

try:
    import fcntl
except ImportError:  # not on this system: all may work at the same time
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileLock"]


class FileLock:
    """Keeps others from making what this process makes.

    It only saves work: nothing depends on it, so that a file system without locks grants it to all.

    Args:
        path: a file of its own; made, and removed at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._handle: int | None = None

    def take(self) -> bool:
        """Take it if nobody has it.

        Raises:
            OSError: the folder cannot be written, or is another user's.
        """
        opened = partial(open_file, self._path, flags=os.O_RDWR | os.O_CREAT)
        handle = in_folder(self._path, opened)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._still_there(handle):  # its holder was done, and removed it
                    os.close(handle)
                    return False
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:
            pass
        self._handle = handle
        return True

    def _still_there(self, handle: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        return False

    def leave(self) -> None:
        """Let the next one have it."""
        if self._handle is not None:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._handle)
            self._handle = None
