"""One try of a request. To give it up cancels a coroutine, or leaves other calls in their threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from trainpipes.sources.remote.network_errors import OtherVersionError

#: Bytes of a file, each from a start to a stop.
Ranges = Sequence[tuple[int, int]]


def is_checked(system: Any, version: str) -> bool:
    """Whether each reply is compared with a version, such as ``ETag="5d41"``: on S3 and over HTTP."""
    return _reader(system, version) is not None


def begin(system: Any, method: str, *arguments: Any, **options: Any) -> Future[Any]:
    coroutine = _coroutine(system, method)
    if coroutine is None:
        return _in_thread(partial(getattr(system, method), *arguments, **options))
    return asyncio.run_coroutine_threadsafe(coroutine(*arguments, **options), system.loop)


def begin_ranges(system: Any, path: str, ranges: Ranges, version: str, size: int) -> Future[Any]:
    """Fetch ranges side by side; a failure is an error in its place."""
    fetch = _coroutine(system, "cat_file")
    if is_checked(system, version):
        parts = [partial(_checked, system, path, one, version, size) for one in ranges]
    elif fetch is None or _coroutine(system, "cat_ranges") is None:
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        paths = [path] * len(ranges)
        return _in_thread(partial(system.cat_ranges, paths, starts, stops, on_error="return"))
    else:
        parts = [partial(fetch, path, start=a, end=b) for a, b in ranges]
    return _begin_all(system, parts)


def begin_files(system: Any, files: Sequence[tuple[str, str, int]], most: int) -> Future[Any]:
    """Fetch whole files by path, version and size; a failure is an error in its place."""
    parts = [
        partial(_checked, system, path, (0, size), version, size) for path, version, size in files
    ]
    return _begin_all(system, parts, most)


def _begin_all(
    system: Any, parts: Sequence[Callable[[], Coroutine[Any, Any, Any]]], most: int = 1 << 20
) -> Future[Any]:
    try_once(system)

    async def fetch_all() -> list[Any]:  # cancelled, it cancels them all, and fsspec's does not
        free = asyncio.Semaphore(most)

        async def fetch(part: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            async with free:
                return await part()

        return await asyncio.gather(*map(fetch, parts), return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(fetch_all(), system.loop)


def try_once(system: Any) -> None:
    """Turn off a file system's own retries."""
    if _is(system, "S3FileSystem"):
        system.retries = 1


def _is(system: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(system).__mro__)


def _reader(system: Any, version: str) -> Any:
    key = version.partition("=")[0]
    if _is(system, "S3FileSystem") and key == "ETag":
        return _from_s3
    if _is(system, "HTTPFileSystem") and key in ("ETag", "Last-Modified"):
        return _from_http
    return None


async def _checked(system: Any, path: str, part: tuple[int, int], version: str, size: int) -> bytes:
    """Bytes of a file that has the version and size that were listed."""
    key, _, listed = version.partition("=")
    about = f"bytes={part[0]}-{part[1] - 1}"
    found, now, content_range = await _reader(system, version)(system, path, about, key, listed)
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
    if key == "ETag" and not version.startswith("W/"):  # a weak one fits no condition
        headers["If-Match"] = version
    session = await system.set_session()
    async with session.get(system.encode_url(url), headers=headers, **options) as reply:
        reply.raise_for_status()
        return await reply.read(), reply.headers.get(key), reply.headers.get("Content-Range")


def _coroutine(system: Any, method: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    found: Any = getattr(getattr(system, method), "__wrapped__", None)
    if not inspect.iscoroutinefunction(found):
        return None
    return found if inspect.ismethod(found) else partial(found, system)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="trainpipes-request", daemon=True).start()
    return future
