"""The second step, where rows were kept as they came: which are dropped, where the others go, and each
part sorted by that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.prepare.repack.duplicates import find_dropped, num_ranges
from trainpipes.prepare.repack.input_parts import Part, read_kept
from trainpipes.prepare.repack.sorted_keys import KeyRuns
from trainpipes.prepare.repack.temporary import TemporaryFiles, damaged
from trainpipes.prepare.repack.work import Work
from trainpipes.prepare.repack.workers import Tell, Workers


def sorted_parts(
    work: Work, workers: Workers, parts: Sequence[Part], tell_of: Callable[[str, int], Tell]
) -> tuple[list[Part], int]:
    """Sort parts by the places of their rows.

    Args:
        work: of which this is a step.
        workers: do the tasks.
        parts: whose rows were kept as they came.
        tell_of: gives what a job, by its name, is told of rows with; the number is of those done before.

    Returns:
        The parts, with their runs; and how many rows there are without those that are dropped.
    """
    firsts = np.cumsum([0, *(part.rows for part in parts)])
    there = work.parts("sorted")
    dropped: list[str] = []
    gone = np.zeros(len(parts), dtype=np.int64)  # rows of each part that are dropped
    if work.options.by is not None:
        ranges = num_ranges(int(firsts[-1]), work.unit)
        find = FindDropped(work, firsts, ranges)
        dropped = _done(find, workers, tell_of("finding duplicates", 0))
        gone += [part.again for part in parts]
        for edges in work.files.arrays([f"{stem}-parts.npy" for stem in dropped]):
            gone += np.diff(edges)
    kept = int(firsts[-1] - gone.sum())
    order: list[str] = []
    if work.order is not None:
        stems = [f"keys/{number:05d}" for number in range(len(parts))]
        runs = KeyRuns(work.files, stems, work.order, work.unit)
        every = [*(f"{stem}.npy" for stem in dropped), *_own(range(len(parts)), dropped)]
        sort_keys = FindOrder(work, firsts, len(runs), runs, every)
        order = _done(sort_keys, workers, tell_of("sorting", 0))
    size = sum(part.bytes for part in parts)
    sort = SortPart(
        work, firsts, firsts - np.append(0, np.cumsum(gone)), dropped, order, kept, size
    )
    missing = [(n, part) for n, part in enumerate(parts) if n not in there]
    job = "sorting rows" if order else "shuffling rows"
    tell = tell_of(job, sum(part.rows for part in there.values()))
    there |= {number: part for (number, _), part in workers.each(sort, missing, tell)}
    return [there[number] for number in range(len(parts))], kept


def _own(parts: Sequence[int], dropped: Sequence[str]) -> list[str]:
    """Files of the rows that parts have before themselves."""
    return [f"hashes/{number:05d}-dropped.npy" for number in parts if dropped]


def _done(find: Find, workers: Workers, tell: Tell) -> list[str]:
    """Do the tasks that are not done yet. Gives the names of what all have made."""
    files = find.work.files
    files.make(find.folder)
    names = [find.stem(number) for number in range(find.count)]
    there = files.names(find.folder)
    missing = [number for number, name in enumerate(names) if f"{name}.npy" not in there]
    for _ in workers.each(find, missing, tell):
        pass
    return names


@dataclass(frozen=True)
class Find(ABC):
    """Finds out about rows of all parts: each task about those of one range.

    Attributes:
        work: of which this is a step.
        firsts: the first row of each part, and the end.
        count: how many ranges there are.
    """

    work: Work
    firsts: IntArray
    count: int
    kept: ClassVar[str]
    title: ClassVar[str]

    def __call__(self, number: int, tell: Tell) -> None:
        tell(0)
        values, rows = self.find(number)
        _save_by_part(self.work.files, self.stem(number), values, rows, self.firsts)
        rows_in = int(self.firsts[-1])
        tell((number + 1) * rows_in // self.count - number * rows_in // self.count)

    @abstractmethod
    def find(self, number: int) -> tuple[Any, IntArray]:
        """What is known of some rows, and their numbers, ascending."""

    @property
    def folder(self) -> str:
        """Where what is found is kept. A run before, with another memory, may have had other ranges."""
        return f"{self.kept}/{self.count:05d}"

    def stem(self, number: int) -> str:
        """Name of what is found, without its end."""
        return f"{self.folder}/{number:05d}"

    def named(self, number: int) -> str:
        """What is made, for messages."""
        return self.title.format(f"{number} of {self.count}")


@dataclass(frozen=True)
class FindDropped(Find):
    """Finds rows that another part has before: of one range of hashes."""

    kept = "dropped"
    title = "range {} of the duplicates"

    def find(self, number: int) -> tuple[Any, IntArray]:
        stems = [f"hashes/{n:05d}" for n in range(len(self.firsts) - 1)]
        found = find_dropped(self.work.files, stems, number, self.count)
        return found, found


@dataclass(frozen=True)
class FindOrder(Find):
    """Finds the places of rows in the order of their keys: of one stretch of keys.

    Attributes:
        runs: the keys.
        dropped: files of numbers of rows that go nowhere.
    """

    runs: KeyRuns
    dropped: Sequence[str]
    kept = "order"
    title = "stretch {} of the sorted keys"

    def find(self, number: int) -> tuple[Any, IntArray]:
        found = self.runs.rows(number)
        gone = np.zeros(len(found), dtype=np.bool_)
        for own in self.work.files.arrays(self.dropped):
            if len(own):
                gone |= own[np.minimum(np.searchsorted(own, found), len(own) - 1)] == found
        found = found[~gone]
        by_row = np.argsort(found, kind="stable")
        found = found[by_row]
        return np.stack([found, by_row], axis=1), found


@dataclass(frozen=True)
class SortPart:
    """Sorts the rows of a part by their places.

    Attributes:
        work: of which this is a step.
        firsts: the first row of each part, and the end.
        before: how many rows that are not dropped come before each part, and in all.
        dropped: what ``FindDropped`` has found.
        order: what ``FindOrder`` has found; empty where rows are not sorted.
        kept: rows that are not dropped.
        size: bytes of all.
    """

    work: Work
    firsts: IntArray
    before: IntArray
    dropped: Sequence[str]
    order: Sequence[str]
    kept: int
    size: int

    def __call__(self, item: tuple[int, Part], tell: Tell) -> Part:
        number, before = item
        work = self.work
        places = self._places(number)
        sorter = work.sorter(
            number, before.first, lambda first, count: places[first - before.first :][:count],
            self.kept, self.size, len(self.firsts) - 1,
        )  # fmt: skip
        try:
            for held in read_kept(work.files, number, work.unit):
                sorter.add(held)
                tell(sum(map(len, held)))
            part = sorter.close()
        finally:
            sorter.abandon()
        if (part.rows, part.checksum) != (before.rows, before.checksum):
            raise damaged(work.asker, f"the rows of part {number} are not those that were kept")
        work.save_part(number, part, "sorted")
        work.files.remove(f"kept/{number:05d}.arrow")
        return part

    def named(self, item: tuple[int, Part]) -> str:
        """What is made, for messages."""
        return f"the sorted rows of part {item[0]} of the input"

    def _places(self, number: int) -> IntArray:
        """Where the rows of a part go; -1 for those that are dropped."""
        files, first = self.work.files, int(self.firsts[number])
        count = int(self.firsts[number + 1]) - first
        found = np.full(count, -1, dtype=np.int64)
        if self.order:
            start = 0
            for own, rows in _of_part(files, self.order, number, 2):
                found[own[:, 0] - first] = own[:, 1] + start
                start += rows
            return found
        stays = np.ones(count, dtype=np.bool_)
        for own, _ in _of_part(files, self.dropped, number, 1):
            stays[own[:, 0] - first] = False
        for own in files.arrays(_own([number], self.dropped)):
            stays[own - first] = False
        found[stays] = self.work.shuffled(self.kept)(
            int(self.before[number]), int(np.count_nonzero(stays))
        )
        return found


def _save_by_part(
    files: TemporaryFiles, stem: str, values: Any, rows: IntArray, firsts: IntArray
) -> None:
    """Keep what is known of some rows, which are ascending: ``stem.npy``, and ``stem-parts.npy`` with where
    each part's begin in it."""
    files.save_array(f"{stem}-parts.npy", np.searchsorted(rows, firsts).astype(np.int64))
    files.save_array(f"{stem}.npy", values)


def _of_part(files: TemporaryFiles, stems: Sequence[str], number: int, width: int) -> Any:
    """What is known of a part's rows, int64 ``[rows, width]``, from each of some files; and of how many rows
    each file knows."""
    edges = list(files.arrays([f"{stem}-parts.npy" for stem in stems]))
    starts, stops = ([int(own[number + n]) for own in edges] for n in (0, 1))
    names = [f"{stem}.npy" for stem in stems]
    found = files.stretches(names, starts, stops, np.int64, width)
    return zip(found, [int(own[-1]) for own in edges], strict=True)
