"""Requests to file systems on other machines: the one place that waits for servers, and tries again.

What may pass (no answer, a broken connection, half an answer, 408, 429, 5xx) is tried again after
0.25 s, 0.5 s, 1 s, ... up to 8 s, or after what the server asks for. A request that is made again
gives the same bytes or fails, so rows never depend on it. A request is given up when it takes too long,
whatever the file system does: coroutines are cancelled, and other calls run in a thread of their own,
which is left behind.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.clean_errors import clean
from trainpipes._internal.secrets import hidden
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, DataChangedError, UnreachableError, UnreadableError
from trainpipes.sources.remote.network_errors import Failure, understand

log = logging.getLogger("trainpipes")

#: Seconds from the first try of a request to giving up, unless the user says otherwise.
RETRY_SECONDS = 120.0
#: Seconds that a server has to answer one try, at most: a quarter of all. Bytes of the answer for which it
#: has one second more; connections slower than that are taken for broken.
TRY_SECONDS = 30.0
SLOWEST = 64 << 10
#: How many times RETRY_SECONDS listing a folder may take: S3 lists 1,000 files a request. The same for
#: whole files.
LONG = 5
#: Seconds before the second try, doubled with each further one, and at most.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0
#: Seconds until a waiting thread notices that it is to stop.
TICK = 0.1
#: Seconds between two messages that something is tried again, in a process.
QUIET = 10.0

_exiting = threading.Event()  # the interpreter's end does not wait for servers
atexit.register(_exiting.set)
_last_message = -math.inf


class Stopped(Exception):
    """Nobody wants the answer any more."""


class Requests:
    """Requests of a reader or a listing, from any thread.

    Args:
        seconds: how long a request is tried again.
    """

    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the requests that are under way, and refuse others."""
        self._stopped.set()

    def call(self, system: Any, method: str, path: str, **options: Any) -> Any:
        """What a method of a file system gives for a path: ``info``, ``ls``, ``cat_file``.

        Raises:
            FileNotFoundError: the server says that there is no such file.
            UnreachableError: the server does not answer, or refuses to.
        """
        long = method in ("ls", "find", "cat_file")
        found, _ = self._until_done(
            _name(system, path),
            lambda: _begin(system, method, path, **options),
            limit=LONG * self._seconds if long else try_seconds(self._seconds),
            long=long,
            changes=method == "cat_file",
        )
        return found

    def put(self, system: Any, local: str, path: str) -> None:
        """Send a file of this machine.

        Raises:
            FileNotFoundError: the server says that there is no such place.
            UnreachableError: the server does not answer, or refuses to.
        """
        limit = try_seconds(self._seconds) + os.path.getsize(local) / SLOWEST
        self._until_done(
            _name(system, path),
            lambda: _begin(system, "put_file", local, path),
            limit=limit,
            long=True,
        )

    def ranges(
        self, system: Any, path: str, starts: Sequence[int], stops: Sequence[int], size: int
    ) -> tuple[list[bytes], int]:
        """Several ranges of a file, and how many times they were asked for; fewer bytes where it has become
        shorter.

        Args:
            system: the file system.
            path: the file.
            starts: where each range begins.
            stops: where it ends; no more than ``size``.
            size: bytes of the file when it was listed.

        Raises:
            FileNotFoundError: the server says that there is no such file.
            UnreachableError: the server does not answer, or refuses to.
            UnreadableError: the server sends more than it is asked for.
        """
        parts: dict[int, bytes] = {}  # those that have come are not asked for again

        def begin() -> Future[Any]:
            missing = [n for n in range(len(starts)) if n not in parts]
            asked = [[ends[n] for n in missing] for ends in (starts, stops)]
            return _begin_ranges(system, path, *asked)

        def take(found: Sequence[Any]) -> None:
            missing = [n for n in range(len(starts)) if n not in parts]
            failed: list[Exception] = []
            for n, part in zip(missing, found, strict=True):
                if isinstance(part, Exception):
                    failed.append(part)
                elif len(part) < stops[n] - starts[n] and not self._is_shorter(system, path, size):
                    asked = stops[n] - starts[n]
                    failed.append(EOFError(f"{len(part):,} of {asked:,} bytes have come"))
                else:
                    parts[n] = part
            if failed:
                raise next((e for e in failed if understand(e).kind != "passing"), failed[0])

        whole = isinstance(system, CachingFileSystem)  # which fetches more than it is asked for
        amount = (size if whole else sum(stops) - sum(starts)) / SLOWEST
        limit = try_seconds(self._seconds) + amount
        _, tries = self._until_done(_name(system, path), begin, limit, amount, take, changes=True)
        name = _name(system, path)
        return [_checked(parts[n], stops[n] - starts[n], name) for n in range(len(starts))], tries

    def _is_shorter(self, system: Any, path: str, size: int) -> bool:
        """Whether a file has fewer bytes than when it was listed."""
        system.invalidate_cache()
        found = self._result(_begin(system, "size", path), try_seconds(self._seconds))
        return found is not None and found < size

    def _until_done(
        self,
        name: str,
        begin: Callable[[], Future[Any]],
        limit: float,
        more: float = 0.0,
        take: Callable[[Any], Any] = lambda found: found,
        long: bool = False,
        changes: bool = False,
    ) -> tuple[Any, int]:
        """What a request gives, and the number of tries.

        Args:
            name: the file, for messages.
            begin: begins a try.
            limit: seconds for a try.
            more: seconds that all tries may take beyond ``seconds``.
            take: looks at an answer; an error that it raises counts as the server's.
            long: whether a try may take longer than ``seconds``, which then count from the first failure.
            changes: whether the request is for bytes of a file that was listed, and may have changed.
        """
        began = time.monotonic()
        end = math.inf if long else began + self._seconds + more
        tries, pause = 0, FIRST_PAUSE
        while True:
            tries += 1
            try:
                return take(self._result(begin(), min(limit, end - time.monotonic()))), tries
            except (Stopped, UnreachableError):
                raise
            except Exception as error:
                failure, last = understand(error), error
            if failure.kind == "changed" and not changes:
                failure = replace(failure, kind="rejected")
            now = time.monotonic()
            if long:
                end = min(end, now + self._seconds)
            delay = max(pause, failure.wait)
            if failure.kind != "passing" or now + delay >= end:
                last = clean(last)
                final = self._final(name, failure, last, tries, now - began)
                if final is last:
                    raise final
                raise final from last
            self._say(name, failure.text)
            self._sleep(delay)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _result(self, future: Future[Any], seconds: float) -> Any:
        """What comes of a try; cancelled if it takes too long."""
        end = time.monotonic() + seconds
        try:
            while not future.done():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer in {seconds:.3g} s")
                self._check()
                wait([future], min(left, TICK))
            return future.result()
        finally:
            future.cancel()

    def _check(self) -> None:
        if self._stopped.is_set() or _exiting.is_set():
            raise Stopped

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check()
            self._stopped.wait(min(left, TICK))

    def _say(self, name: str, text: str) -> None:
        global _last_message
        if time.monotonic() - _last_message > QUIET:
            _last_message = time.monotonic()
            log.warning("%s", hidden(f"{name}: {text}; tried again for up to {self._seconds:g} s"))

    def _final(
        self, name: str, failure: Failure, error: Exception, tries: int, seconds: float
    ) -> Exception:
        """The error that ends a request."""
        if failure.kind == "missing":
            return (
                error if isinstance(error, FileNotFoundError) else FileNotFoundError(hidden(name))
            )
        if failure.kind == "other":
            return error
        if failure.kind == "changed":
            return DataChangedError(
                f"{name}: the file has changed since the files were listed: the server says so "
                f"({failure.text}); bring the old one back, or build the pipeline again",
                path=name,
            )
        if failure.kind == "access":
            said = (
                f"the server denies access ({failure.text}); renew the credentials (environment, or "
                "storage_options={...}), then go on from the last saved state"
            )
        elif failure.kind == "rejected":
            said = (
                f"the server rejects the request ({failure.text}); check the address and "
                "storage_options={...}, then go on from the last saved state"
            )
        elif failure.wait:
            said = (
                f"the server asks to wait {failure.wait:,.0f} s ({failure.text}), and retry_seconds is "
                f"{self._seconds:g}; go on later from the last saved state, or allow more by "
                "list_files(..., retry_seconds=...)"
            )
        else:
            times = "1 try" if tries == 1 else f"{tries} tries"
            said = (
                f"cannot be reached: {times} in {seconds:.3g} s, the last ended with {failure.text}; "
                "check the network, the address and the server, then go on from the last saved state, or "
                f"try for longer than {self._seconds:g} s by list_files(..., retry_seconds=...)"
            )
        return UnreachableError(f"{name}: {said}", path=name, attempts=tries, seconds=seconds)


def checked_seconds(seconds: Any) -> float:
    """The option ``retry_seconds``."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(
            "list_files(retry_seconds) is how long a request to a server is tried again, a number of "
            f"seconds above 0, got {shown(seconds)}"
        )
    return float(seconds)


def try_seconds(seconds: float) -> float:
    """Seconds for one try of a request that is tried again for so long."""
    return min(TRY_SECONDS, seconds / 4)


def _name(system: Any, path: str) -> str:
    return str(system.unstrip_protocol(path))


def _checked(found: Any, asked: int, name: str) -> bytes:
    if len(found) > asked:
        raise UnreadableError(
            f"{name}: the server sent {len(found):,} bytes where {asked:,} were asked for: it does not know "
            "ranges; fetch the file first, for instance by 'simplecache::' before the URL",
            path=name,
        )
    return bytes(found)


# How a try begins


def _begin(system: Any, method: str, *arguments: Any, **options: Any) -> Future[Any]:
    """Call a method of a file system, which goes on beside this thread."""
    coroutine = _coroutine(system, method)
    if coroutine is None:
        return _in_thread(partial(getattr(system, method), *arguments, **options))
    return asyncio.run_coroutine_threadsafe(coroutine(*arguments, **options), system.loop)


def _begin_ranges(
    system: Any, path: str, starts: Sequence[int], stops: Sequence[int]
) -> Future[Any]:
    """Fetch ranges; an error stands in the place of one that could not be."""
    paths = [path] * len(starts)
    fetch = _coroutine(system, "cat_file")
    if fetch is None or _coroutine(system, "cat_ranges") is None:
        return _in_thread(
            partial(system.cat_ranges, paths, list(starts), list(stops), on_error="return")
        )

    async def fetch_all() -> list[Any]:  # cancelled, it cancels them all, and fsspec's does not
        parts = [fetch(path, start=a, end=b) for a, b in zip(starts, stops, strict=True)]
        return await asyncio.gather(*parts, return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(fetch_all(), system.loop)


def _coroutine(system: Any, method: str) -> Callable[..., Coroutine[Any, Any, Any]] | None:
    """The coroutine function behind a method of a file system, if fsspec made the one of the other."""
    found: Any = getattr(getattr(system, method), "__wrapped__", None)
    if not inspect.iscoroutinefunction(found):
        return None
    return found if inspect.ismethod(found) else partial(found, system)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            found, failed = work(), None
        except BaseException as error:
            found, failed = None, error
        if future.set_running_or_notify_cancel():
            future.set_exception(failed) if failed is not None else future.set_result(found)

    threading.Thread(target=run, name="trainpipes-request", daemon=True).start()
    return future
