from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainpipes._internal.types import IntArray
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.row_hash import HashArray, RowNames
from trainpipes.errors import known_name
from trainpipes.interfaces.source import RowSource

MAGIC = "*?["


def row_names(inputs: Inputs) -> RowNames:
    """Rows by file and number; by number alone without files."""
    if inputs.mixed:
        return _MixedNames(inputs)
    source = inputs.source
    if isinstance(source, RowSource) and source.named_by is not None:
        named, skipped = source.named_by
        return row_names(named).shifted(skipped)
    files = source.file_of_block if isinstance(source, RowSource) else None
    if files is None:
        return RowNames(np.zeros(1, dtype=np.int64), [""])
    names = file_names(inputs)
    block = np.searchsorted(files, np.arange(len(names)))
    return RowNames(inputs.blocks.firsts[block], names)


class _MixedNames(RowNames):
    """The names of a mix's rows, each by those of its source."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._source: Any = inputs.source
        self._names: dict[tuple[str, ...], RowNames] = {}

    def hashes(self, ids: IntArray) -> HashArray:
        hashes = np.empty(len(ids), dtype=np.uint64)
        for path, places, rows in self._source.ids.split(ids):
            if path not in self._names:
                inputs = self._inputs
                for name in path:
                    inputs = inputs.mixed[name]
                self._names[path] = row_names(inputs)
            hashes[places] = self._names[path].hashes(rows)
        return hashes


def file_names(inputs: Inputs) -> list[str]:
    if not isinstance(inputs.source, RowSource) or inputs.source.file_of_block is None:
        return [""]
    source: Any = inputs.source
    if hasattr(source, "relative_names"):
        return list(source.relative_names())
    urls = inputs.chain.urls
    listed = source.files
    names = names_below([urls] if isinstance(urls, str) else urls, listed.known_names())
    return list(listed.relative_names() if names is None else names)


def names_below(urls: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Names relative to the listed folders; None for names of other forms.

    >>> names_below(["s3://b/data/*/x-*.parquet"], ["s3://b/data/en/x-1.parquet"])
    ['en/x-1.parquet']
    """
    known, roots = set(names), []
    for url in urls:
        whole = known_name(url).rstrip("/") if "://" in url else os.path.abspath(url)
        wild = min((whole.index(c) for c in MAGIC if c in whole), default=None)
        if whole in known:
            roots.append(whole.rpartition("/")[0])
        elif wild is not None:
            roots.append(whole[:wild].rpartition("/")[0])
        else:
            roots.append(whole)
    parts = [root.split("/") for root in roots]
    root = "/".join(os.path.commonprefix(parts)) + "/"  # noqa: RUF071  (of lists)
    if not all(name.startswith(root) for name in names):
        return None
    return [name[len(root) :] for name in names]
