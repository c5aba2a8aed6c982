"""What all steps share: the options, where temporary files are, how much one task works on, and which parts
of the input are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from trainpipes.engine.permutation import Permutation
from trainpipes.errors import DataError
from trainpipes.prepare.repack.input_parts import Part, SortedPart
from trainpipes.prepare.repack.options import Options
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.sorted_keys import SortOrder
from trainpipes.prepare.repack.sorted_runs import Places
from trainpipes.prepare.repack.temporary import TemporaryFiles

#: Called with what is done, how much of it, and how much there is; None where nobody knows.
Report: TypeAlias = Callable[[str, int, int | None], None]

#: Bytes of rows in a file, about, where neither rows nor files are counted.
FILE_BYTES = 512 << 20


def unit_bytes(memory: int, tasks: int) -> int:
    """Bytes of rows that a task works on at a time, where so many share the memory. It holds four to six
    times as much."""
    return max(1, min(memory // (6 * tasks), FILE_BYTES))


@dataclass(frozen=True)
class Work:
    """What all steps share. Pickles.

    Attributes:
        options: what to do.
        files: temporary files.
        unit: bytes of rows that one task works on at a time.
    """

    options: Options
    files: TemporaryFiles
    unit: int

    @property
    def asker(self) -> str:
        """For messages."""
        return self.options.asker

    @cached_property
    def order(self) -> SortOrder | None:
        """By which rows are sorted; None where they are not."""
        options = self.options
        return SortOrder(options.sort, options.descending, self.asker) if options.sort else None

    def parts(self, step: str, numbers: Iterable[int] | None = None) -> dict[int, Part]:
        """The parts that are whole after a step, "read" or "sorted", by number; of all, or of some."""
        if numbers is None:
            there = self.files.names(step)
            numbers = sorted(int(name[len(step) + 1 :].removesuffix(".json")) for name in there)
        found = {}
        for number in numbers:
            name = f"{step}/{number:05d}.json"
            about = self.files.json(name)
            try:
                if about is not None:
                    found[number] = Part(**about)
            except TypeError as error:
                raise self.files.damaged(name, error) from error
        return found

    def save_part(self, number: int, part: Part, step: str) -> Part:
        """Keep that a part is whole after a step."""
        self.files.save_json(f"{step}/{number:05d}.json", asdict(part))
        return part

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
        runs = max(parts, pieces)
        return SortedPart(self.files, number, first, places, cuts, runs, self.unit)

    def changed(self, first: int, rows: int, found: int) -> DataError:
        """What to raise where the input has other rows than were counted."""
        return DataError(
            f"{self.asker}(): the input has {found:,} rows from row {first:,} on, and {rows:,} were counted "
            "before: it has changed; call again"
        )
