"""``cache``: what stands before it is computed once, and kept on disk."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY

from trainpipes._internal.checks import Count, Text, local_path
from trainpipes.kinds.stage_kinds import CacheStage
from trainpipes.storage.cache import folder


class Cache(CacheStage):
    """Keeps on disk what the stages before it make of each row group.

    In: rows, before they are shuffled, batched or repeated, of a source with blocks: Parquet files or
    an Arrow table. Out: the same rows in the same order. Cursor: none of its own; a state loads with the
    cache and without it. The first time it costs the stages before it, on whole row groups, and disk for
    their uncompressed rows; from then on a memory-mapped read.

    A file of the cache holds a row group (a part of it, if that has more than 65,536 rows or 16 MiB) as
    an Arrow IPC stream with a checksum behind it. Its key is made of the data (the file's name below the
    data set's root, size, time of change or etag, footer, row group) and of the stages before the cache:
    their options, a tokenizer's content, and for a function its ``version=``, or its code with the code and
    values of yours that it uses.
    Processes, ranks and threads of one user may share a cache: each entry is made by one of them. A file
    appears when it is whole, and only its owner may read it; one that is cut short, damaged, or another
    user's is made again. Where the disk is full or the folder cannot be written, a warning says so once,
    and rows are made without the cache until it can be written.

    A function whose result differs from call to call or from epoch to epoch must come after the cache. Rows
    that a Python function returned are kept as Arrow columns: arrays and tuples come back as lists, and
    what Arrow cannot hold is refused.

    Args:
        path: the folder; by default that of the environment variable ``TRAINPIPES_CACHE``, else the
            user's, ``~/.cache/trainpipes`` on Linux.
        max_bytes: the most bytes of rows in the folder, over all pipelines that use it; rows used least
            recently are removed first. No limit if left out.
        version: changes the key. For functions before the cache that use files, services or packages which
            changed, or objects that do not say what they hold.
        enabled: False turns the cache off. ``TRAINPIPES_CACHE=off`` turns all caches off.

    Raises:
        ConfigError: the stage stands after ``shuffle``, ``batch`` or ``repeat``, or on a source without
            blocks; or a function uses an object that does not say what it holds, and there is no ``version``.
        SchemaError: a row that a function returned does not come back from Arrow as it was.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"text": ["hi", "é"]})).tokenize("bytes")
    >>> list(rows.cache(tempfile.mkdtemp()))
    [{'input_ids': [104, 105]}, {'input_ids': [195, 169]}]
    """

    free = frozenset({"path", "max_bytes", "version", "enabled"})

    path: str | os.PathLike[str] | None = None
    _: KW_ONLY
    max_bytes: Count | None = None
    version: Text | None = None
    enabled: bool = True

    def check(self) -> None:
        if self.path is not None:
            self._set(path=local_path(self.path, "cache(path)"))

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self.enabled and folder(self.path) is not None
