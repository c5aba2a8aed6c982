"""One try of a request, and what its failure says about the server.

To give a try up cancels a coroutine, or leaves other calls in their threads. fsspec reports an HTTP 503 as
``FileNotFoundError``, so the whole chain of errors counts.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import http.client
import inspect
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal import locks, messages, pool
from trainpipes.errors import cut, hidden

#: Of a failure.
Kind = Literal["passing", "access", "rejected", "changed", "missing", "other"]
#: What statuses below 500 mean, if not that the request is rejected: 408, 425 and 429 are a timeout, one
#: too early and too many; with 416 the file's end lies before the range, with 412 it has another version.
KINDS: dict[int, Kind] = {
    **dict.fromkeys((408, 425, 429), "passing"), **dict.fromkeys((401, 403, 407), "access"),
    **dict.fromkeys((404, 410), "missing"), **dict.fromkeys((412, 416), "changed"),
}  # fmt: skip
#: Error numbers that may pass. OSErrors with others are about files, or about this machine.
PASSING_NUMBERS = {
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "EINTR", "EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS", "ENOTCONN",
        "EPIPE", "EPROTO", "EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIME", "ETIMEDOUT",
    )
    if hasattr(errno, name)
}  # fmt: skip
#: Built-in errors that may pass; so may an OSError without a number, if it is not one like FileNotFoundError.
PASSING = (TimeoutError, ConnectionError, EOFError, ssl.SSLError, http.client.HTTPException)
#: The same in packages, as "package.class". They stand for their subclasses, too.
PASSING_NAMES = {
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "azure.ServiceRequestError",
    "azure.ServiceResponseError", "azure.IncompleteReadError", "botocore.ChecksumError",
    "botocore.ConnectionError",
    "botocore.FlexibleChecksumError", "botocore.HTTPClientError", "botocore.IncompleteReadError",
    "botocore.ResponseParserError", "botocore.ResponseStreamingError", "google.TransportError",
    "httpx.TransportError", "paramiko.SSHException", "requests.ChunkedEncodingError",
    "requests.ConnectionError", "requests.Timeout", "socket.gaierror", "urllib3.HTTPError",
}  # fmt: skip
#: Credentials that are missing, or cannot be renewed.
ACCESS_NAMES = {
    "azure.ClientAuthenticationError", "azure.CredentialUnavailableError",
    "botocore.CredentialRetrievalError", "botocore.NoCredentialsError", "botocore.NoAuthTokenError",
    "botocore.PartialCredentialsError", "botocore.SSOError", "botocore.TokenRetrievalError",
    "google.DefaultCredentialsError", "google.RefreshError",
}  # fmt: skip
#: Redirections that end nowhere.
REJECTED_NAMES = {"aiohttp.TooManyRedirects", "aiohttp.InvalidURL", "httpx.TooManyRedirects"}
#: Codes of S3 about credentials that come as "400 Bad Request"; and that of a reply without a body, which may
#: be about them. An upload of parts that a try whose answer was lost has ended is begun again.
ACCESS_CODES, NO_CODE = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}, "400"
PASSING_CODES = {"NoSuchUpload"}
#: Attributes that hold a status, of an error or its response.
STATUS_NAMES = ("status", "status_code", "code")
#: What is said of a server that sends a request to itself, again and again.
REDIRECTED = (
    "it redirects without end, as S3 does for a bucket of another region: give "
    'storage_options={"client_kwargs": {"region_name": ...}}'
)
#: Characters shown of an error.
SHOWN = 300


class OtherVersionError(Exception):
    """The object at a URL is not the version that was asked for."""

    status = 412


@dataclass(frozen=True)
class Failure:
    """An error's text and kind: only "passing" is tried again; "other" is not about the server."""

    kind: Kind
    text: str
    wait: float = 0.0
    #: Whether other credentials may do.
    expired: bool = False


def understand(error: Exception, handled: BaseException | None = None) -> Failure:
    """The cause of an error; of all in its chain, a server's status tells most."""
    chain = [(cause, _reply(cause)) for cause in _chain(error, handled)]
    if isinstance(error, FileExistsError):
        return Failure("other", _line(error))
    if any(
        isinstance(cause, RecursionError) for cause, _ in chain
    ):  # botocore's, of 301 without a region
        return Failure("rejected", REDIRECTED)
    expired = any(r.status == 401 or r.code in {*ACCESS_CODES, NO_CODE} for _, r in chain)
    for cause, reply in chain:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure("rejected", _line(cause))
        denied = isinstance(cause, PermissionError) or _named(cause, ACCESS_NAMES)
        if denied or reply.code in ACCESS_CODES:
            return Failure("access", _line(cause), expired=expired)
    for cause, reply in chain:
        passing = isinstance(cause, PASSING) or _named(
            cause, PASSING_NAMES
        )  # some have a status like 400
        if passing or reply.code in PASSING_CODES:
            return Failure("passing", _line(cause))
        if _named(cause, REJECTED_NAMES):
            return Failure("rejected", _line(cause))
        if reply.status:
            kind = "passing" if reply.status >= 500 else KINDS.get(reply.status, "rejected")
            return Failure(kind, _line(cause), _seconds(reply.headers), expired)
    if (passing_error := next((cause for cause, _ in chain if _may_pass(cause)), None)) is not None:
        return Failure("passing", _line(passing_error))
    return Failure("missing" if isinstance(error, FileNotFoundError) else "other", _line(error))


def _chain(error: BaseException | None, end: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and error is not end and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    if error.errno is None:
        return type(error).__module__ != "builtins" or type(error) is OSError
    return error.errno in PASSING_NUMBERS


def _named(error: BaseException, names: set[str]) -> bool:
    classes = type(error).__mro__
    return any(f"{cls.__module__.split('.')[0]}.{cls.__name__}" in names for cls in classes)


class _Reply(NamedTuple):
    """What an HTTP error says: its status, the store's code, and headers."""

    status: int
    code: str
    headers: Any


def _reply(error: BaseException) -> _Reply:
    """A server's answer; status 0 without an answer."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        about, said = response.get("ResponseMetadata") or {}, response.get("Error") or {}
        statuses = [about.get("HTTPStatusCode")]
        code, headers = str(said.get("Code", "")), about.get("HTTPHeaders")
    else:
        statuses, code = [_own_status(error), _own_status(response)], ""
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    good = (n for n in statuses if isinstance(n, int) and 300 <= n < 600)
    return _Reply(next(good, 0), code, headers)


def _own_status(of: Any) -> Any:
    """The first status attribute that it has: of others aiohttp warns."""
    return next((getattr(of, name) for name in STATUS_NAMES if hasattr(of, name)), None)


def _seconds(headers: Any) -> float:
    """How long a server asks to wait by ``Retry-After``, a number or a date."""
    known = headers if isinstance(headers, Mapping) else {}
    reported = str(known.get("Retry-After") or known.get("retry-after"))
    if reported.isdigit():
        return float(reported)
    with suppress(TypeError, ValueError, OverflowError):
        date = email.utils.parsedate_to_datetime(reported)
        return max(0.0, date.timestamp() - time.time())
    return 0.0


def _line(error: BaseException) -> str:
    text = " ".join(hidden(str(error)).split())
    if isinstance(error, messages.OriginalError):
        return text
    text = cut(text, SHOWN)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: Bytes of a file, each from a start to a stop.
Ranges = Sequence[tuple[int, int]]
#: A path, the range of it, and the version and size that the file had when it was listed.
Wanted = tuple[str, tuple[int, int], str, int]


def is_checked(system: Any, version: str) -> bool:
    """Whether each reply is compared with a version, such as ``ETag="5d41"``: on S3 and over HTTP."""
    key = version.partition("=")[0]
    on_s3 = _is(system, "S3FileSystem") and key == "ETag"
    return on_s3 or (_is(system, "HTTPFileSystem") and key in ("ETag", "Last-Modified"))


#: What stands in for a file system whose credentials had expired, in a process.
_renewed: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()
_renewing = threading.Lock()


def current(system: Any) -> Any:
    process, renewed = _renewed.get(system, (0, system))
    return renewed if process in (0, os.getpid()) else system


def renew(system: Any, used: Any) -> bool:
    """Replace the file system that was ``used`` with a new instance, which reads its credentials again."""
    if _is(system, "HTTPFileSystem"):
        return False  # which has those of its address
    with _renewing:
        if current(system) is used:  # else another thread has just done so
            options = {**system.storage_options, "use_listings_cache": False}
            try:
                again = type(system)(*system.storage_args, **options, skip_instance_cache=True)
            except Exception:
                return False  # as there are no credentials: what was denied is said
            try_once(again)
            _renewed[system] = os.getpid(), again
    return True


def begin(system: Any, method: str, *arguments: Any, **options: Any) -> Answer:
    system = current(system)
    coroutine = _coroutine(system, method)
    if coroutine is None:
        return _in_thread(system, partial(getattr(system, method), *arguments, **options))
    return _InLoop(system.loop, partial(coroutine, *arguments, **options))


def begin_ranges(system: Any, wanted: Sequence[Wanted], most: int = 1 << 20) -> Answer:
    """Fetch ranges side by side, so many at once; a failure is an error in its place."""
    system = current(system)
    fetch, many = _coroutine(system, "cat_file"), _coroutine(system, "cat_ranges")
    checked = all(is_checked(system, version) for *_, version, _ in wanted)
    if not checked and (fetch is None or many is None):
        paths, ranges = [path for path, *_ in wanted], [part for _, part, *_ in wanted]
        starts, stops = map(list, zip(*ranges, strict=True))
        ranged = partial(system.cat_ranges, paths, starts, stops, on_error="return")
        return _in_thread(system, ranged)
    try_once(system)

    async def fetch_all() -> list[Any]:  # cancelled, it cancels them all, and fsspec's does not
        free = asyncio.Semaphore(most)

        async def fetch_one(path: str, part: tuple[int, int], version: str, size: int) -> Any:
            async with free:
                if checked:
                    return await _checked(system, path, part, version, size)
                assert fetch is not None
                return await fetch(path, start=part[0], end=part[1])

        parts = (fetch_one(*span) for span in wanted)
        return await asyncio.gather(*parts, return_exceptions=True)

    return _InLoop(system.loop, fetch_all)


def try_once(system: Any) -> None:
    """Turn off a file system's own retries."""
    if _is(system, "S3FileSystem"):
        system.retries = 1


def _is(system: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(system).__mro__)


async def _checked(system: Any, path: str, part: tuple[int, int], version: str, size: int) -> bytes:
    """Bytes of a file that has the version and size that were listed."""
    key, _, listed = version.partition("=")
    about = f"bytes={part[0]}-{part[1] - 1}"
    fetch = _from_s3 if _is(system, "S3FileSystem") else _from_http
    found, now, content_range = await fetch(system, path, about, key, listed)
    if now is not None and now.removeprefix("W/") != listed.removeprefix("W/"):
        raise OtherVersionError(f"its {key} was {listed}, and is {now}")
    whole = (content_range or "").rpartition("/")[2]
    if whole.isdigit() and int(whole) != size:
        raise OtherVersionError(f"it had {size:,} bytes, and has {int(whole):,}")
    content: bytes = found
    return content


async def _from_s3(system: Any, path: str, part: str, key: str, etag: str) -> tuple[Any, ...]:
    bucket, name, of_object = system.split_path(path)
    asked = {"Bucket": bucket, "Key": name, "Range": part, "IfMatch": etag}
    call: Any = _coroutine(system, "call_s3")
    reply = await call("get_object", **asked, **({"VersionId": of_object} if of_object else {}))
    async with reply["Body"] as body:
        return await body.read(), reply.get(key), reply.get("ContentRange")


async def _from_http(system: Any, url: str, part: str, key: str, version: str) -> tuple[Any, ...]:
    options = dict(system.kwargs)
    headers = {"Accept-Encoding": "identity", **options.pop("headers", {}), "Range": part}
    if key == "ETag" and not version.startswith("W/"):  # a weak ETag fits no condition
        headers["If-Match"] = version
    session = await system.set_session()
    async with session.get(system.encode_url(url), headers=headers, **options) as reply:
        reply.raise_for_status()
        return await reply.read(), reply.headers.get(key), reply.headers.get("Content-Range")


def _coroutine(system: Any, method: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    function: Any = getattr(getattr(system, method), "__wrapped__", None)
    if not inspect.iscoroutinefunction(function):
        return None
    return function if inspect.ismethod(function) else partial(function, system)


class Answer(pool.Future):
    """The result of a request, once it is there."""

    def cancel(self) -> None:
        """Nobody waits any more."""


class _InLoop(Answer):
    """The result of a coroutine, which runs in the thread of a file system's loop."""

    def __init__(self, loop: Any, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        super().__init__(lambda: self._task.result())
        self._loop, self._make = loop, make
        self._task: Any = None
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        async def call() -> Any:
            return await self._make()  # which may refuse its arguments

        self._task = self._loop.create_task(call())
        self._task.add_done_callback(lambda _: self.run())

    def cancel(self) -> None:
        if not self.done:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


#: File systems with a single connection or open file, where a thread would get what another one asked for.
ONE_AT_A_TIME = ("FTPFileSystem", "LibArchiveFileSystem", "SFTPFileSystem", "TarFileSystem")
_turns: WeakKeyDictionary[Any, locks.ForkLock] = WeakKeyDictionary()


def _in_turn(turn: locks.ForkLock, work: Callable[[], Any]) -> Any:
    with turn:
        return work()


def _in_thread(system: Any, work: Callable[[], Any]) -> Answer:
    while isinstance(system, CachingFileSystem):
        system = system.fs
    if any(_is(system, name) for name in ONE_AT_A_TIME):
        work = partial(_in_turn, _turns.setdefault(system, locks.ForkLock()), work)
    answer = Answer(work)
    locks.start(threading.Thread(target=answer.run, name="trainpipes-request", daemon=True))
    return answer
