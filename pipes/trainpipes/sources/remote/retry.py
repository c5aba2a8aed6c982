"""Requests to servers, tried again. A second try gives the same bytes or fails."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.clean_errors import clean
from trainpipes._internal.secrets import hidden
from trainpipes._internal.text import shown
from trainpipes.engine.pool import waits
from trainpipes.errors import ConfigError, DataChangedError, UnreachableError, UnreadableError
from trainpipes.sources.remote.network_errors import Failure, OtherVersionError, understand
from trainpipes.sources.remote.request import begin, begin_files, begin_ranges

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


@dataclass(frozen=True)
class Retry:
    """How long requests to servers are tried again.

    Failures that may pass (no answer, a broken connection, 408, 429, 5xx) are tried again after 0.25, 0.5,
    ... up to 8 s, or as ``Retry-After`` says. Denied access and missing files are errors at once.

    Args:
        deadline: seconds from a request's first try to an ``UnreachableError``, more than 0. A single try has
            a quarter of them, at most 30 s, and a second more per 64 KiB.

    >>> import trainpipes as tp
    >>> tp.list_files("s3://bucket/rows", retry=tp.Retry(deadline=600))
    list_files('s3://bucket/rows', retry=Retry(deadline=600.0))
    """

    deadline: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        seconds = self.deadline
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(
                f"Retry(deadline) must be a number of seconds above 0, got {shown(seconds)}"
            )
        object.__setattr__(self, "deadline", float(seconds))

    @staticmethod
    def of(value: Any, option: str) -> Retry:
        """The value of an option: a ``Retry``, or a dict of its arguments as in a config."""
        if isinstance(value, Mapping) and value.keys() <= {"deadline"}:
            value = Retry(**value)
        if not isinstance(value, Retry):
            raise ConfigError(f"{option} must be a trainpipes.Retry, got {shown(value)}")
        return value


class Stopped(Exception):
    """Nobody wants the answer any more."""


class Requests:
    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def call(self, system: Any, method: str, path: str, **options: Any) -> Any:
        long = method in ("ls", "find", "cat_file")
        found, _ = self._until_done(
            _name(system, path),
            lambda: begin(system, method, path, **options),
            limit=LONG * self._seconds if long else try_seconds(self._seconds),
            long=long,
            changes=method == "cat_file",
        )
        return found

    def put(self, system: Any, local: str, path: str) -> None:
        limit = try_seconds(self._seconds) + os.path.getsize(local) / SLOWEST
        self._until_done(
            _name(system, path),
            lambda: begin(system, "put_file", local, path),
            limit=limit,
            long=True,
        )

    def ranges(
        self,
        system: Any,
        path: str,
        ranges: Sequence[tuple[int, int]],
        size: int,
        version: str = "",
    ) -> tuple[list[bytes], int]:
        """Several ranges of a file, and how many times they were asked for."""
        parts: dict[tuple[int, int], bytes] = {}  # those that have come are not asked for again

        def begin_try() -> Future[Any]:
            missing = [one for one in ranges if one not in parts]
            return begin_ranges(system, path, missing, version, size)

        def take(found: Sequence[Any]) -> None:
            missing = [one for one in ranges if one not in parts]
            failed: list[Exception] = []
            for (start, stop), part in zip(missing, found, strict=True):
                if isinstance(part, Exception):
                    failed.append(part)
                elif len(part) < stop - start:
                    failed.append(self._short(system, path, size, len(part), stop - start))
                else:
                    parts[start, stop] = part
            if failed:
                raise next((e for e in failed if understand(e).kind != "passing"), failed[0])

        whole = isinstance(system, CachingFileSystem)  # which fetches more than it is asked for
        amount = (size if whole else sum(stop - start for start, stop in ranges)) / SLOWEST
        limit, name = try_seconds(self._seconds) + amount, _name(system, path)
        _, tries = self._until_done(name, begin_try, limit, amount, take, changes=True)
        return [_checked(parts[one], one[1] - one[0], name) for one in ranges], tries

    def files(self, system: Any, files: Sequence[tuple[str, str, int]], most: int) -> list[Any]:
        """Small files by path, version and size, or errors; without retries."""
        limit = try_seconds(self._seconds) + sum(size for _, _, size in files) / SLOWEST
        try:
            found: list[Any] = self._result(begin_files(system, files, most), limit)
        except TimeoutError as error:
            return [error] * len(files)
        return found

    def _short(self, system: Any, path: str, size: int, got: int, asked: int) -> Exception:
        """What fewer bytes mean: a file that has become shorter, or a broken connection."""
        system.invalidate_cache()
        now = self._result(begin(system, "size", path), try_seconds(self._seconds))
        if now is not None and now < size:
            return OtherVersionError(f"it had {size:,} bytes, and has {now:,}")
        return EOFError(f"{got:,} of {asked:,} bytes have come")

    def _until_done(
        self,
        name: str,
        begin_try: Callable[[], Future[Any]],
        limit: float,
        more: float = 0.0,
        take: Callable[[Any], Any] = lambda found: found,
        long: bool = False,
        changes: bool = False,
    ) -> tuple[Any, int]:
        began = time.monotonic()
        end = math.inf if long else began + self._seconds + more
        tries, pause, handled = 0, FIRST_PAUSE, sys.exc_info()[1]
        while True:
            tries += 1
            try:
                return take(self._result(begin_try(), min(limit, end - time.monotonic()))), tries
            except (Stopped, UnreachableError):
                raise
            except Exception as error:
                failure, last = understand(error, handled), error
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
        end = time.monotonic() + seconds
        try:
            while not future.done():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer in {seconds:.3g} s")
                self._check()
                with waits():
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
            with waits():
                self._stopped.wait(min(left, TICK))

    def _say(self, name: str, text: str) -> None:
        global _last_message
        if time.monotonic() - _last_message > QUIET:
            _last_message = time.monotonic()
            log.warning("%s", hidden(f"{name}: {text}; tried again for up to {self._seconds:g} s"))

    def _final(
        self, name: str, failure: Failure, error: Exception, tries: int, seconds: float
    ) -> Exception:
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
        again = "start again, from the last checkpoint if there is one"
        longer = "list_files(..., retry=tp.Retry(deadline=...))"
        if failure.kind == "access":
            said = f"the server denies access ({failure.text}); renew the credentials (environment, or "
            said += f"storage_options={{...}}), then {again}"
        elif failure.kind == "rejected":
            said = f"the server rejects the request ({failure.text}); check the address and "
            said += f"storage_options={{...}}, then {again}"
        elif failure.wait:
            said = f"the server asks to wait {failure.wait:,.0f} s ({failure.text}), and the deadline is "
            said += f"{self._seconds:g} s; {again}, later, or allow more by {longer}"
        else:
            times = "1 try" if tries == 1 else f"{tries} tries"
            said = f"cannot be reached: {times} in {seconds:.3g} s, the last ended with {failure.text}; "
            said += f"check the network, the address and the server, then {again}, or try for longer than "
            said += f"{self._seconds:g} s by {longer}"
        return UnreachableError(f"{name}: {said}", path=name, attempts=tries, seconds=seconds)


def try_seconds(seconds: float) -> float:
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
