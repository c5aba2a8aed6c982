"""Which file each row is from, under a name that stays when others are added."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainpipes.stages.row_hash import RowNames

__all__ = ["names_below", "row_names"]

MAGIC = "*?["


def row_names(plan: Any) -> RowNames:
    """The rows of a plan's source by file and number; by number alone where there are no files."""
    source = plan.source
    files = getattr(source, "file_of_block", None)
    if files is None:
        return RowNames(np.zeros(1, dtype=np.int64), [""])
    if hasattr(source, "relative_names"):
        names = source.relative_names()
    else:
        urls = plan.stages[0].options["urls"]
        listed = source.files
        names = names_below([urls] if isinstance(urls, str) else urls, listed.names)
        if names is None:
            names = listed.relative_names()
    block = np.searchsorted(files, np.arange(len(names)))
    return RowNames(plan.blocks.firsts[block], names)


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
