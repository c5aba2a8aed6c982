"""Rows that a user names by file and number, as the numbers that a plan knows them by."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trainpipes._internal.checks import IntArray, wrong
from trainpipes._internal.progress import counted
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import hidden, shown
from trainpipes.interfaces.source import Place, RowSource
from trainpipes.sources.concat import WindowRows
from trainpipes.sources.mixture import ROW_MASK, Mixture

#: A row: its file and number there, a place from ``locate``, or its number where there are no files; or
#: all rows of a file, by its path.
RowName: TypeAlias = "tuple[str | os.PathLike[str], int] | Place | int | str | os.PathLike[str]"

RULE = (
    'a list of rows, each a tuple such as ("a.parquet", 17), a place from locate(), a number where rows '
    "are of no file, or a path for all rows of a file"
)
NONE = np.empty(0, dtype=np.int64)


#: In place of a row group: rows without files are counted over all of them.
OVER_ALL = -1


class Named(NamedTuple):
    """Where a row is said to be; without ``row`` all of the file. ``group``: the row group in which rows
    without files are numbered.
    """

    path: str | None
    source: str | None
    group: int | None
    row: int | None


@dataclass
class _File:
    """Rows of one file, or of one source without files, in stretches: the first row of each, how many there
    are, and the number of the first one. With ``held_by`` these numbers are of rows that others hold.
    """

    path: str | None
    source: str | None
    group: int | None
    held_by: Callable[[IntArray], tuple[IntArray, IntArray]] | None
    stretches: list[tuple[int, int, int]] = field(default_factory=list)

    def all_ids(self) -> IntArray:
        ids = np.concatenate([np.arange(n, n + count) for _, count, n in self.stretches])
        return np.unique(ids if self.held_by is None else self.held_by(ids)[0])

    def ids_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The numbers of some of its rows, and which of ``rows`` each is."""
        ids, which = self._ids_of(rows)
        if self.held_by is None:
            return ids, which
        ids, held = self.held_by(ids)
        return ids, which[held]

    def _ids_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        first, count, number = np.array(sorted(self.stretches), dtype=np.int64).T
        if (first[1:] >= first[:-1] + count[:-1]).all():
            piece = np.searchsorted(first, rows, side="right") - 1
            which = np.flatnonzero((piece >= 0) & (rows - first[piece] < count[piece]))
            piece = piece[which]
            return rows[which] - first[piece] + number[piece], which
        ids, places = [], []  # a file that is read twice
        for begin, stop, shift in zip(first, first + count, number - first, strict=True):
            which = np.flatnonzero((rows >= begin) & (rows < stop))
            ids.append(rows[which] + shift)
            places.append(which)
        return np.concatenate(ids), np.concatenate(places)


@dataclass(frozen=True)
class NumberedRows:
    """Rows that were named, and their numbers.

    Args:
        ids: in ascending order, each once, int64 ``[rows]``.
        bounds: cuts ``which``, int64 ``[rows + 1]``.
        which: what named each of ``ids``, by its place in the list, int64.
    """

    ids: IntArray
    bounds: IntArray
    which: IntArray

    def among(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Places in ``ids`` that hold one of these, and which of these: both int64."""
        if not len(self.ids):
            return NONE, NONE
        place = np.searchsorted(self.ids, ids)
        at = np.flatnonzero(self.ids[np.minimum(place, len(self.ids) - 1)] == ids)
        return at, place[at]


def numbered(inputs: Inputs, rows: Sequence[RowName], option: str) -> NumberedRows:
    """The numbers of rows that are named. Raises ConfigError where a file is not one of the pipeline's, or
    not the only one of that name.
    """
    by_file = _by_file(rows, option)
    files = _files(inputs, {os.path.basename(path) for (path, *_), _ in by_file if path})
    ids, which = [NONE], [NONE]
    for (file_name, whole), (places, rows_in_file) in by_file.items():
        numbers = np.array(places, dtype=np.int64)
        for file in _of_name(files, *file_name, option):
            if whole:
                every = file.all_ids()
                ids += [every] * len(numbers)
                which += [np.full(len(every), number) for number in numbers]
            else:
                found, of_rows = file.ids_of(np.array(rows_in_file, dtype=np.int64))
                ids.append(found)
                which.append(numbers[of_rows])
    every, names = np.concatenate(ids), np.concatenate(which)
    order = np.argsort(every, kind="stable")
    every, names = every[order], names[order]
    starts = np.flatnonzero(np.diff(every, prepend=-1))
    return NumberedRows(every[starts], np.append(starts, len(every)).astype(np.int64), names)


def named(name: RowName, option: str) -> Named:
    """Where a row is said to be."""
    path, source, group, row = None, None, None, None
    if isinstance(name, Place):
        path, row, source = name.path, name.row, name.source
        group = name.row_group if path is None else None
    elif isinstance(name, str | os.PathLike):
        path = os.fspath(name)
    elif isinstance(name, tuple | list) and len(name) == 2:
        path, row = os.fspath(name[0]) if isinstance(name[0], os.PathLike) else name[0], name[1]
    else:
        row, group = name, OVER_ALL
    is_path = isinstance(path, str) or (path is None and row is not None)
    is_number = isinstance(row, int | np.integer) and not isinstance(row, bool) and row >= 0
    if not is_path or not (row is None or is_number):
        raise wrong(option, RULE, name)
    return Named(path, source, group, None if row is None else int(row))


#: A path, a source and a row group, as in ``Named``.
_FileName: TypeAlias = "tuple[str | None, str | None, int | None]"
_Wanted: TypeAlias = "dict[tuple[_FileName, bool], tuple[list[int], list[int | None]]]"


def _by_file(rows: Sequence[RowName], option: str) -> _Wanted:
    """Of each file the rows that are named, and their places in the list; whole files apart."""
    is_list = hasattr(rows, "__iter__") and hasattr(rows, "__getitem__")
    alone = type(rows) is tuple and [*map(type, rows)] == [str, int]  # a row outside of a list
    if isinstance(rows, str | bytes | Mapping) or not is_list or alone:
        raise wrong(option, RULE, rows)
    of_files: _Wanted = defaultdict(lambda: ([], []))
    name: Any
    for number, name in enumerate(rows):
        path, row = name if type(name) is tuple and len(name) == 2 else (None, name)
        source, group = None, OVER_ALL if path is None else None
        # Of plain ones there may be millions.
        if not (type(row) is int and row >= 0 and (path is None or type(path) is str)):
            path, source, group, row = named(name, option)
        places, rows_in_file = of_files[(path, source, group), row is None]
        places.append(number)
        rows_in_file.append(row)
    return of_files


def _files(inputs: Inputs, names: set[str]) -> list[_File]:
    """The files of some last names, and sources without files."""
    files: dict[Any, _File] = {}
    held_by = None

    def add(name: _FileName, first: int, rows: int, number: int) -> None:
        files.setdefault(name, _File(*name, held_by)).stretches.append((first, rows, number))

    def add_place(place: Place, rows: int, number: int) -> None:
        if place.path is None:
            add((None, place.source, place.row_group), place.row or 0, rows, number)
        elif os.path.basename(place.path) in names:
            add((place.path, place.source, None), place.row or 0, rows, number)

    for leaf, tagged in _leaves(inputs):
        held_by = None
        if isinstance(leaf.source, WindowRows):
            held_by = partial(_windows_of, leaf.source, tagged(0))
            below = replace(leaf.chain, skip_rows=0, stop_rows=None)
            leaf, tagged = Inputs(below, leaf.source.rows, leaf.schemas, leaf.name), int
        if not isinstance(leaf.source, RowSource):
            add((None, leaf.name, OVER_ALL), 0, ROW_MASK, tagged(0))
            add_place(leaf.place_of(0), ROW_MASK, tagged(0))
            continue
        firsts, lengths = leaf.blocks.firsts, leaf.source.lengths
        blocks = np.flatnonzero(lengths).tolist()
        for block in counted(blocks, "looking for the files", len(blocks), "blocks"):
            first, stop = int(firsts[block]), int(firsts[block]) + int(lengths[block])
            begin, end = leaf.places_of(first), leaf.places_of(stop - 1)
            if begin[0].path is None:
                add((None, leaf.name, OVER_ALL), first, stop - first, tagged(first))
            step = stop - first if _is_stretch(begin, end, stop - first) else 1
            for row in range(first, stop, step):
                for place in begin if row == first else leaf.places_of(row):
                    add_place(place, step, tagged(row))
    return list(files.values())


def _windows_of(source: WindowRows, first: int, rows: IntArray) -> tuple[IntArray, IntArray]:
    windows, which = source.holding(rows)
    return first + windows, which


def _is_stretch(begin: Sequence[Place], end: Sequence[Place], count: int) -> bool:
    """Whether the rows of a block are numbered one by one in a file, by its first and last row."""
    return len(begin) == len(end) and all(
        a.path == b.path and (b.row or 0) - (a.row or 0) == count - 1
        for a, b in zip(begin, end, strict=True)
    )


def _leaves(
    inputs: Inputs, tagged: Callable[[int], int] = lambda row: row
) -> Iterator[tuple[Inputs, Callable[[int], int]]]:
    """What a pipeline reads without the mixes, and how rows there are numbered above them."""
    mixture = inputs.source
    if not isinstance(mixture, Mixture):
        yield inputs, tagged
        return
    for name, part in inputs.mixed.items():

        def of_mix(row: int, name: str = name) -> int:
            return tagged(int(mixture.ids.of(name, np.array([row], dtype=np.int64))[0]))

        yield from _leaves(part, of_mix)


def _of_name(
    files: Sequence[_File], path: str | None, source: str | None, group: int | None, option: str
) -> Sequence[_File]:
    of_source = [f for f in files if source in (None, f.source) and f.group == group]
    if path is None:
        same = [file for file in of_source if file.path is None]
        if len(same) != 1:
            rule = (
                "rows of files by path, and numbers where all rows are of one source without files"
            )
            sources = [file.source for file in same]
            got, way = "a number", 'give a file and the number of the row in it: ("a.parquet", 17)'
            if same:
                got = f"a number for sources {shown(sources)}"
                way = f"give tp.Place(row=0, source={sources[0]!r}) for row 0 of it"
            raise wrong(option, rule, got, way)
        return same
    whole = {path, os.path.abspath(path)}
    same = [file for file in of_source if file.path in whole]
    same = same or [f for f in of_source if f.path is not None and f.path.endswith(f"/{path}")]
    paths = sorted({str(file.path) for file in same})
    if len(paths) != 1:
        way = "give more of the path of one, such as " + " or ".join(map(hidden, paths[:2]))
        way = way if paths else "print(pipe.explain()) names the pipeline's files"
        raise wrong(option, "rows of files that the pipeline reads, each of one name", path, way)
    return same
