"""The file system of a path or URL; and a file that a row names: opened here, or read from a server in
ranges.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import fsspec
from fsspec.core import strip_protocol
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from trainpipes._internal.checks import pip_install
from trainpipes._internal.messages import clean, nearest
from trainpipes.errors import ConfigError, MissingExtraError, MissingFilesError, UnreadableError
from trainpipes.filesystems.request import try_once
from trainpipes.filesystems.retry import NORMAL, Requests, Retry, cure_of

#: Connections to a store, at most.
CONNECTIONS = 64


def is_local(system: Any) -> bool:
    return isinstance(system, LocalFileSystem)


@cache
def _of_this_machine() -> LocalFileSystem:
    return LocalFileSystem()


def listed_as(url: str) -> str:
    """A URL; of this machine the whole path, by which its files are listed.

    >>> listed_as("file:///data/rows"), listed_as("/data/../rows/"), listed_as("s3://bucket/rows")
    ('/data/rows', '/rows', 's3://bucket/rows')
    """
    if "://" not in url:
        return os.path.abspath(os.path.expanduser(url))
    return _path_of(url) if url.startswith(_HERE) else url


_HERE = ("file://", "local://")


def _path_of(url: str) -> str:
    path = str(strip_protocol(url))
    unquoted = unquote(path)  # as Path.as_uri() writes it
    return unquoted if os.path.exists(unquoted) and not os.path.lexists(path) else path


def open_system(url: str, options: Mapping[str, Any], retry: Retry = NORMAL) -> tuple[Any, str]:
    # What begins with a slash has no protocol.
    if url[:1] == "/" or not ("::" in url or "://" in url) or os.path.exists(url):
        return _of_this_machine(), os.path.abspath(os.path.expanduser(url))
    if url.startswith(_HERE) and os.path.exists(path := _path_of(url)):
        return _of_this_machine(), path
    try:
        if "::" not in url and url.startswith(("http://", "https://")):
            client = {"raise_for_status": _refuse_redirection}
            options = {**options, "client_kwargs": client | (options.get("client_kwargs") or {})}
        elif "::" not in url and url.startswith(("s3://", "s3a://")):
            # botocore does not try again by itself, and has a connection for each part.
            config: dict[str, Any] = {"retries": {"total_max_attempts": 1}}
            config["max_pool_connections"] = CONNECTIONS
            config |= {"read_timeout": retry.timeout} if retry.timeout else {}
            options = {**options, "config_kwargs": config | (options.get("config_kwargs") or {})}
        system, path = fsspec.url_to_fs(url, **options)
        try_once(system)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "").split(".")[0]
        said = pip_install(package) if package else str(error)
        raise MissingExtraError(
            f"{url} needs the package {package or '?'}, which is not installed: {said}", path=url
        ) from clean(error)
    except (TypeError, ValueError) as error:
        protocol = url.split("://")[0].split("::")[-1]
        said = f"{url!r} cannot be opened with storage_options {sorted(options)}: {error}"
        if protocol not in known_implementations and protocol not in fsspec.available_protocols():
            hint = nearest(protocol, sorted(known_implementations))
            said = (
                f"{url!r}: fsspec has no file system for the protocol {protocol!r}{hint}; one of your own is "
                "known once it is registered by fsspec.register_implementation()"
            )
        raise ConfigError(said) from clean(error)
    except FileNotFoundError as error:
        said = f"{url!r} cannot be opened: there is no file {error}; check the address"
        raise MissingFilesError(said, path=url) from clean(error)
    except Exception as error:  # of any library, as for an archive that is none
        way = "is the address right, and are credentials given (environment, or storage_options={...})?"
        said = f"{url!r} cannot be opened: {type(error).__name__}: {error}; {way}"
        raise UnreadableError(said, path=url) from clean(error)
    if type(system) is CachingFileSystem:
        raise ConfigError(
            f"{url!r}: once a request fails, 'blockcache::' returns zeros in place of the data; take "
            "'simplecache::', or .cache() after read_parquet()"
        )
    system.invalidate_cache()  # an earlier listing may be out of date
    return system, path.rstrip("/") or path


async def _refuse_redirection(response: Any) -> None:
    if 300 <= response.status < 400:  # to nowhere, else it was followed
        import aiohttp

        said = f"{response.reason}, and it does not say where to"
        about = response.request_info, response.history
        raise aiohttp.ClientResponseError(*about, status=response.status, message=said)


class FileByParts(io.RawIOBase):
    """A file of ``size`` bytes for libraries that read files: ``_part`` gives the bytes at a place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._position = size, 0

    @abstractmethod
    def _part(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes from ``start`` on, at most up to ``stop``."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._next(size))

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = memoryview(data).cast("B")  # as it is in all buffers but Arrow's
        return len(data)

    def _next(self, size: int | None) -> bytes | memoryview:
        start, stop = self._position, self._size
        if size is not None and size >= 0:
            stop = min(stop, start + size)
        part = self._part(start, stop) if start < stop else b""
        self._position += len(part)
        return part


#: Bytes that are fetched at once, at least, and at most where a file is read from front to back.
BLOCK, MOST = 16 << 10, 4 << 20
#: Bytes of a file that stay in memory: of libraries that go back and forth in it.
HELD = 64 << 20


class RangedFile(FileByParts):
    """The bytes of a file on a server, in blocks; those that were read last stay in memory.

    Libraries in C drop the error of a read: it gives no more bytes from then on, and ``check`` raises it.
    """

    def __init__(self, system: Any, path: str, requests: Requests, size: int) -> None:
        self._system, self._path, self._requests = system, path, requests
        super().__init__(size)
        self._blocks: dict[int, bytes] = {}  # by number, those that were read last at the end
        self._follows, self._ahead = (
            0,
            1,
        )  # the block after those fetched, and how many are fetched next
        self._error: BaseException | None = None

    def _part(self, start: int, stop: int) -> bytes:
        if self._error is not None:
            return b""
        first, last = start // BLOCK, (stop - 1) // BLOCK
        try:
            self._fetch([n for n in range(first, last + 1) if n not in self._blocks])
        except BaseException as error:
            self._error = error
            return b""
        for number in range(first, last + 1):
            self._blocks[number] = self._blocks.pop(number)
        whole = b"".join(self._blocks[n] for n in range(first, last + 1))
        while len(self._blocks) > max(1, HELD // BLOCK):
            del self._blocks[next(iter(self._blocks))]
        return whole[start - first * BLOCK : stop - first * BLOCK]

    def _fetch(self, missing: list[int]) -> None:
        if not missing:
            return
        follows = missing[0] == self._follows
        self._ahead = min(2 * self._ahead, MOST // BLOCK) if follows else 1
        stop = max(missing[-1] + 1, missing[0] + self._ahead)
        span = missing[0] * BLOCK, min(stop * BLOCK, self._size)
        ((data,), _) = self._requests.ranges(self._system, self._path, [span], self._size)
        for at in range(0, len(data), BLOCK):
            self._blocks[missing[0] + at // BLOCK] = data[at : at + BLOCK]
        self._follows = stop

    def check(self) -> None:
        """Raise the error of a read."""
        if self._error is not None:
            raise self._error


def open_named(
    name: str,
    folder: str | None = None,
    options: Mapping[str, Any] | None = None,
    retry: Retry = NORMAL,
    whole: bool = True,
    caller: str = "list_files",
) -> BinaryIO:
    """A file by its path or URL; a file on a server is fetched at once if the ``whole`` is needed. ``caller``
    has the option ``retry``.

    Raises:
        OSError: it is not there, or is no file.
    """
    if folder is not None and "://" not in name and not os.path.isabs(name):
        name = f"{folder.rstrip('/')}/{name}"
    system, path = open_system(name, options or {}, retry)
    if not is_local(system):
        requests = Requests(retry, cure_of(caller))
        size = None if whole else requests.call(system, "size", path)
        if size is None:  # some servers do not say
            return io.BytesIO(requests.call(system, "cat_file", path))
        return cast(BinaryIO, RangedFile(system, path, requests, int(size)))
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        if getattr(error, "errno", errno.ENAMETOOLONG) != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, "it is no path", path) from None
    if not stat.S_ISREG(mode):
        raise FileNotFoundError(errno.ENOENT, "it is no file", path)
    return Path(path).open("rb")
