"""The second step, where rows were kept as they came: which are dropped, where the others go, and each
part sorted by that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from trainpipes.order import IntArray
from trainpipes.prepare.repack.duplicates import DroppedRows, find_dropped, num_ranges
from trainpipes.prepare.repack.input_parts import Part, order_places, read_kept
from trainpipes.prepare.repack.sorted_keys import KeyRuns
from trainpipes.prepare.repack.sorted_runs import damaged, save_array
from trainpipes.prepare.repack.work import Work

__all__ = ["sorted_parts"]


def sorted_parts(work: Work, parts: Sequence[Part]) -> tuple[list[Part], int]:
    """Sort parts by the places of their rows.

    Args:
        work: of which this is a step.
        parts: whose rows were kept as they came.

    Returns:
        The parts, with their runs; and how many rows there are without those that are dropped.
    """
    rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
    dropped = _find_dropped(work, len(parts), rows)
    kept = rows - int(dropped.before(np.array([rows]))[0])
    order = None if work.order is None else _find_order(work, len(parts), rows, dropped)
    shuffled = work.shuffled(kept)

    def places(first: int, count: int) -> IntArray:
        if order is not None:
            return order_places(*order, first, first + count)
        gone = dropped.within(first, first + count) - first
        stays = np.ones(count, dtype=np.bool_)
        stays[gone] = False
        found = np.full(count, -1, dtype=np.int64)
        start = first - int(dropped.before(np.array([first]))[0])
        found[stays] = shuffled(start, count - len(gone))
        return found

    def sort(number: int) -> None:
        if work.part(number, "sorted") is not None:
            return
        before = parts[number]
        sorter = work.sorter(number, before.first, places, kept, size, len(parts))
        for held in read_kept(work.temporary, number, work.unit, work.asker):
            work.workers.go_on()
            sorter.add(held)
        part = sorter.close()
        if (part.rows, part.checksum) != (before.rows, before.checksum):
            raise damaged(work.asker, f"the rows of part {number} are not those that were kept")
        work.save_part(number, part, "sorted")
        with suppress(OSError):
            (work.temporary / "kept" / f"{number:05d}.arrow").unlink()

    done = 0
    for number, _ in work.workers.each(sort, range(len(parts))):
        done += parts[number].rows
        work.report("sorting rows" if order else "shuffling rows", done, rows)
    found = (work.part(number, "sorted") for number in range(len(parts)))
    return [part for part in found if part is not None], kept


def _find_dropped(work: Work, parts: int, rows: int) -> DroppedRows:
    """The rows that are there before."""
    if work.options.by is None:
        return DroppedRows([])
    stems = [work.temporary / "hashes" / f"{number:05d}" for number in range(parts)]
    ranges = num_ranges(rows, work.unit)
    # A run before, with another memory, may have had other ranges.
    folder = work.temporary / "dropped" / f"{ranges:05d}"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:05d}.npy" for number in range(ranges)]

    def find(number: int) -> None:
        work.workers.go_on()
        if not paths[number].exists():
            save_array(paths[number], find_dropped(stems, number, ranges), work.asker)

    for done, _ in enumerate(work.workers.each(find, range(ranges))):
        work.report("finding duplicates", (done + 1) * rows // ranges, rows)
    return DroppedRows([*paths, *(stem.with_name(f"{stem.name}-dropped.npy") for stem in stems)])


def _find_order(
    work: Work, parts: int, rows: int, dropped: DroppedRows
) -> tuple[list[Path], list[int]]:
    """Files of the places of rows in the order of their keys, and the first place in each."""
    assert work.order is not None
    keys = [work.temporary / "keys" / f"{number:05d}.arrow" for number in range(parts)]
    runs = KeyRuns(keys, work.order, work.unit, work.asker)
    folder = work.temporary / "order" / f"{len(runs):05d}"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:05d}.npy" for number in range(len(runs))]

    def find(number: int) -> None:
        work.workers.go_on()
        if not paths[number].exists():
            found = runs.rows(number)
            found = found[~dropped.among(found)]
            by_row = np.argsort(found, kind="stable")
            save_array(paths[number], np.stack([found[by_row], by_row], axis=1), work.asker)

    for done, _ in enumerate(work.workers.each(find, range(len(runs)))):
        work.report("sorting", (done + 1) * rows // len(runs), rows)
    lengths = [len(np.load(path, mmap_mode="r")) for path in paths]
    return paths, [0, *np.cumsum(lengths).tolist()][:-1]
