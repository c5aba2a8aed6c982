"""A folder that files are put into whole: on this machine, or at a URL of any fsspec file system.

Locally a file is made under ``_unfinished``, flushed and renamed. Stores of objects (S3, GCS, Azure) show
an upload when it is complete; other file systems get the file under another name, and rename it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import local_path
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, UnreachableError
from trainpipes.sources.files.listing import open_system
from trainpipes.sources.files.patterns import WORK
from trainpipes.sources.remote.network_errors import understand
from trainpipes.sources.remote.retry import RETRY_SECONDS, Requests
from trainpipes.storage.output_file import OutputFile, writing

#: The lock in the folder of what is not finished.
LOCK = f"{WORK}/lock"
#: Protocols of stores whose objects appear when their upload is complete.
OBJECT_STORES = {
    "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "r2",
}  # fmt: skip
#: Bytes that are read from a file at once.
BLOCK_BYTES = 4 << 20
#: Seconds between two signs of life of who writes to a URL, and how long one without them is waited for.
BEAT, LEASE = 5.0, 15.0


def place_at(
    folder: str | os.PathLike[str], caller: str, storage_options: Mapping[str, Any] | None = None
) -> Place:
    if "://" not in str(folder) or str(folder).startswith(("file://", "local://")):
        path = str(folder).partition("://")[2] if "://" in str(folder) else folder
        return LocalPlace(os.path.abspath(local_path(path, f"{caller}(folder)")), caller)
    url = str(folder)
    if "::" in url:
        raise ConfigError(
            f"{caller}(folder) must be a path, or the URL of one file system, got {shown(url)}: leave out "
            "what stands before '::'"
        )
    system, path = open_system(url, storage_options or {}, RETRY_SECONDS)
    return RemotePlace(url.rstrip("/"), caller, system, path.rstrip("/"))


@dataclass(frozen=True)
class LocalPlace:
    root: str
    caller: str

    def at(self, name: str) -> str:
        return os.path.join(self.root, name)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the files that are there, by name; of a folder -1."""
        try:
            with os.scandir(self.at(folder)) as found:
                return {one.name: one.stat().st_size if one.is_file() else -1 for one in found}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def blocks(self, name: str) -> Iterator[bytes]:
        with open(self.at(name), "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def read_all(self, names: list[str]) -> list[bytes]:
        return [Path(self.at(name)).read_bytes() for name in names]

    @contextmanager
    def file(self, name: str) -> Iterator[OutputFile]:
        """A file to be written; it gets its name when it is whole, and is gone if something fails."""
        path = Path(self.at(f"{WORK}/{Path(name).name}.{secrets.token_hex(4)}.part"))
        file = OutputFile(path, self.caller)
        try:
            yield file
            file.sync()
            file.close()
            with writing(Path(self.at(name)), self.caller):
                os.replace(path, self.at(name))
                _sync(os.path.dirname(self.at(name)))
        finally:
            file.close()
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def remove(self, *names: str) -> None:
        for name in names:
            with writing(Path(self.at(name)), self.caller):
                Path(self.at(name)).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        with writing(Path(self.at(name)), self.caller):
            shutil.rmtree(self.at(name))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep others from writing to it."""
        path = Path(self.at(WORK))
        with writing(Path(self.root), self.caller):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
        handle = self._lock()
        try:
            yield
        finally:
            if not self.sizes(WORK).keys() - {Path(LOCK).name}:
                with suppress(OSError):  # they hold something
                    os.unlink(self.at(LOCK))
                    for folder in missing or [path]:
                        folder.rmdir()
            os.close(handle)

    def _lock(self) -> int:
        while True:
            with writing(Path(self.root), self.caller):
                os.makedirs(self.at(WORK), exist_ok=True)
                handle = os.open(self.at(LOCK), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                raise _taken(self, "another process") from error
            except (ImportError, OSError):
                return handle  # a file system without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(self.at(LOCK))):
                    return handle
            os.close(handle)  # its holder has removed it meanwhile


@dataclass(frozen=True)
class RemotePlace:
    root: str
    caller: str
    system: Any = field(repr=False)
    path: str = field(repr=False)

    @property
    def is_object_store(self) -> bool:
        protocol = self.system.protocol
        return bool(OBJECT_STORES & ({protocol} if isinstance(protocol, str) else {*protocol}))

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        self.system.invalidate_cache()
        path = f"{self.path}/{folder}".rstrip("/")
        try:
            found = self._call("ls", path, detail=True)
        except FileNotFoundError:
            return {}
        there = {entry["name"].rstrip("/"): entry for entry in found}
        return {
            name.rpartition("/")[2]: int(one["size"] or 0) if one["type"] == "file" else -1
            for name, one in there.items()
            if name.lstrip("/") != path.lstrip("/")
        }

    def blocks(self, name: str) -> Iterator[bytes]:
        path = f"{self.path}/{name}"
        self.system.invalidate_cache()
        size = int(self._call("info", path)["size"])
        for start in range(0, size, BLOCK_BYTES):
            yield self._call("cat_file", path, start=start, end=min(size, start + BLOCK_BYTES))

    def read_all(self, names: list[str]) -> list[bytes]:
        paths = [f"{self.path}/{name}" for name in names]
        found = self.system.cat(paths, on_error="omit") if paths else {}
        return [found[path] if path in found else self._call("cat_file", path) for path in paths]

    @contextmanager
    def file(self, name: str) -> Iterator[OutputFile]:
        with _nameless() as path:
            file = OutputFile(path, self.caller)
            try:
                yield file
                file.flush()
                self._put(path, name)
            finally:
                file.close()

    def _put(self, made: Path, name: str) -> None:
        path = f"{self.path}/{name}"
        with self._writing(name):
            try:
                if self.is_object_store:
                    Requests().put(self.system, str(made), path)
                    return
                self.system.makedirs(f"{self.path}/{WORK}", exist_ok=True)
                token = secrets.token_hex(4)
                part = f"{self.path}/{WORK}/{name.rpartition('/')[2]}.{token}.part"
                Requests().put(self.system, str(made), part)
                self.system.mv(part, path)
            except FileNotFoundError as error:
                raise OSError(f"there is no such place ({error})") from error

    def remove(self, *names: str) -> None:
        self._remove([f"{self.path}/{name}" for name in names])

    def remove_folder(self, name: str) -> None:
        self._remove([f"{self.path}/{name}"], recursive=True)

    def _remove(self, paths: list[str], recursive: bool = False) -> None:
        if paths:
            with suppress(FileNotFoundError), self._writing(paths[0][len(self.path) + 1 :]):
                self.system.invalidate_cache()
                self.system.rm(paths, recursive=recursive)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing to it, by an object that only one can create, where the store can do so
        (S3, GCS, Azure). Its holder renews it; it is free after ``LEASE`` seconds without, or when the
        process on this machine is gone.
        """
        lease = _Lease(self)
        lease.take()
        try:
            yield
        finally:
            lease.end()

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return Requests().call(self.system, method, path, **options)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except UnreachableError as error:
            cause = error.__cause__
            said = understand(cause).text if isinstance(cause, Exception) else str(error)
            raise UnreachableError(
                f"{self.caller}(): {self.at(name)} cannot be written: {said}; check the address, the network "
                "and the credentials (environment, or storage_options={...}), then call it again to go on "
                "after the files that are whole",
                path=self.at(name), attempts=error.attempts, seconds=error.seconds,
            ) from error  # fmt: skip
        except (OSError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.caller}(): {self.at(name)} cannot be written: {error}; give the URL of a bucket or "
                "folder that is there and that you may write to",
                path=self.at(name),
            ) from error


Place = LocalPlace | RemotePlace


class _Lease:
    """Who writes to a URL, as an object there says, whose number goes up as long as its holder lives."""

    def __init__(self, place: RemotePlace) -> None:
        self._place = place
        self._path = f"{place.path}/{LOCK}"
        self._me: dict[str, Any] = {
            "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8), "beat": 0
        }  # fmt: skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trainpipes-lease", daemon=True)

    def take(self) -> None:
        found = self._read()
        if found is not None:
            if not self._is_dead(found):
                self._refuse_living(found)
            self._remove()
        with self._place._writing(LOCK), suppress(FileExistsError):
            try:
                self._write(mode="create")
            except FileNotFoundError as error:
                raise OSError(f"there is no such place ({error})") from error
        found = self._read()
        if found is not None and found["token"] != self._me["token"]:
            raise _taken(self._place, _said(found))
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        found = self._read()
        if found is not None and found["token"] == self._me["token"]:
            self._remove()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            self._me["beat"] += 1
            with suppress(Exception):  # the next one may do
                self._write(mode="overwrite")

    def _is_dead(self, found: dict[str, Any]) -> bool:
        """Whether the process that it names was one of this machine, and is gone."""
        if found["host"] != self._me["host"]:
            return False
        try:
            os.kill(int(found["pid"]), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    def _refuse_living(self, found: dict[str, Any]) -> None:
        if found["host"] != self._me["host"]:
            self._ended.wait(LEASE)
            if self._read() in (found, None):
                return
        raise _taken(self._place, _said(found))

    def _read(self) -> dict[str, Any] | None:
        self._place.system.invalidate_cache()
        try:
            found = json.loads(self._place._call("cat_file", self._path))
            return found if {"host", "pid", "token"} <= found.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _write(self, mode: str) -> None:
        system, data = self._place.system, json.dumps(self._me).encode()
        if not self._place.is_object_store:
            system.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        try:
            system.pipe_file(self._path, data, mode=mode)
        except (TypeError, ValueError, NotImplementedError):  # it knows no modes
            system.pipe_file(self._path, data)

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            self._place.system.rm_file(self._path)
        if not self._place.is_object_store:
            with suppress(OSError):  # it holds something
                self._place.system.rmdir(self._path.rpartition("/")[0])


def _taken(place: Place, who: str) -> ConfigError:
    return ConfigError(
        f"{place.caller}(): {who} writes to {place.root}: let one process write, one rank of several, or "
        "give each a folder of its own",
        path=place.root,
    )


def _said(found: dict[str, Any]) -> str:
    return f"process {found['pid']} of {found['host']}"


@contextmanager
def _nameless() -> Iterator[Path]:
    with tempfile.TemporaryFile(prefix="trainpipes-") as file:
        path = Path(f"/proc/self/fd/{file.fileno()}")
        if path.exists():
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="trainpipes-") as folder:
        yield Path(folder, "part")


def _sync(folder: str) -> None:
    with suppress(OSError):  # some file systems cannot for folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
