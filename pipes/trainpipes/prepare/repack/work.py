"""What all steps of the work share: the options, the temporary folder, the threads, and the parts of the
input that are done."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from trainpipes.errors import DataError
from trainpipes.permute import Permutation
from trainpipes.prepare.repack.input_parts import Part, SortedPart, save_json
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.row_groups import Form
from trainpipes.prepare.repack.sorted_keys import SortOrder
from trainpipes.prepare.repack.sorted_runs import Places, damaged
from trainpipes.prepare.repack.workers import Workers
from trainpipes.writers.output_file import writing

__all__ = ["FILE_BYTES", "Options", "Report", "Work", "remove_folder"]

#: Called with what is done, how much of it, and how much there is; None where nobody knows.
Report: TypeAlias = Callable[[str, int, int | None], None]

#: Bytes of rows in a file, about, where neither rows nor files are counted.
FILE_BYTES = 512 << 20
#: Rows as they came; sorted hashes; numbers of dropped rows; sorted keys; places by keys; sorted rows; which
#: parts are read, and which of them sorted.
FOLDERS = ("kept", "hashes", "dropped", "keys", "order", "runs", "read", "sorted")


@dataclass(frozen=True)
class Options:
    """What is to be done.

    Attributes:
        asker: for messages.
        seed: of the shuffle; None for none.
        sort: columns to sort by.
        descending: whether the largest come first.
        by: columns in which rows are the same as earlier ones, which are dropped; () for all; None for none.
        files: how many files; or
        rows_per_file: how many rows in each.
        form: of row groups.
        memory: bytes.
        threads: how many.
        verify: whether files are read back.
    """

    asker: str
    seed: int | None
    sort: tuple[str, ...]
    descending: bool
    by: tuple[str, ...] | None
    files: int | None
    rows_per_file: int | None
    form: Form
    memory: int
    threads: int
    verify: bool

    @property
    def moves_rows(self) -> bool:
        """Whether rows come out elsewhere than in their order."""
        return self.seed is not None or bool(self.sort) or self.by is not None

    @property
    def needs_all(self) -> bool:
        """Whether where a row goes is known only when all are read."""
        return bool(self.sort) or self.by is not None


class Work:
    """What all steps share.

    Args:
        options: what to do.
        temporary: folder of temporary files.
        threads: how many.
        report: told how far it is.

    Attributes:
        asker: for messages.
        workers: the threads.
        order: by which rows are sorted; None where they are not.
        unit: bytes of rows that one thread works on. It holds four to six times as much.
    """

    def __init__(self, options: Options, temporary: Path, threads: int, report: Report) -> None:
        self.options, self.temporary = options, temporary
        self._report, self._lock = report, threading.Lock()
        self.asker = options.asker
        self.workers = Workers(threads)
        self.unit = max(1, min(options.memory // (6 * max(2, threads)), FILE_BYTES))
        self.order: SortOrder | None = None
        if options.sort:
            self.order = SortOrder(options.sort, options.descending, self.asker)

    def report(self, job: str, done: int, total: int | None) -> None:
        """Say how far it is; called by any thread."""
        with self._lock:
            self._report(job, done, total)

    def make_folders(self) -> None:
        """Make the temporary folder."""
        for name in FOLDERS:
            with writing(self.temporary / name, self.asker):
                (self.temporary / name).mkdir(parents=True, exist_ok=True)

    def part(self, number: int, step: str) -> Part | None:
        """A part that is whole after a step: "read" or "sorted"."""
        path = self.temporary / step / f"{number:05d}.json"
        try:
            return Part(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise damaged(self.asker, f"{path} cannot be read ({error})") from error

    def save_part(self, number: int, part: Part, step: str) -> None:
        """Keep that a part is whole after a step."""
        save_json(self.temporary / step / f"{number:05d}.json", asdict(part), self.asker)

    def shuffled(self, rows: int) -> Places:
        """Where each of so many rows goes by its number: its place in a random order, or that number."""
        if self.options.seed is None:
            return lambda first, count: np.arange(first, first + count, dtype=np.int64)
        order = Permutation(rows, self.options.seed, "repack")
        return lambda first, count: order(np.arange(first, first + count, dtype=np.int64))

    def sorter(
        self, number: int, first: int, places: Places, rows: int, size: int, parts: int
    ) -> SortedPart:
        """What sorts the rows of a part by their places.

        Args:
            number: of the part.
            first: number of its first row.
            places: where rows go.
            rows: how many go somewhere, in all.
            size: their bytes, about.
            parts: how many there are.
        """
        pieces = max(1, -(-(size + ROW_COST * rows) // self.unit))
        cuts = np.arange(1, pieces, dtype=np.int64) * rows // pieces
        return SortedPart(self.temporary, number, first, places, cuts, parts, self.unit, self.asker)

    def changed(self, first: int, rows: int, found: int) -> DataError:
        """What to raise where the input has other rows than were counted."""
        return DataError(
            f"{self.asker}(): the input has {found:,} rows from row {first:,} on, and {rows:,} were counted "
            "before: it has changed; call again"
        )


def remove_folder(path: Path) -> None:
    """Remove temporary files; what others have put into the folder stays."""
    for name in FOLDERS:
        shutil.rmtree(path / name, ignore_errors=True)
    with suppress(OSError):
        path.rmdir()
