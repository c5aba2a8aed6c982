"""Temporary files of a job: in a folder of this machine, or at a URL that several machines reach.

Each is named after a folder and a number, as "runs/00000-0", appears when it is whole, and is replaced by
another one with the same content where two tries make the same. Used by any thread and process; pickles.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa

from trainpipes._internal.clean_errors import clean
from trainpipes.errors import DataError, UnreachableError
from trainpipes.sources.remote.retry import RETRY_SECONDS, Requests
from trainpipes.storage.output_file import writing

#: Rows as they came; sorted hashes; numbers of dropped rows; sorted keys; places by keys; sorted rows; which
#: parts are read, and which of them sorted.
FOLDERS = ("kept", "hashes", "dropped", "keys", "order", "runs", "read", "sorted")
#: Bytes of an array's file before its values, as NumPy writes it for a few dimensions.
HEADER = 128
#: Requests to a server at once.
REQUESTS = 16
#: Bytes that are sent to a server at once.
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class TemporaryFiles:
    """Temporary files.

    Args:
        root: the folder that they are in, a path or a URL.
        asker: for messages.
        options: of the file system, as fsspec takes them.
    """

    root: str
    asker: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether they are on this machine."""
        return "://" not in self.root

    def path(self, name: str) -> str:
        """Where a file is, for messages."""
        return f"{self.root}/{name}"

    def make(self, *folders: str) -> None:
        """Make folders, or those that all jobs have."""
        for name in (folders or FOLDERS) if self.local else ():
            with writing(Path(self.path(name)), self.asker):
                os.makedirs(self.path(name), exist_ok=True)

    def names(self, folder: str) -> set[str]:
        """Names of the files of a folder that are whole."""
        if self.local:
            with suppress(FileNotFoundError):
                there = os.listdir(self.path(folder))
                return {f"{folder}/{name}" for name in there if not name.startswith(".")}
            return set()
        system, root = self._system()
        system.invalidate_cache()
        with suppress(FileNotFoundError):
            there = Requests(RETRY_SECONDS).call(system, "ls", f"{root}/{folder}", detail=False)
            return {f"{folder}/{path.rsplit('/', 1)[1]}" for path in there}
        return set()

    @contextmanager
    def saving(self, name: str) -> Iterator[Any]:
        """A file to be written. It is there when it is whole, and not if something fails."""
        path = Path(self.path(name))
        if self.local:
            part = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
            try:
                with writing(path, self.asker):
                    with open(part, "wb") as file:
                        yield file
                    os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
            return
        system, root = self._system()
        with _writing_remote(self.path(name), self.asker):
            remote = system.open(f"{root}/{name}", "wb", block_size=BLOCK_BYTES)
            try:
                yield remote
                remote.close()
            except BaseException:
                with suppress(Exception):  # what was sent is let go
                    remote.closed = True
                    remote.discard()
                raise

    def save_array(self, name: str, array: Any) -> None:
        """Keep an array."""
        content = io.BytesIO()
        with self.saving(name) as file:
            if self.local:
                np.save(file, array)
            else:
                np.save(content, array)
                file.write(content.getbuffer())

    def save_json(self, name: str, content: Any) -> None:
        """Keep what JSON can hold."""
        with self.saving(name) as file:
            file.write(json.dumps(content).encode())

    def json(self, name: str) -> Any:
        """What was kept so; None if it is not there."""
        try:
            return json.loads(self._whole(name))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, OSError) as error:
            raise self.damaged(name, error) from error

    def array(self, name: str) -> Any:
        """An array; on this machine, mapped into memory."""
        try:
            if self.local:
                return np.load(self.path(name), mmap_mode="r")
            return np.load(io.BytesIO(self._whole(name)))
        except (OSError, ValueError) as error:
            raise self.damaged(name, error) from error

    def arrays(self, names: Sequence[str]) -> Iterator[Any]:
        """Several arrays, in order."""
        return self._several(self.array, names)

    def stretches(
        self,
        names: Sequence[str],
        firsts: Sequence[int],
        stops: Sequence[int],
        kind: Any,
        width: int,
    ) -> Iterator[Any]:
        """Rows of arrays ``[rows, width]``, in order.

        Args:
            names: of the arrays.
            firsts: the first row of each.
            stops: the row after the last.
            kind: type of their values.
            width: values of a row.
        """
        size = np.dtype(kind).itemsize * width
        at = [HEADER + first * size for first in firsts], [HEADER + stop * size for stop in stops]
        for name, content, first, stop in zip(
            names, self.ranges(names, *at), firsts, stops, strict=True
        ):
            if len(content) != (stop - first) * size:
                raise self.damaged(name, "it is too short")
            yield np.frombuffer(content, dtype=kind).reshape(-1, width)

    def ranges(
        self, names: Sequence[str], starts: Sequence[int], stops: Sequence[int]
    ) -> Iterator[bytes]:
        """Bytes of files, in order; fewer where one ends before."""
        return self._several(self._range, list(zip(names, starts, stops, strict=True)))

    def _several(self, get: Any, what: Sequence[Any]) -> Iterator[Any]:
        if self.local or len(what) < 2:
            yield from map(get, what)
            return
        with ThreadPoolExecutor(REQUESTS, "repack-requests") as pool:
            for start in range(0, len(what), REQUESTS):
                yield from pool.map(get, what[start : start + REQUESTS])

    def _range(self, asked: tuple[str, int, int]) -> bytes:
        name, start, stop = asked
        if stop <= start:
            return b""
        try:
            if self.local:
                return _local_range(self.path(name), start, stop)
            system, root = self._system()
            return Requests(RETRY_SECONDS).ranges(system, f"{root}/{name}", [start], [stop], stop)[
                0
            ][0]
        except UnreachableError:
            raise
        except OSError as error:
            raise self.damaged(name, error) from error

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A file that is read from its first byte to its last, as Arrow reads."""
        try:
            if self.local:
                with pa.OSFile(self.path(name), "rb") as file:
                    yield file
                return
            system, root = self._system()
            with (
                system.open(f"{root}/{name}", "rb", block_size=BLOCK_BYTES) as remote,
                pa.PythonFile(remote, mode="r") as file,
            ):
                yield file
        except (OSError, pa.ArrowException) as error:
            raise self.damaged(name, error) from clean(error)

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""
        with suppress(OSError):
            if self.local:
                os.unlink(self.path(name))
                return
            system, root = self._system()
            system.rm_file(f"{root}/{name}")

    def clear(self) -> None:
        """Remove all; what others have put into the folder stays."""
        if self.local:
            for name in FOLDERS:
                shutil.rmtree(self.path(name), ignore_errors=True)
            with suppress(OSError):
                os.rmdir(self.root)
            return
        system, root = self._system()
        system.invalidate_cache()
        for name in FOLDERS:
            with suppress(FileNotFoundError):
                system.rm(f"{root}/{name}", recursive=True)
        with suppress(Exception):  # stores of objects have no folders
            system.rmdir(root)

    def damaged(self, name: str, why: object) -> DataError:
        """What to raise over a file that cannot be read."""
        return damaged(self.asker, f"{self.path(name)} cannot be read ({why})")

    def _whole(self, name: str) -> bytes:
        if self.local:
            return Path(self.path(name)).read_bytes()
        system, root = self._system()
        found: bytes = Requests(RETRY_SECONDS).call(system, "cat_file", f"{root}/{name}")
        return found

    def _system(self) -> tuple[Any, str]:
        """The file system of a URL, which fsspec keeps for the process."""
        system, root = fsspec.url_to_fs(self.root, **self.options)
        return system, root.rstrip("/")


@contextmanager
def _writing_remote(url: str, asker: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnreachableError) as error:
        if isinstance(error, UnreachableError):
            raise
        raise UnreachableError(
            f"{asker}(): {url} cannot be written: {error}; check that the store can be reached and written "
            "to, and call again to go on",
            path=url,
        ) from clean(error)


def _local_range(path: str, start: int, stop: int) -> bytes:
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # half the time of open()
    try:
        if hasattr(os, "pread"):
            return os.pread(file, stop - start, start)
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, stop - start)
    finally:
        os.close(file)


def damaged(asker: str, what: str) -> DataError:
    """What to raise over temporary files that are not what was written."""
    return DataError(
        f"{asker}(): the temporary files are damaged: {what}; begin anew with overwrite=True"
    )
