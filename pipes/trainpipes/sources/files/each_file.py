"""Calls a function for each file of a data set, in several threads, and names all files for which it fails.

Called by the thread that opens a pipeline, before any row is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TypeVar

from trainpipes._internal.progress import Progress
from trainpipes.engine.interrupts import result_of
from trainpipes.errors import (
    ConfigError,
    DataError,
    MissingFilesError,
    UnreachableError,
    UnreadableError,
)
from trainpipes.sources.files.file_rows import reader_by_name
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.retry import Requests, Stopped

T = TypeVar("T")
#: Threads that wait for disks, and for servers, at most.
MAX_THREADS, MAX_REQUESTS = 16, 64
#: Seconds below which a file of this machine is looked at by one thread: to pass Python's lock around among
#: several would take longer.
QUICK = 1e-3
#: What files are to be, where a file of another kind is told by its name.
KINDS = ("Parquet", "Arrow", "JSON", "CSV", "NumPy", "tar archives")
#: Unreadable files that a message names.
NAMED = 100


class BadFileError(Exception):
    """Why a file cannot be read, as text."""


def in_threads(
    work: Callable[[int], None],
    count: int,
    progress: Progress | None,
    requests: Requests,
    most: int = MAX_THREADS,
    least: int = 4,
    quick: bool = False,
) -> None:
    """``work(n)`` for every n, a few at a time in each thread.

    Args:
        work: what is done.
        count: how many numbers there are.
        progress: counts those done; None where ``work`` does.
        requests: are stopped if it fails.
        most: threads at most.
        least: numbers that are worth another thread.
        quick: begin in this thread alone, and go on so until one takes longer than ``QUICK``.
    """
    first = 0
    while quick and first < count:
        began = perf_counter()
        work(first)
        first += 1
        if progress is not None:
            progress.advance()
        quick = perf_counter() - began < QUICK
    if first == count:
        return
    count, work = count - first, partial(_from, first, work)
    threads = max(1, min(most, -(-count // least)))
    share = max(1, min(64, count // (4 * threads)))

    def several(start: int) -> None:
        for n in range(start, min(count, start + share)):
            work(n)
            if progress is not None:
                progress.advance()

    if threads == 1:
        for n in range(0, count, share):
            several(n)
        return
    with ThreadPoolExecutor(threads, "trainpipes-files") as pool:
        try:
            parts = [pool.submit(several, start) for start in range(0, count, share)]
            for part in parts:
                result_of(part)
        except BaseException:
            requests.stop()  # nobody waits for what is under way
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _from(first: int, work: Callable[[int], None], n: int) -> None:
    work(first + n)


def each_file(
    files: FileList,
    look: Callable[[int, Requests], T],
    asker: str,
    kind: str,
    *,
    wanted: Sequence[int] | None = None,
    job: str | None = None,
    progress: Progress | None = None,
    most: int | None = None,
    least: int = 4,
) -> dict[int, T]:
    """What ``look`` finds in each file, by the file's number; several files at a time.

    Args:
        files: the files.
        look: is given a file's number, and what makes requests to servers.
        asker: the stage, for messages.
        kind: the format that the files should have, such as "Arrow".
        wanted: numbers of the files; None for all.
        job: what a progress bar says.
        progress: one that ``look`` advances itself, in place of one that counts files.
        most: threads at most; 16 if all files are local, else 64.
        least: files that are worth another thread.

    Raises:
        DataError: the one that ``look`` raised, for the first of such files.
        UnreadableError: names all files in which it failed otherwise, each with the reason.
        UnreachableError: a server does not answer, or denies access; files beyond are not asked for.
    """
    numbers = range(len(files)) if wanted is None else wanted
    found: dict[int, T] = {}
    failures: dict[int, Exception] = {}
    requests = Requests(files.retry_seconds)
    here = all(map(is_local, files.systems))
    if most is None:
        most = MAX_THREADS if here else MAX_REQUESTS

    def work(n: int) -> None:
        file = numbers[n]
        try:
            found[file] = look(file, requests)
        except Stopped:
            pass
        except (MemoryError, ConfigError):
            raise
        except Exception as error:
            failures[file] = error
            if isinstance(error, UnreachableError):
                requests.stop()

    if progress is not None:
        in_threads(work, len(numbers), None, requests, most, least, here)
    else:
        with Progress(job or f"looking at {kind} files", len(numbers), "files") as own:
            in_threads(work, len(numbers), own, requests, most, least, here)
    for _, failure in sorted(failures.items()):
        if isinstance(failure, DataError):  # which says it all
            raise failure
    if failures:
        raise failed(files, failures, asker, kind)
    return dict(sorted(found.items()))


def failed(files: FileList, failures: dict[int, Exception], asker: str, what: str) -> Exception:
    """The error that names all files which could not be read.

    Args:
        files: the data set.
        failures: why, by the number of the file.
        asker: the stage, for messages.
        what: what they should be, as in "Parquet".
    """
    for _, failure in sorted(failures.items()):
        if isinstance(failure, UnreachableError):
            failure.stage = asker
            return failure
    lines = []
    for n in sorted(failures):
        said, reader = reason(failures[n]), reader_by_name(files.names[n])
        told = reader not in ("", "read_text")  # any file may be text
        other = told and what in KINDS and reader not in said and not asker.startswith(reader)
        lines.append(
            f"  {files.names[n]}: {said}{f'; {reader}() is for such files' if other else ''}"
        )
    if len(lines) > NAMED:
        lines[NAMED:] = [f"  … and {len(lines) - NAMED:,} more"]
    gone = all(isinstance(error, FileNotFoundError) for error in failures.values())
    first = min(failures)
    text = (
        f"{asker}: {len(failures):,} of {len(files):,} files cannot be read as {what}:\n"
        + "\n".join(lines)
        + "\nReplace or remove them, or leave them out with .filter(lambda path: ...) after list_files"
    )
    kind = MissingFilesError if gone else UnreadableError
    failed = kind(text, path=files.names[first], stage=asker)
    failed.__cause__ = failures[first]
    return failed


def reason(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    if isinstance(error, BadFileError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "it was listed, but is no longer there"
    if isinstance(error, PermissionError):
        return "permission denied"
    if is_encrypted(error):
        return f"a column is encrypted, which is not supported ({one_line(error)})"
    if isinstance(error, UnicodeDecodeError):
        return "the name of a column is not UTF-8"
    return f"{type(error).__name__}: {one_line(error)}"


def is_encrypted(error: BaseException) -> bool:
    """Whether Arrow says that it has no key."""
    return "decrypt" in str(error).lower()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
