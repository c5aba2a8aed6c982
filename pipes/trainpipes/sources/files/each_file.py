from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TypeVar

import pyarrow as pa
from fsspec.implementations.cached import CachingFileSystem

from trainpipes._internal.progress import Progress
from trainpipes.errors import (
    ConfigError,
    DataError,
    MissingFilesError,
    TrainpipesError,
    UnreachableError,
    UnreadableError,
)
from trainpipes.filesystems.retry import Requests, Stopped
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files.file_errors import without
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import reader_by_name

T = TypeVar("T")
#: Threads that wait for disks, and for servers, at most.
MAX_THREADS, MAX_REQUESTS = 16, 64
#: Seconds from which local files are slow enough for threads to help; and as many files' time to spare, which
#: a busy machine takes now and then.
QUICK, SPARE = 0.001, 16
#: What files are to be, where a file of another kind is known by its name.
KINDS = ("Parquet", "Arrow", "JSON", "CSV", "NumPy", "tar archives")
#: Unreadable files that a message names.
NAMED = 100


class BadFileError(Exception):
    """Why a file cannot be read, as text."""


def each_file(
    files: FileList,
    look: Callable[[int, Requests], T],
    caller: str,
    kind: str,
    *,
    wanted: Sequence[int] | None = None,
    job: str | None = None,
    progress: Progress | None = None,
    most: int | None = None,
) -> dict[int, T]:
    """What ``look`` finds in each file, by the file's number; several files at a time."""
    numbers = range(len(files)) if wanted is None else wanted
    results: dict[int, T] = {}
    failures: dict[int, Exception] = {}
    requests = Requests(files.retry)

    def work(file: int) -> None:
        try:
            results[file] = look(file, requests)
        except Stopped:
            pass
        except (MemoryError, ConfigError):
            raise
        except Exception as error:
            failures[file] = error
            if isinstance(error, UnreachableError):
                requests.stop()
        if own is not None:
            own.advance()

    made = Progress(job or f"looking at {kind} files", len(numbers), "files")
    with nullcontext() if progress is not None else made as own:
        here = all(map(is_local, files.systems))
        most = most or (MAX_THREADS if here else MAX_REQUESTS)
        if any(isinstance(system, CachingFileSystem) for system in files.systems):
            most = 1  # what it notes of its files is not made for several threads
        requests.map(work, _after_quick_ones(work, numbers) if here else numbers, most)
    if failures:
        plain = (
            failure for _, failure in sorted(failures.items()) if isinstance(failure, DataError)
        )
        raise next(plain, None) or failed(files, failures, caller, kind)
    return dict(sorted(results.items()))


def _after_quick_ones(work: Callable[[int], None], numbers: Sequence[int]) -> Sequence[int]:
    """Work in this thread, which is faster while disks need no waiting; what is left is for several."""
    began = perf_counter()
    for done, number in enumerate(numbers, 1):
        work(number)
        if perf_counter() - began >= QUICK * (done + SPARE):
            return numbers[done:]
    return ()


def failed(files: FileList, failures: dict[int, Exception], caller: str, what: str) -> Exception:
    lines = []
    for n, failure in sorted(failures.items()):
        if isinstance(failure, UnreachableError):
            failure.stage = caller
            return failure
        said, reader = reason(failure), reader_by_name(files.names[n])
        known = reader in said or caller.startswith(reader) or reader in ("", "read_text")
        hint = "" if known or what not in KINDS else f"; {reader}() is for such files"
        lines.append(f"  {files.names[n]}: {said}{hint}")
    if len(lines) > NAMED:
        lines[NAMED:] = [f"  … and {len(lines) - NAMED:,} more"]
    gone = all(isinstance(error, FileNotFoundError) for error in failures.values())
    first, bad = min(failures), [files.names[n] for n in sorted(failures)]
    way = f"leave them out with {without(*bad[:NAMED])}" + ", and so on" * (len(bad) > NAMED)
    text = (
        f"{caller}: {len(failures):,} of {len(files):,} files cannot be read as {what}:\n"
        + "\n".join(lines)
        + f"\nReplace or remove them, or {way}"
    )
    kind = MissingFilesError if gone else UnreadableError
    failed = kind(text, path=files.names[first], stage=caller)
    if len(failures) < len(files) and all(map(is_of_content, failures.values())):
        # What ``without_bad_files`` may go on without.
        vars(failed)["bad_files"] = {files.names[n]: reason(cause) for n, cause in failures.items()}
    failed.__cause__ = failures[first]
    return failed


def reason(error: Exception) -> str:
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


def is_of_content(error: BaseException) -> bool:
    """Whether an error is about what a file holds, the same wherever it is read: not about a file that is
    not reached.
    """
    if isinstance(error, OSError):  # Arrow raises those without a number
        return type(error) is OSError and error.errno is None
    kinds = BadFileError | ValueError | EOFError | ArithmeticError | LookupError | pa.ArrowException
    return isinstance(error, kinds) and not isinstance(error, TrainpipesError)


def is_encrypted(error: BaseException) -> bool:
    return "decrypt" in str(error).lower()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
