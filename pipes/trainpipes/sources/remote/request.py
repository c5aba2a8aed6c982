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
#: A path, the range of it, and the version and size that the file had when it was listed.
Wanted = tuple[str, tuple[int, int], str, int]


def is_checked(system: Any, version: str) -> bool:
    """Whether each reply is compared with a version, such as ``ETag="5d41"``: on S3 and over HTTP."""
    key = version.partition("=")[0]
    on_s3 = _is(system, "S3FileSystem") and key == "ETag"
    return on_s3 or (_is(system, "HTTPFileSystem") and key in ("ETag", "Last-Modified"))


def begin(system: Any, method: str, *arguments: Any, **options: Any) -> Future[Any]:
    coroutine = _coroutine(system, method)
    if coroutine is None:
        return _in_thread(partial(getattr(system, method), *arguments, **options))
    return asyncio.run_coroutine_threadsafe(coroutine(*arguments, **options), system.loop)


def begin_ranges(system: Any, wanted: Sequence[Wanted], most: int = 1 << 20) -> Future[Any]:
    """Fetch ranges side by side, so many at once; a failure is an error in its place."""
    fetch, many = _coroutine(system, "cat_file"), _coroutine(system, "cat_ranges")
    checked = all(is_checked(system, version) for *_, version, _ in wanted)
    if not checked and (fetch is None or many is None):
        paths, ranges = [path for path, *_ in wanted], [part for _, part, *_ in wanted]
        starts, stops = map(list, zip(*ranges, strict=True))
        return _in_thread(partial(system.cat_ranges, paths, starts, stops, on_error="return"))
    try_once(system)

    async def fetch_all() -> list[Any]:  # cancelled, it cancels them all, and fsspec's does not
        free = asyncio.Semaphore(most)

        async def fetch_one(path: str, part: tuple[int, int], version: str, size: int) -> Any:
            async with free:
                if checked:
                    return await _checked(system, path, part, version, size)
                assert fetch is not None
                return await fetch(path, start=part[0], end=part[1])

        parts = (fetch_one(*one) for one in wanted)
        return await asyncio.gather(*parts, return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(fetch_all(), system.loop)


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
