"""What all stages that read files share: their options, the reader for a name, and work on each file, with an
error that names all files that are bad.
"""

from __future__ import annotations

import logging
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache as once
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fsspec.implementations.cached import CachingFileSystem

from trainpipes import errors
from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes._internal.progress import Progress
from trainpipes.cache import SUFFIX
from trainpipes.errors import amount, hidden
from trainpipes.filesystems.retry import Requests, Stopped
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.quarantine import LISTS
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import ReadingSource
from trainpipes.sources.files import list_files
from trainpipes.sources.files.file_bytes import without
from trainpipes.sources.files.folders import IMAGES
from trainpipes.sources.files.formats import is_of_content, reason
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.mapped_rows import is_memmap

log = logging.getLogger("trainpipes")


class FileReader(ReadingSource, asks_inputs=True):
    """Reads the files of ``list_files`` below it. A subclass has ``storage_options`` and ``_open_on``."""

    free = frozenset({"storage_options", "index"})

    def check(self) -> None:
        options = self.options
        for name, checked in CHECKS.items():
            if name in options and options[name] is not getattr(type(self), name):  # its default
                self._set(**{name: checked(options[name], f"{self.name}({name})")})

    def open(self) -> RowSource:
        return self._open_on([])

    @abstractmethod
    def _open_on(self, files: Sequence[Stage]) -> RowSource:
        """The rows of the files that the stages below list and let through."""

    def listed(self, stages: Sequence[Stage], suffixes: Sequence[str] | None = None) -> FileList:
        if not stages or not isinstance(stages[0], list_files.ListFiles):
            raise errors.ConfigError(
                f"{self} needs the files to read: put it after list_files(...)"
            )
        files = stages[0].files(self.options["storage_options"], suffixes or suffixes_of(self.name))
        for stage in stages[1:]:
            if hasattr(stage, "predicate"):
                files = self._kept(files, stage)
        self._check_names(files)
        note_twins(files, self.name)
        urls = stages[0].urls
        if not stages[0].exact and (isinstance(urls, str) or len(urls) == 1):
            note_splits(files, urls if isinstance(urls, str) else urls[0], self.name)
        lists = [*filter(LISTS.search, files.names)]
        if 0 < len(lists) < len(files) and not self.bad_files.keys() >= {*lists}:
            said = "%s: %d files beside the data list rows of a Quarantine, and are left out, such as %s"
            log.warning(said, self.name, len(lists), hidden(lists[0]))
            self.bad_files.update(dict.fromkeys(lists, "a Quarantine wrote it"))
        if not self.bad_files:
            return files
        good = [n for n, name in enumerate(files.names) if name not in self.bad_files]
        return files.pick(np.array(good, dtype=np.int64))

    @made_once
    def bad_files(self) -> dict[str, str]:
        """Files that are left out, and why: they cannot be read (``without_bad_files``), or are no data."""
        return {}

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        identity.pop("on_error", None)  # ``BadRows`` above has it
        return identity

    def _check_names(self, files: FileList) -> None:
        """Raise for names that are no text, which neither Arrow nor the index can hold."""
        odd = next(filter(re.compile("[\ud800-\udfff]").search, files.names), None)
        if odd is not None:
            raise errors.ConfigError(
                f"{self}: the name of the file {odd!r} is not UTF-8; rename it, or leave it out with "
                f"{without(odd)}",
                path=odd,
            )

    def _kept(self, files: FileList, stage: Any) -> FileList:
        if not callable(stage.predicate):
            raise errors.ConfigError(
                f"{stage} comes before {self.name}(), where there are only file paths, and an "
                "expression needs columns; give a function of a path, or put the filter after "
                f"{self.name}()"
            )
        wanted = np.flatnonzero([bool(stage.predicate(name)) for name in files.names])
        if not len(wanted):
            raise errors.MissingFilesError(
                f"{stage} keeps none of the {len(files):,} files, for example {files.names[0]}; its "
                "function gets the path or URL as text: check its condition",
                stage=str(stage),
            )
        return files.pick(wanted.astype(np.int64))


#: Words by which the names of files, or of their folders, tell the part of a data set.
SPLIT = re.compile(
    r"(?:^|[-_./ \d])(?:(train(?:ing)?)|(test(?:ing)?)|(val(?:id(?:ation)?)?|dev|eval))(?=[-_./ \d]|$)",
    re.IGNORECASE,
)
SPLITS = ("", "train", "test", "validation")
#: Names that are looked at first, and the share of them that such words must have.
SAMPLED_NAMES, MOST_NAMES = 1000, 0.9


def note_splits(files: FileList, url: str, caller: str) -> None:
    """Log that a folder or pattern stands for training data and for others, if most names tell."""

    def tell(names: Sequence[str]) -> bool:
        sample = names[:: max(1, len(names) // SAMPLED_NAMES)]
        return sum(map(bool, map(SPLIT.search, sample))) >= MOST_NAMES * len(sample)

    # Names below the folder take seconds of a million files.
    if not tell(files.names) or not tell(names := files.relative_names()):
        return
    found: dict[str, str] = {}
    for name, whole in zip(names, files.known_names(), strict=True):
        if (word := SPLIT.search(name)) is not None:
            rest = name[word.end() :]
            part = whole.removesuffix(rest) + "*" * (not rest.startswith("/"))
            found.setdefault(SPLITS[word.lastindex or 0], part)
    if "train" in found and len(found) > 1:
        _say_splits(caller, url, ", ".join(sorted(found, key=SPLITS.index)), found["train"])


def note_twins(files: FileList, caller: str) -> None:
    """Log that files are listed as they are and compressed."""
    names = files.known_names()
    packed = [name for name in names if name.lower().endswith(COMPRESSED)]
    there = {*names} if 0 < len(packed) < len(names) else set()
    if twins := [name for name in packed if name.rpartition(".")[0] in there]:
        _say_twins(caller, len(twins), twins[0])


@once
def _say_twins(caller: str, count: int, example: str) -> None:
    said = "%s: files that are there compressed, too, are read twice: %d, such as %s; leave one of each out"
    log.warning(said, caller, count, hidden(example))


@once
def _say_splits(caller: str, url: str, splits: str, pattern: str) -> None:
    said = "%s: files of several splits in %s are read together: %s; to train on one, name it, as by %s"
    log.warning(said, caller, hidden(url), splits, hidden(pattern))


def _index(value: Any, option: str) -> str | bool:
    good = isinstance(value, bool) or checks.is_path(value)
    rule = f"a file that ends in {SUFFIX}, a folder, True, False or None"
    checks.require(good, option, rule, value)
    return value if isinstance(value, bool) else checks.local_path(value, option)


#: What refuses a bad value of an option, and returns a good one in the form that it is kept in.
CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "columns": checks.column_names,
    "schema": checks.checked_schema,
    "block_rows": lambda value, option: checks.whole_number(value, 1, option, "rows in a block"),
    "index": _index,
    "storage_options": list_files.checked_options,
}


def cut_evenly(rows: int, block_rows: int) -> IntArray:
    """First rows of blocks, and the number of rows, int64 ``[blocks + 1]``.

    >>> cut_evenly(10, 4).tolist(), cut_evenly(0, 4).tolist()
    ([0, 4, 8, 10], [0])
    """
    return np.append(np.arange(0, rows, block_rows, dtype=np.int64), rows)


def cut_by_bytes(sizes: IntArray, most: int) -> IntArray:
    """Edges of ranges of rows with at most so many bytes, or one row."""
    edges, total = [0], 0
    for row, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            edges.append(row)
            total = 0
        total += size
    return np.unique(np.array([*edges, len(sizes)], dtype=np.int64))


#: Bytes of an open file and of its decoded part, at most.
DECODER_BYTES = 4 << 20
#: Of many columns: bytes that the reader of one holds, at most; how many times the bytes of all an open file
#: has, and whoever reads has besides.
PAGE_BYTES, AT_REST, READING = 1 << 20, 1.2, 2


class FileBlocks(RowSource):
    """Rows of files in blocks; ``file_of_block`` is None where blocks are of several files."""

    files: FileList
    sizes: IntArray
    file_of_block: IntArray
    blocks_called = "blocks"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_relative_names"}

    @cached_property
    def _relative_names(self) -> list[str]:
        return self.files.relative_names()

    @cached_property
    def is_local(self) -> bool:
        return all(map(is_local, self.files.systems))

    def _decoding_bytes(
        self, blocks: npt.NDArray[Any], spans: int, threads: bool, fetched: float
    ) -> int:
        block = float(blocks.max(initial=0))
        pages = min(block, PAGE_BYTES * len(self.schema or [0]))
        nbytes = spans * min(DECODER_BYTES, 4 * block)
        if pages > DECODER_BYTES:
            nbytes = pages * (AT_REST * min(spans, len(blocks)) + READING * (3 if threads else 1))
        whole = 0 if self.is_local else int(np.maximum(self.sizes, 0).sum())
        return math.ceil(nbytes) + math.ceil(min(self.files.prefetch_bytes, fetched, whole))

    def fingerprint_of(self, rows: Sequence[str], read: Sequence[str]) -> dict[str, Any]:
        """What a state knows files by: names, sizes and rows in "digests"; names and rows alone in "order",
        since the order of rows depends on them; what was ``read`` of the content.
        """
        names = self._relative_names
        lines = zip(names, self.sizes.tolist(), rows, strict=True)
        return {
            "files": len(names),
            "rows": int(self.lengths.sum()),
            "bytes": int(self.sizes.sum()),
            "digests": list_files.digests(
                [f"{name}\0{size}\0{text}" for name, size, text in lines]
            ),
            "order": list_files.digest(
                [f"{name}\0{text}" for name, text in zip(names, rows, strict=True)]
            ),
            **self.files.content(read),
        }

    def describe(self) -> list[tuple[str, str]]:
        rows = self.lengths
        blocks = f"{len(rows):,}"
        if len(rows):
            least, middle, most = rows.min(), int(np.median(rows)), rows.max()
            each = f"{least:,}" if least == most else f"{least:,} to {most:,} (median {middle:,})"
            blocks += f" of {each} rows each" if least == most else f", rows in each: {each}"
        lines = [("files", f"{len(self.files):,}, {amount(self.sizes.sum())} in all")]
        lines += [(self.blocks_called, blocks), ("rows", f"{rows.sum():,}")]
        if self.row_bytes is not None:
            whole = amount(self.row_bytes * float(rows.sum()))
            lines.append(("in memory", f"{amount(self.row_bytes)} a row, {whole} in all"))
        return lines


#: What reads files, by the ends of their names.
READERS = {
    "read_parquet": (".parquet", ".pq"),
    "read_json": (".jsonl", ".json", ".ndjson"),
    "read_csv": (".csv", ".tsv", ".tab"),
    "read_arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "read_text": (".txt", ".text", ".md"),
    "read_webdataset": (".tar", ".tgz"),
    "read_numpy": (".npy", ".npz"),
    "read_images": IMAGES,
}
#: Ends of the names of compressed files, after those of the format, and the readers of such files.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
DECOMPRESS = ("read_json", "read_csv", "read_text", "read_webdataset")


def suffixes_of(reader: str) -> tuple[str, ...]:
    """Ends of the names of a reader's files, compressed ones too.

    >>> suffixes_of("read_parquet"), suffixes_of("read_text")[:3]
    (('.parquet', '.pq'), ('.txt', '.txt.gz', '.txt.zst'))
    """
    ends = READERS[reader]
    more = COMPRESSED if reader in DECOMPRESS else ()
    return tuple(
        end + packed for end in ends for packed in ("", *more) if end != ".tgz" or not packed
    )


def ends_of_names() -> list[str]:
    """Endings that some reader reads, without .md, which describes other files."""
    return [end for reader in READERS for end in suffixes_of(reader) if ".md" not in end]


def reader_by_name(path: str) -> str:
    """The reader for a file's name; "" if unknown.

    >>> reader_by_name("data/chats.jsonl.gz"), reader_by_name("README"), reader_by_name("a.parquet.gz")
    ('read_json', '', '')
    """
    name = (path.split("?")[0] if "://" in path else path).lower()
    return next((reader for reader in READERS if name.endswith(suffixes_of(reader))), "")


def one_reader(paths: Sequence[str], storage_options: Mapping[str, Any] | None, caller: str) -> str:
    """The reader of files, folders and globs of a format: "read_parquet" and so on, or "from_memmap"."""
    if len(paths) == 1 and is_memmap(paths[0]):
        return "from_memmap"

    def below(suffixes: Sequence[str]) -> list[str]:
        return (
            list_files.ListFiles(list(paths), suffix=suffixes, storage_options=storage_options)
            .files()
            .names
        )

    names = paths
    if "" in map(reader_by_name, paths):  # folders, or globs without an end
        try:
            names = below(ends_of_names())
        except errors.MissingFilesError:  # notes alone are text
            names = below([*ends_of_names(), *suffixes_of("read_text")])
    counts = Counter(map(reader_by_name, names))
    usual = next((reader for reader, _ in counts.most_common() if reader), "read_json")
    if {*counts} == {usual}:
        return usual
    known = ", ".join(ends[0] for ends in READERS.values())
    several = sorted(reader for reader in counts if reader)
    first = {reader: next(n for n in names if reader_by_name(n) == reader) for reader in counts}
    seen = ", ".join(f"{hidden(first[reader])} for {reader}" for reader in several)
    if "" in first:
        seen = f"{hidden(first[''])} for none of these{', ' * bool(seen)}{seen}"
    way = f"name files of one format, or a pipeline, such as trainpipes.{usual}(...)"
    if several[1:]:
        calls = ", ".join(f"trainpipes.{reader}(...)" for reader in several)
        way += f", or of all of them, trainpipes.concat({calls})"
    elif not several:
        way += ", or trainpipes.read_files(fn), whose function reads any format"
    raise errors.ConfigError(
        f"{caller} reads files of one format, which the ends of their names say ({known}), got {seen}: {way}"
    )


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
    """The results of ``look`` by the number of the file; several files at a time."""
    numbers = range(len(files)) if wanted is None else wanted
    results: dict[int, T] = {}
    failures: dict[int, Exception] = {}
    requests = Requests(files.retry)

    def work(file: int) -> None:
        try:
            results[file] = look(file, requests)
        except Stopped:
            pass
        except (MemoryError, errors.ConfigError):
            raise
        except Exception as error:
            failures[file] = error
            if isinstance(error, errors.UnreachableError):
                requests.stop()
        if shown_bar is not None:
            shown_bar.advance()

    bar = Progress(job or f"looking at {kind} files", len(numbers), "files")
    with nullcontext() if progress is not None else bar as shown_bar:
        here = all(map(is_local, files.systems))
        most = most or (MAX_THREADS if here else MAX_REQUESTS)
        if any(isinstance(system, CachingFileSystem) for system in files.systems):
            most = 1  # what it notes of its files is not made for several threads
        requests.map(work, _after_quick_ones(work, numbers) if here else numbers, most)
    if failures:
        plain = (
            failure
            for _, failure in sorted(failures.items())
            if isinstance(failure, errors.DataError)
        )
        raise next(plain, None) or failed(files, failures, caller, kind)
    return dict(sorted(results.items()))


def _after_quick_ones(work: Callable[[int], None], numbers: Sequence[int]) -> Sequence[int]:
    """Work in this thread, which is faster while disks need no waiting; the rest is for several."""
    began = perf_counter()
    for done, number in enumerate(numbers, 1):
        work(number)
        if perf_counter() - began >= QUICK * (done + SPARE):
            return numbers[done:]
    return ()


def failed(files: FileList, failures: dict[int, Exception], caller: str, noun: str) -> Exception:
    lines = []
    for n, failure in sorted(failures.items()):
        if isinstance(failure, errors.UnreachableError):
            failure.stage = caller
            return failure
        said, reader = reason(failure), reader_by_name(files.names[n])
        known = reader in said or caller.startswith(reader) or reader in ("", "read_text")
        hint = "" if known or noun not in KINDS else f"; {reader}() is for such files"
        lines.append(f"  {files.names[n]}: {said}{hint}")
    if len(lines) > NAMED:
        lines[NAMED:] = [f"  … and {len(lines) - NAMED:,} more"]
    gone = all(isinstance(error, FileNotFoundError) for error in failures.values())
    first, bad = min(failures), [files.names[n] for n in sorted(failures)]
    way = f"leave them out with {without(*bad[:NAMED])}" + ", and so on" * (len(bad) > NAMED)
    text = (
        f"{caller}: {len(failures):,} of {len(files):,} files cannot be read as {noun}:\n"
        + "\n".join(lines)
        + f"\nReplace or remove them, or {way}"
    )
    kind = errors.MissingFilesError if gone else errors.UnreadableError
    failed = kind(text, path=files.names[first], stage=caller)
    if len(failures) < len(files) and all(map(is_of_content, failures.values())):
        # What ``without_bad_files`` may go on without.
        vars(failed)["bad_files"] = {files.names[n]: reason(cause) for n, cause in failures.items()}
    failed.__cause__ = failures[first]
    return failed
