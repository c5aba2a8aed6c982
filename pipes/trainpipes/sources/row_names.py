"""Which file each row is from, under a name that stays when others are added."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainpipes.order import IntArray
from trainpipes.stages.row_hash import HashArray, RowNames

__all__ = ["file_names", "names_below", "row_names"]

MAGIC = "*?["


def row_names(plan: Any) -> RowNames:
    """The rows of a plan's source by file and number; by number alone where there are no files."""
    if plan.mixed:
        return _MixedNames(plan)
    files = getattr(plan.source, "file_of_block", None)
    if files is None:
        return RowNames(np.zeros(1, dtype=np.int64), [""])
    names = file_names(plan)
    block = np.searchsorted(files, np.arange(len(names)))
    return RowNames(plan.blocks.firsts[block], names)


class _MixedNames(RowNames):
    """Rows of a mix: who they are in their own source."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._names: dict[tuple[str, ...], RowNames] = {}

    def hashes(self, ids: IntArray) -> HashArray:
        found = np.empty(len(ids), dtype=np.uint64)
        for path, places, rows in self._plan.source.ids.split(ids):
            if path not in self._names:
                plan = self._plan
                for name in path:
                    plan = plan.mixed[name]
                self._names[path] = row_names(plan)
            found[places] = self._names[path].hashes(rows)
        return found


def file_names(plan: Any) -> list[str]:
    """The names of a plan's files; one of no letters where there are none."""
    source = plan.source
    if getattr(source, "file_of_block", None) is None:
        return [""]
    if hasattr(source, "relative_names"):
        return list(source.relative_names())
    urls = plan.stages[0].urls
    listed = source.files
    names = names_below([urls] if isinstance(urls, str) else urls, listed.names)
    return list(listed.relative_names() if names is None else names)


def names_below(urls: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Names of files relative to the folder that was asked for: a folder itself, the part of a glob
    before its first wildcard, a file's own folder; of several the one that holds all. None where
    names are not of that form.

    >>> names_below(["s3://b/data/*/x-*.parquet"], ["s3://b/data/en/x-1.parquet"])
    ['en/x-1.parquet']
    """
    known, roots = set(names), []
    for url in urls:
        whole = url.rstrip("/") if "://" in url else os.path.abspath(url)
        wild = min((whole.index(c) for c in MAGIC if c in whole), default=None)
        if whole in known:
            roots.append(whole.rpartition("/")[0])
        elif wild is not None:
            roots.append(whole[:wild].rpartition("/")[0])
        else:
            roots.append(whole)
    parts = [root.split("/") for root in roots]
    depth = 0
    while all(len(p) > depth and p[depth] == parts[0][depth] for p in parts):
        depth += 1
    root = "/".join(parts[0][:depth]) + "/"
    if not all(name.startswith(root) for name in names):
        return None
    return [name[len(root) :] for name in names]
