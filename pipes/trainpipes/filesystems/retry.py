"""Requests to servers, tried again. A second try gives the same bytes or fails."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fsspec.implementations.cached import CachingFileSystem

from trainpipes import errors
from trainpipes._internal import activity, checks, locks, messages, pool
from trainpipes.filesystems import request

log = logging.getLogger("trainpipes")
T = TypeVar("T")
R = TypeVar("R")

#: Seconds from the first try of a request to giving up, unless the user says otherwise.
RETRY_SECONDS = 120.0
#: Seconds that a server has to answer a try, at most: a quarter of all. Bytes of the answer for which it
#: has a second more; connections slower than that are taken for broken.
TRY_SECONDS = 30.0
SLOWEST = 64 << 10
#: How many times RETRY_SECONDS a try of these may take, such as to list a folder: S3 lists 1,000 files a
#: request.
LONG, LONG_CALLS = 5, ("ls", "find", "cat_file", "put_file", "mv", "cp_file")
#: Seconds before the second try, doubled with each further try, and at most.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0
#: Seconds between two messages that something is tried again, in a process.
QUIET = 10.0
#: How the text begins of an error that says so.
DENIED = "the server denies access"
#: Texts of errors, by the kind of failure; any other failure that is worth another try has run out of time.
SAID = {
    "access": DENIED + " ({text}); renew the credentials (environment, or "
    "storage_options={{...}}), then {again}",
    "rejected": "the server rejects the request ({text}); check the address and storage_options={{...}}, "
    "then {again}",
    "busy": "the server asks to wait {wait:,.0f} s ({text}), and the deadline is {deadline:g} s; {again}, "
    "later, or allow more by {longer}",
    "passing": "cannot be reached: {times} in {seconds:.3g} s, the last ended with {text}; check the "
    "network, the address and the server, then {again}, or try {more} by {longer}",
}


def cure_of(caller: str) -> tuple[str, str]:
    """Of what is called in a run: the step to repeat, and where more tries are allowed."""
    again = "start again, from the last checkpoint if there is one"
    return again, f"{caller}(..., retry=tp.Retry({{option}}=...))"


#: The same of a reader and of a writer.
READING = cure_of("list_files")
WRITING = (
    "call it again to go on after the files that are whole",
    "retry=tp.Retry({option}=...)",
)

_exiting = locks.Flag()  # the interpreter's end does not wait for servers
atexit.register(_exiting.set)
_last_message = -math.inf
#: How many times this process has made a request again, and how many of these the last message said.
_retries = _said_of = 0
_counting = threading.Lock()


@dataclass(frozen=True)
class Retry:
    """How long requests to servers are tried again.

    Failures that may pass (no answer, a broken connection, 408, 429, 5xx) are tried again after 0.25, 0.5,
    ... up to 8 s, or as ``Retry-After`` says. Denied access and missing files are errors at once.

    Args:
        deadline: seconds from a request's first try, more than 0. After them nothing is tried again: there is
            an ``UnreachableError``.
        max_attempts: how many times a request is made at most; None for as often as there is time.
        timeout: seconds that a server may take to answer a try, and a second more per 64 KiB that goes
            either way; None for a quarter of ``deadline``, at most 30 s.

    >>> import trainpipes as tp
    >>> tp.list_files("s3://bucket/rows", retry=tp.Retry(deadline=600))
    list_files('s3://bucket/rows', retry=Retry(deadline=600.0))
    """

    deadline: float = RETRY_SECONDS
    max_attempts: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("deadline", "timeout")[: 1 if self.timeout is None else 2]:
            seconds = checks.copied(getattr(self, name))
            good = (
                isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
            )
            checks.require(good, f"Retry({name})", "a number of seconds above 0", seconds)
            object.__setattr__(self, name, float(seconds))
        if self.max_attempts is not None:
            most = checks.copied(self.max_attempts)
            checks.whole_number(most, 1, "Retry(max_attempts)", "tries of a request")
            object.__setattr__(self, "max_attempts", most)

    def __repr__(self) -> str:
        return f"Retry({', '.join(f'{name}={value}' for name, value in given(self).items())})"

    @staticmethod
    def of(value: Any, option: str) -> Retry:
        """The value of an option: a ``Retry``, or a dict of its arguments as in a config."""
        if isinstance(value, Mapping) and value.keys() <= {field.name for field in fields(Retry)}:
            value = Retry(**value)
        checks.require(isinstance(value, Retry), option, "a trainpipes.Retry", value)
        retry: Retry = value
        return retry


#: How long, unless the user says otherwise.
NORMAL = Retry()


class Stopped(Exception):
    """Nobody wants the answer any more."""


class Requests:
    """Requests of a reader, or of a writer.

    Args:
        cure: the end of errors: the step to repeat, and where more tries are allowed.
    """

    def __init__(self, retry: Retry = NORMAL, cure: tuple[str, str] = READING) -> None:
        self._retry, self._seconds, self._cure = retry, retry.deadline, cure
        self._stopped = locks.Flag()

    def stop(self) -> None:
        self._stopped.set()

    def map(self, work: Callable[[T], R], items: Sequence[T], most: int) -> list[R]:
        """``work`` for each item, so many side by side; after an error nobody waits for the others."""
        if most < 2 or len(items) < 2:
            return [work(item) for item in items]
        share = max(1, min(64, len(items) // (4 * most)))

        def several(first: int) -> list[R]:
            return [work(item) for item in items[first : first + share]]

        try:
            firsts = range(0, len(items), share)
            parts = pool.side_by_side(several, firsts, min(most, len(items)), "trainpipes-files")
            return [found for part in parts for found in part]
        except BaseException:
            self.stop()
            raise

    def call(self, system: Any, method: str, *paths: str, size: int = 0, **options: Any) -> Any:
        """Call a method of a file system with paths; ``size`` bytes go to the server."""
        name = _name(system, ([path for path in paths if isinstance(path, str)] or paths[0])[-1])
        changes = method == "cat_file"

        def work(left: float) -> Any:
            return self._result(request.begin(system, method, *paths, **options), left)

        return self._until_done(system, name, work, size, method in LONG_CALLS, changes)[0]

    def ranges(
        self, system: Any, path: str, ranges: request.Ranges, size: int, version: str = ""
    ) -> tuple[list[bytes], int]:
        """Several ranges of a file, and how many times they were asked for."""
        parts: dict[tuple[int, int], bytes] = {}  # those that have come are not asked for again

        def fetch(left: float) -> None:
            missing = [span for span in ranges if span not in parts]
            wanted = [(path, span, version, size) for span in missing]
            contents = self._result(request.begin_ranges(system, wanted), left)
            activity.count("requests", len(wanted))
            failed: list[Exception] = []
            for (start, stop), part in zip(missing, contents, strict=True):
                if isinstance(part, Exception):
                    failed.append(part)
                elif len(part) < stop - start:
                    failed.append(self._short(system, path, size, len(part), stop - start))
                else:
                    parts[start, stop] = part
                    activity.count("bytes", len(part))
            if failed:
                raise next(
                    (e for e in failed if request.understand(e).kind != "passing"), failed[0]
                )

        whole = isinstance(system, CachingFileSystem)  # which fetches more than it is asked for
        amount = size if whole else sum(stop - start for start, stop in ranges)
        name = _name(system, path)
        _, tries = self._until_done(system, name, fetch, amount, changes=True)
        return [_checked(parts[span], span[1] - span[0], name) for span in ranges], tries

    def small_files(self, system: Any, wanted: Sequence[request.Wanted], most: int) -> list[Any]:
        """Whole files, or errors; without retries."""
        limit = try_seconds(self._retry) + sum(size for *_, size in wanted) / SLOWEST
        try:
            contents: list[Any] = self._result(request.begin_ranges(system, wanted, most), limit)
        except TimeoutError as error:
            return [error] * len(wanted)
        return contents

    def _short(self, system: Any, path: str, size: int, got: int, asked: int) -> Exception:
        """The error that fewer bytes mean: a file that has become shorter, or a broken connection."""
        system.invalidate_cache()
        now = self._result(request.begin(system, "size", path), try_seconds(self._retry))
        if now is not None and now < size:
            return request.OtherVersionError(f"it had {size:,} bytes, and has {now:,}")
        return EOFError(f"{got:,} of {asked:,} bytes have come")

    def _until_done(
        self,
        system: Any,
        name: str,
        work: Callable[[float], Any],
        amount: int,
        long: bool = False,
        changes: bool = False,
    ) -> tuple[Any, int]:
        """The result of ``work``, and the number of tries; ``amount`` bytes go in or out."""
        more, began = amount / SLOWEST, time.monotonic()
        limit = more + (LONG * self._seconds if long else try_seconds(self._retry))
        end = math.inf if long else began + self._seconds
        tries, pause, handled = 0, FIRST_PAUSE, sys.exc_info()[1]
        most, renewed = self._retry.max_attempts or math.inf, False
        while True:
            tries += 1
            used = request.current(system)
            try:
                return work(min(limit, end + more - time.monotonic())), tries
            except (Stopped, errors.UnreachableError):
                raise
            except Exception as error:
                failure, last = request.understand(error, handled), error
            if failure.expired and not renewed:  # once: the new one may be no better
                renewed = request.renew(system, used)
                failure = replace(failure, kind="passing" if renewed else failure.kind)
            if failure.kind == "changed" and not changes:
                failure = replace(failure, kind="rejected")
            now = time.monotonic()
            if long:
                end = min(end, now + self._seconds)
            delay = max(pause, failure.wait)
            if failure.kind != "passing" or now + delay >= end or tries >= most:
                last = messages.clean(last)
                final = self._final(name, failure, last, tries, now - began)
                if final is last:
                    raise final
                raise final from last
            self._say(name, failure.text)
            self._wait(locks.Flag(), delay)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _result(self, answer: request.Answer, seconds: float) -> Any:
        try:
            if not self._wait(answer.finished, seconds):
                raise TimeoutError(f"no answer in {seconds:.3g} s")
            return answer.result()
        finally:
            answer.cancel()

    def _wait(self, flag: locks.Flag, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not flag.is_set() and (left := end - time.monotonic()) > 0:
            if self._stopped.is_set() or _exiting.is_set():
                raise Stopped
            with pool.waits(), activity.doing(activity.BYTES):
                flag.wait(min(left, locks.TICK))
        return flag.is_set()

    def _say(self, name: str, text: str) -> None:
        global _last_message, _retries, _said_of
        with _counting:
            _retries += 1
            if time.monotonic() - _last_message <= QUIET:
                return
            since, _said_of, _last_message = _retries - _said_of, _retries, time.monotonic()
        many = f"; {since:,} requests of this process were since the last such message" * (
            since > 1
        )
        log.warning(
            "%s", errors.hidden(f"{name}: {text}; tried again for up to {self._seconds:g} s{many}")
        )

    def _final(
        self, name: str, failure: request.Failure, error: Exception, tries: int, seconds: float
    ) -> Exception:
        kind, text = failure.kind, failure.text
        if kind == "other" or (kind == "missing" and isinstance(error, FileNotFoundError)):
            return error
        if kind == "missing":
            return FileNotFoundError(errors.hidden(name))
        if kind == "changed":
            return errors.DataChangedError(
                f"{name}: the file has changed since the files were listed: the server says so "
                f"({text}); bring the old one back, or build the pipeline again",
                path=name,
            )
        out = tries == self._retry.max_attempts
        again, longer = self._cure
        said = SAID["busy" if kind == "passing" and failure.wait and not out else kind].format(
            text=text, again=again, wait=failure.wait, deadline=self._seconds,
            longer=longer.format(option="max_attempts" if out else "deadline"),
            more=f"more than {tries}" if out else f"for longer than {self._seconds:g} s",
            times="1 try" if tries == 1 else f"{tries} tries", seconds=seconds,
        )  # fmt: skip
        return errors.UnreachableError(
            f"{name}: {said}", path=name, attempts=tries, seconds=seconds
        )


def is_denied(error: errors.UnreachableError) -> bool:
    return f": {DENIED}" in error.message


def given(retry: Retry) -> dict[str, Any]:
    """The arguments, without those that are None."""
    return {name: value for name, value in vars(retry).items() if value is not None}


def try_seconds(retry: Retry) -> float:
    return retry.timeout or min(TRY_SECONDS, retry.deadline / 4)


def made_again() -> int:
    """How many times this process has made a request again."""
    return _retries


def _name(system: Any, path: str) -> str:
    return str(system.unstrip_protocol(path))


def _checked(content: Any, asked: int, name: str) -> bytes:
    if len(content) > asked:
        raise errors.UnreadableError(
            f"{name}: the server sent {len(content):,} bytes where {asked:,} were asked for: it does not "
            "know ranges; fetch the file first, for instance by 'simplecache::' before the URL",
            path=name,
        )
    return bytes(content)
