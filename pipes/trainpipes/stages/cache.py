from __future__ import annotations

import os
from dataclasses import KW_ONLY

from trainpipes._internal.checks import Count, Text, local_path
from trainpipes.kinds.stage_kinds import CacheStage
from trainpipes.storage.cache import folder


class Cache(CacheStage):
    """Keep on disk the rows that the stages before it make.

    Stands before ``shuffle``, ``batch`` and ``repeat``, on a source with blocks. Rows, order and
    states stay the same. An entry's key is made of the data and of the stages before the cache:
    their options, a tokenizer's content, and a function's ``version=``, or its code with the code
    and values of yours that it uses. Put functions whose result differs from call to call after the
    cache. Processes and ranks of one user may share a folder. A damaged entry is made again; a
    folder that cannot be written is logged once.

    Args:
        path: the folder; by default that of the environment variable ``TRAINPIPES_CACHE``, else
            ``~/.cache/trainpipes`` on Linux.
        max_bytes: the most bytes in the folder, over all pipelines; least recently used rows go
            first.
        version: changes the key: for functions that use files or services that changed, or objects
            that do not say what they hold.
        enabled: False turns the cache off. ``TRAINPIPES_CACHE=off`` turns all caches off.

    Raises:
        ConfigError: the stage cannot stand there; or a function uses an object that does not say
            what it holds, and there is no ``version``.
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
