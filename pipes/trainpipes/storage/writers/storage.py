"""Where a folder of files is written: on this machine, or at a URL of any fsspec file system.

A file is made on the machine that makes it, and put in its place when it is whole. On this machine that is a
rename. A store of objects (S3, GCS, Azure) shows an upload when it is complete and not before, so the file is
sent to its name at once. Other file systems get it under a hidden name, and rename it. Used by any thread and
process; pickles.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainpipes._internal.checks import local_path
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, UnreachableError
from trainpipes.sources.files.listing import open_system
from trainpipes.sources.remote.network_errors import understand
from trainpipes.sources.remote.retry import RETRY_SECONDS, Requests
from trainpipes.storage.output_file import writing

#: What names of files that are being written begin with.
PART = ".part-of-"
#: Protocols of stores whose objects appear when their upload is complete.
OBJECT_STORES = {
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "r2",
}  # fmt: skip
#: Bytes that are read from a file at once.
BLOCK_BYTES = 4 << 20


class Storage(Protocol):
    """A folder that files are written to."""

    @property
    def root(self) -> str:
        """Its absolute path, or its URL."""
        ...

    def at(self, name: str) -> str:
        """Path or URL of a file."""
        ...

    def names(self) -> list[str]:
        """Names of the files that are there."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of the files that are there, by name."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """The content of a file, in blocks. Raises OSError where it is not there."""
        ...

    def making(self, name: str, token: str = "") -> Any:
        """A context that gives the path, on this machine, of a file to be made; it is gone afterwards, unless
        it was put in its place. Two that are made at once have other tokens."""
        ...

    def put(self, made: Path, name: str) -> None:
        """Put a file that is whole in its place. Raises ConfigError, UnreachableError."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file that may be there. Raises ConfigError, UnreachableError."""
        ...


def storage_at(
    folder: Any, asker: str, options: Mapping[str, Any] | None = None, urls: bool = True
) -> Storage:
    """The storage of a path or URL.

    Args:
        folder: as the user gave it.
        asker: who writes.
        options: of the URL's file system.
        urls: whether the asker can write to one.

    Raises:
        ConfigError: it is neither; or fsspec has no such file system.
        MissingExtraError: the package of the file system is not installed.
    """
    if isinstance(folder, str):
        for local in ("file://", "local://"):
            folder = folder.removeprefix(local)
    if not urls or not isinstance(folder, str) or "://" not in folder:
        place = Path(local_path(folder, f"{asker}(folder)")).expanduser().absolute()
        return LocalStorage(str(place), asker)
    if "::" in folder:
        raise ConfigError(
            f"{asker}(folder) is a path, or the URL of one file system, got {shown(folder)}: leave out what "
            "stands before '::'"
        )
    if folder.startswith("memory://"):
        raise ConfigError(
            f"{asker}(folder): {folder} is in the memory of one process, and several write files: give a "
            "path, or a URL of storage"
        )
    system, path = open_system(folder, options or {}, RETRY_SECONDS)
    return RemoteStorage(folder.rstrip("/"), asker, system, path.rstrip("/"))


@dataclass(frozen=True)
class LocalStorage:
    """A folder of this machine, or of one that this machine has mounted."""

    root: str
    asker: str

    def at(self, name: str) -> str:
        return os.path.join(self.root, name)

    def names(self) -> list[str]:
        return os.listdir(self.root)

    def sizes(self) -> dict[str, int]:
        with os.scandir(self.root) as found:
            return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}

    def read(self, name: str) -> Iterator[bytes]:
        with open(self.at(name), "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    @contextmanager
    def making(self, name: str, token: str = "") -> Iterator[Path]:
        path = Path(self.at(f"{PART}{token}{'-' * bool(token)}{name}"))
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def put(self, made: Path, name: str) -> None:
        with writing(Path(self.at(name)), self.asker):
            os.replace(made, self.at(name))
            self._sync()

    def append(self, name: str, data: bytes) -> None:
        """Write to the end of a file, made if it is not there, and flush it to the disk. If something fails,
        the file stays as it was."""
        with writing(Path(self.at(name)), self.asker):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
            file = os.open(self.at(name), flags, 0o666)
            try:
                size = os.fstat(file).st_size
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(file, rest) :]
                    os.fsync(file)
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(file, size)
                    raise
            finally:
                os.close(file)
            if not size:
                self._sync()

    def remove(self, name: str) -> None:
        with writing(Path(self.at(name)), self.asker):
            Path(self.at(name)).unlink(missing_ok=True)

    def _sync(self) -> None:
        with suppress(OSError):  # some file systems cannot for folders
            handle = os.open(self.root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


@dataclass(frozen=True)
class RemoteStorage:
    """A folder at a URL. Requests that fail for a while are made again for two minutes."""

    root: str
    asker: str
    system: Any = field(repr=False)
    path: str = field(repr=False)

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        self.system.invalidate_cache()
        try:
            found = self._call("ls", self.path, detail=True)
        except FileNotFoundError:
            return {}
        there = {entry["name"].rstrip("/"): int(entry["size"] or 0) for entry in found}
        return {path.rpartition("/")[2]: size for path, size in there.items() if path != self.path}

    def read(self, name: str) -> Iterator[bytes]:
        path = f"{self.path}/{name}"
        self.system.invalidate_cache()
        size = int(self._call("info", path)["size"])
        for start in range(0, size, BLOCK_BYTES):
            yield self._call("cat_file", path, start=start, end=min(size, start + BLOCK_BYTES))

    @contextmanager
    def making(self, name: str, token: str = "") -> Iterator[Path]:
        with tempfile.TemporaryFile(prefix="trainpipes-") as file:
            # A file without a name is gone with this process, however that ends.
            path = Path(f"/proc/self/fd/{file.fileno()}")
            if path.exists():
                yield path
                return
        with tempfile.TemporaryDirectory(prefix="trainpipes-") as folder:
            yield Path(folder, name)

    def put(self, made: Path, name: str) -> None:
        protocol = self.system.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        path = f"{self.path}/{name}"
        with self._writing(name):
            try:
                if protocols & OBJECT_STORES:
                    self._send(made, path)
                    return
                self.system.makedirs(self.path, exist_ok=True)
                part = f"{self.path}/{PART}{name}"
                self._send(made, part)
                self.system.mv(part, path)
            except FileNotFoundError as error:
                raise OSError(f"there is no such place ({error})") from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), self._writing(name):
            self._call("rm_file", f"{self.path}/{name}")

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return Requests().call(self.system, method, path, **options)

    def _send(self, made: Path, path: str) -> None:
        Requests().put(self.system, str(made), path)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Raise an error that names the URL for what a server says to a request that writes."""
        try:
            yield
        except FileNotFoundError:
            raise
        except UnreachableError as error:
            cause = error.__cause__
            said = understand(cause).text if isinstance(cause, Exception) else str(error)
            raise UnreachableError(
                f"{self.asker}(): {self.at(name)} cannot be written: {said}; check the address, the network "
                "and the credentials (environment, or storage_options={...}), then call it again to go on "
                "after the files that are whole",
                path=self.at(name), attempts=error.attempts, seconds=error.seconds,
            ) from error  # fmt: skip
        except (OSError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.asker}(): {self.at(name)} cannot be written: {error}; give the URL of a bucket or "
                "folder that is there and that you may write to",
                path=self.at(name),
            ) from error
