"""``cache``: what stands before it is computed once, and kept on disk."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY

from trainpipes._internal.checks import Count, Text, local_path
from trainpipes.kinds.stage_kinds import CacheStage
from trainpipes.storage.cache import folder


class Cache(CacheStage):
    """Keep on disk what the stages before it make of each row group.

    Stands before ``shuffle``, ``batch`` and ``repeat``, on a source with blocks. Rows, order and
    states are the same with and without it. The first pass runs the stages before it on whole row
    groups; later ones read a memory map.

    An entry is an Arrow stream with a checksum. Its key is made of the data (file name below the
    root, size, time of change or ETag, footer, row group) and of the stages before the cache: their
    options, a tokenizer's content, and for a function its ``version=``, or its code with the code
    and values of yours that it uses. Processes, ranks and threads of one user may share a folder. A
    damaged entry is made again. If the disk is full or the folder cannot be written, one warning
    says so and rows are made without the cache.

    Functions whose result differs from call to call must come after the cache. What Python
    functions return is kept as Arrow columns: arrays and tuples come back as lists.

    Args:
        path: the folder; by default that of the environment variable ``TRAINPIPES_CACHE``, else
            ``~/.cache/trainpipes`` on Linux.
        max_bytes: the most bytes in the folder, over all pipelines; least recently used rows are
            removed first.
        version: changes the key: for functions that use files, services or packages which changed,
            or objects that do not say what they hold.
        enabled: False turns the cache off. ``TRAINPIPES_CACHE=off`` turns all caches off.

    Raises:
        ConfigError: the stage stands after ``shuffle``, ``batch`` or ``repeat``, or on a source
            without blocks; or a function uses an object that does not say what it holds, and there
            is no ``version``.
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
        return self.enabled and folder(self.path) is not None
