"""A folder that files are put into whole: on this machine, or at any fsspec URL.

Locally a file is made under ``_unfinished``, flushed and renamed. Object stores (S3, GCS, Azure) show an
upload when it is complete; other file systems get the file under another name, and rename it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import local_path
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.sources.files.listing import is_local, open_system
from trainpipes.sources.files.patterns import WORK
from trainpipes.sources.remote.retry import Requests
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
    scheme, _, rest = str(folder).partition("://")
    if not rest or scheme in ("file", "local"):
        path = os.path.abspath(local_path(rest or folder, f"{caller}(folder)"))
        return Place(path, caller, *open_system(path, {}))
    url = str(folder)
    if "::" in url:
        raise ConfigError(
            f"{caller}(folder) must be a path, or the URL of one file system, got {shown(url)}: leave out "
            "what stands before '::'"
        )
    system, path = open_system(url, storage_options or {})
    return Place(url.rstrip("/"), caller, system, path.rstrip("/"))


@dataclass(frozen=True)
class Place:
    root: str
    caller: str
    system: Any = field(repr=False)
    path: str = field(repr=False)

    @property
    def is_local(self) -> bool:
        return is_local(self.system)

    @property
    def is_object_store(self) -> bool:
        protocol = self.system.protocol
        return bool(OBJECT_STORES & ({protocol} if isinstance(protocol, str) else {*protocol}))

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def below(self, name: str) -> Place:
        return replace(self, root=self.at(name), path=f"{self.path}/{name}")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of the files that are there, by name; of a folder -1."""
        self.system.invalidate_cache()
        path = f"{self.path}/{folder}".rstrip("/")
        try:
            found = self._call("ls", path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        there = {entry["name"].rstrip("/"): entry for entry in found}
        return {
            name.rpartition("/")[2]: -1 if one["type"] == "directory" else int(one["size"] or 0)
            for name, one in there.items()
            if name.lstrip("/") != path.lstrip("/")
        }

    def read(self, name: str, start: int, stop: int) -> bytes:
        found: bytes = self._call("cat_file", f"{self.path}/{name}", start=start, end=stop)
        return found

    def blocks(self, name: str) -> Iterator[bytes]:
        self.system.invalidate_cache()
        size = int(self._call("info", f"{self.path}/{name}")["size"])
        for start in range(0, size, BLOCK_BYTES):
            yield self.read(name, start, min(size, start + BLOCK_BYTES))

    def read_all(self, names: list[str]) -> list[bytes]:
        paths = [f"{self.path}/{name}" for name in names]
        at_once = paths and not self.is_local
        found = self.system.cat(paths, on_error="omit") if at_once else {}
        return [found[path] if path in found else self._call("cat_file", path) for path in paths]

    @contextmanager
    def file(self, name: str) -> Iterator[OutputFile]:
        """A file to be written; it gets its name when it is whole."""
        part = f"{WORK}/{name.rpartition('/')[2]}.{secrets.token_hex(4)}.part"
        with self._part(part) as path:
            file = OutputFile(path, self.caller)
            try:
                yield file
                file.sync() if self.is_local else file.flush()
                with writing(self.at(name), self.caller):
                    self._put(path, part, name)
            finally:
                file.close()

    @contextmanager
    def _part(self, name: str) -> Iterator[Path]:
        if not self.is_local:
            with _nameless() as path:
                yield path
            return
        path = Path(self.at(name))
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _send(self, made: Path, path: str) -> None:
        Requests().call(self.system, "put_file", str(made), path, size=made.stat().st_size)

    def _put(self, made: Path, part: str, name: str) -> None:
        path = f"{self.path}/{name}"
        if self.is_local:
            os.replace(made, path)
            _sync(os.path.dirname(path))
        elif self.is_object_store:
            Requests().call(self.system, "put_file", str(made), path, size=made.stat().st_size)
        else:
            self.system.makedirs(f"{self.path}/{WORK}", exist_ok=True)
            Requests().call(
                self.system, "put_file", str(made), f"{self.path}/{part}", size=made.stat().st_size
            )
            self.system.mv(f"{self.path}/{part}", path)

    def remove(self, *names: str, recursive: bool = False) -> None:
        paths = [f"{self.path}/{name}".rstrip("/") for name in names]
        for some in [[path] for path in paths] if self.is_local else [paths] * bool(paths):
            with writing(self.at(names[0]), self.caller), suppress(FileNotFoundError):
                self.system.invalidate_cache()
                self.system.rm(some, recursive=recursive)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock it: at a URL by an object that its holder renews, free after ``LEASE``
        seconds without, or when the process on this machine is gone.
        """
        with self._locked_here() if self.is_local else _Lease(self).held():
            yield

    @contextmanager
    def _locked_here(self) -> Iterator[None]:
        path = Path(self.at(WORK))
        with writing(self.root, self.caller):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
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
            with writing(self.root, self.caller):
                os.makedirs(self.at(WORK), exist_ok=True)
                handle = os.open(self.at(LOCK), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                raise self._taken("another process") from error
            except OSError:
                return handle  # a file system without locks
            if os.fstat(handle).st_nlink:
                return handle
            os.close(handle)  # its holder has removed it meanwhile

    def _taken(self, who: str) -> ConfigError:
        return ConfigError(
            f"{self.caller}(): {who} writes to {self.root}: let one process write, one rank of several, or "
            "give each a folder of its own",
            path=self.root,
        )

    def _call(self, method: str, path: str, **options: Any) -> Any:
        if self.is_local:
            return getattr(self.system, method)(path, **options)
        return Requests().call(self.system, method, path, **options)


class _Lease:
    """Who writes to a URL, as an object there says; its number goes up while its holder lives."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._me: dict[str, Any] = {
            "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8), "beat": 0
        }  # fmt: skip
        self._ended = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        found = self._read()
        if found is not None:
            if not self._is_over(found):
                raise self._taken(found)
            self._remove()
        with writing(self._place.at(LOCK), self._place.caller), suppress(FileExistsError):
            self._write(mode="create")
        found = self._read()
        if found is not None and found["token"] != self._me["token"]:
            raise self._taken(found)
        thread = threading.Thread(target=self._renew, name="trainpipes-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            found = self._read()
            if found is not None and found["token"] == self._me["token"]:
                self._remove()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            self._me["beat"] += 1
            with suppress(Exception):  # the next one may do
                self._write(mode="overwrite")

    def _is_over(self, found: dict[str, Any]) -> bool:
        """Whether its process is gone from this machine, or gives no sign of life: another container's
        process may have the same number.
        """
        if found["host"] == self._me["host"]:
            try:
                os.kill(int(found["pid"]), 0)
            except ProcessLookupError:
                return True
            except PermissionError:  # it is another user's
                pass
        self._ended.wait(LEASE)
        return self._read() in (found, None)

    def _taken(self, found: dict[str, Any]) -> ConfigError:
        return self._place._taken(f"process {found['pid']} of {found['host']}")

    def _read(self) -> dict[str, Any] | None:
        self._place.system.invalidate_cache()
        try:
            found = json.loads(self._place._call("cat_file", f"{self._place.path}/{LOCK}"))
            return found if {"host", "pid", "token"} <= found.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _write(self, mode: str) -> None:
        place, data = self._place, json.dumps(self._me).encode()
        if not place.is_object_store:
            place.system.makedirs(f"{place.path}/{WORK}", exist_ok=True)
        try:
            place.system.pipe_file(f"{place.path}/{LOCK}", data, mode=mode)
        except (TypeError, ValueError, NotImplementedError):  # it knows no modes
            place.system.pipe_file(f"{place.path}/{LOCK}", data)

    def _remove(self) -> None:
        place = self._place
        with suppress(FileNotFoundError):
            place.system.rm_file(f"{place.path}/{LOCK}")
        if not place.is_object_store:
            with suppress(OSError):  # it holds something
                place.system.rmdir(f"{place.path}/{WORK}")


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
