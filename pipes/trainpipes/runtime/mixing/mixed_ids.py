"""Numbers of rows of several sources: which source, and which row of it.

A number has the row's own in its lower 40 bits, and a tag of the source above: a hash of its name, so that
rows keep their numbers when sources are added or taken away. Sources of a source have tags of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from trainpipes.order import IntArray

__all__ = ["MixedIds"]

ROW_BITS, TAG_BITS = 40, 23
ROW_MASK = (1 << ROW_BITS) - 1

#: Names that lead to a source, from the outermost mix inwards.
Path = tuple[str, ...]


class MixedIds:
    """The numbers of the rows of a mix.

    Args:
        below: for each source its own numbering if it is a mix itself, else None.

    >>> ids = MixedIds({"code": None, "web": None})
    >>> ids.of("web", np.array([7])).tolist()
    [4104363656790147079]
    >>> ids.find(4104363656790147079)
    (('web',), 7)
    """

    def __init__(self, below: Mapping[str, MixedIds | None]) -> None:
        self._below = dict(below)
        self._tags: dict[Path, int] = {}
        self._paths: dict[int, Path] = {}
        for path in sorted(self._all_paths()):
            tag = _tag(path)
            while tag in self._paths:
                tag = (tag + 1) % (1 << TAG_BITS)
            self._tags[path] = tag
            self._paths[tag] = path
        self._inner: dict[str, tuple[IntArray, IntArray]] = {}
        for name, ids in self._below.items():
            if ids is not None:
                inner = sorted(ids._paths)
                outer = [self._tags[name, *ids._paths[tag]] for tag in inner]
                self._inner[name] = np.array(inner), np.array(outer)

    def _all_paths(self) -> Iterable[Path]:
        for name, ids in self._below.items():
            yield from [(name,)] if ids is None else [(name, *path) for path in ids._paths.values()]

    def of(self, name: str, rows: IntArray) -> IntArray:
        """The numbers of a source's rows, given by its own numbers of them: int64 ``[rows]``."""
        found = self._inner.get(name)
        if found is None:
            return rows | np.int64(self._tags[(name,)] << ROW_BITS)
        inner, outer = found
        tags: IntArray = outer[np.searchsorted(inner, rows >> ROW_BITS)]
        return (tags << ROW_BITS) | (rows & ROW_MASK)

    def split(self, rows: IntArray) -> Iterator[tuple[Path, IntArray, IntArray]]:
        """For each source among some rows: its path, places of its rows, and their own numbers."""
        tags = rows >> ROW_BITS
        for tag in np.unique(tags).tolist():
            places = np.flatnonzero(tags == tag)
            yield self._paths[tag], places, rows[places] & ROW_MASK

    def find(self, row: int) -> tuple[Path, int]:
        """The source of a row, and its number there."""
        return self._paths[row >> ROW_BITS], row & ROW_MASK


def _tag(path: Path) -> int:
    digest = hashlib.sha256(json.dumps(path).encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << TAG_BITS)
