from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

from trainpipes._internal import checks
from trainpipes._internal.types import IntArray
from trainpipes.cache import folder
from trainpipes.columns.block import Block
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import CacheStage
from trainpipes.stages.block_cache import BlockCache, DropHoles


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
        max_bytes: the most bytes in the folder, such as ``"50GB"``, over all pipelines; least
            recently used rows go first.
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
    max_bytes: int | str | None = None
    version: checks.Text | None = None
    enabled: bool = True

    def check(self) -> None:
        if self.path is not None:
            self._set(path=checks.local_path(self.path, "cache(path)"))
        if self.max_bytes is not None:
            self._set(max_bytes=checks.byte_count(self.max_bytes, "cache(max_bytes)"))

    @property
    def on(self) -> bool:
        return self.enabled and folder(self.path) is not None

    def drop_holes(self) -> Stage:
        return DropHoles()

    def open_cache(
        self,
        source: RowSource,
        firsts: IntArray,
        stages: Sequence[Stage],
        apply: Callable[[Block], Block],
        holes: bool,
        listed: Any,
        first: Callable[[], Any],
    ) -> BlockCache:
        return BlockCache(source, firsts, stages, self, apply, holes, listed, first)
