"""``cache``: rows kept on disk, and the files that they are kept in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal import checks
from trainpipes._internal.activity import count
from trainpipes._internal.checks import IntArray
from trainpipes.cache import LOCK, ROWS, SCHEMAS, folder, kept_file, path_of
from trainpipes.cache.kept_file import Store, locked
from trainpipes.columns.arrays import gathered, nests_fixed_lists, to_arrow, to_numpy
from trainpipes.columns.block import Block
from trainpipes.columns.payload import join_payloads
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.interfaces.contents import cache_key, digest_of
from trainpipes.interfaces.source import LooksAhead, Reader, RowSource, read_rows
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import Apply, CacheStage, RunStage

#: A column of ours: whether a row is there.
THERE = "trainpipes:there"


class DropHoles(RunStage, keeps_rows=False):
    """Leaves out rows that a stage below the cache has dropped: rows are dealt by their places in the
    files.
    """

    def process(self, run: Run) -> Run:
        data = run.block.data
        assert isinstance(data, pa.Table)
        if THERE not in data.column_names:  # the first rows, read past the cache for their types
            return run
        there = np.flatnonzero(to_numpy(data.column(THERE)))
        run_left = run if len(there) == len(run) else run.pick(there.astype(np.int64))
        assert isinstance(run_left.block.data, pa.Table)
        return run_left.with_block(
            run_left.block.with_data(run_left.block.data.drop_columns(THERE))
        )


def with_holes(table: pa.Table, places: IntArray, rows: int) -> pa.Table:
    place_of = np.full(rows, -1, dtype=np.int64)
    place_of[places] = np.arange(len(places))
    there = to_arrow(place_of >= 0)
    if not table.num_columns:
        return pa.table({THERE: there})
    spread = None
    if not any(map(nests_fixed_lists, table.schema.types)):
        with suppress(pa.ArrowNotImplementedError):  # of views
            spread = table.take(to_arrow(place_of, place_of < 0))
    if spread is None:
        nulls = [pa.nulls(1, kind) for kind in table.schema.types]
        longer = pa.concat_tables([table, pa.Table.from_arrays(nulls, schema=table.schema)])
        spread = gathered(longer, np.where(place_of < 0, len(table), place_of))
    return spread.append_column(THERE, there)


#: Most rows of a block in a file, and most bytes of them as they are read.
FILE_ROWS = 65_536
FILE_BYTES = 16 << 20
#: Seconds between two looks at the files of another process.
PAUSE = 0.01
#: Seconds after which files that another process has not finished are made here too.
PATIENCE = 120.0
#: A column of ours: the number of each row in its file's stretch of the block.
NUMBER = "trainpipes:row"


@dataclass(frozen=True)
class _File:
    """A file with rows ``begin`` to ``end`` of a block, of which ``start`` to ``stop`` are wanted."""

    block: int
    begin: int
    end: int
    start: int
    stop: int
    digest: str


#: Makes the rows from one to before another of a file.
Maker = Callable[[_File, int, int], Block]


class BlockCache:
    """The rows that stages below ``cache`` make of blocks, kept in files: see ``CachedBlocks``."""

    def __init__(
        self,
        source: RowSource,
        firsts: IntArray,
        stages: Sequence[Stage],
        options: Any,
        apply: Apply,
        holes: bool,
        listed: Any = None,
        first: Callable[[], Any] = lambda: None,
    ) -> None:
        root = folder(options.path)
        if root is None:
            raise ConfigError(
                f"{options}: TRAINPIPES_CACHE must stay as it was while the pipeline is at work, got one "
                "that keeps nothing: build the pipeline again"
            )
        self.holes, self._apply = holes, apply
        self._source, self._firsts = source, firsts
        self._options = options
        cure = "name another folder by cache(path=...) or TRAINPIPES_CACHE"
        self._store = Store(root, ROWS, options.max_bytes, "max_bytes", str(options), cure)
        self._by_place = any({"place", "row"} & {*stage.traits.depends_on} for stage in stages)
        self._listed = listed if self._by_place else None
        self._stages = digest_of(
            cache_key(stages, str(options), strict=options.version is None),
            options.version,
            None if source.schema is None else str(source.schema.remove_metadata()),
            first() if any(stage.traits.gives == "found types" for stage in stages) else None,
        )

    def describe(self) -> list[tuple[str, str]]:
        files = total = size = 0
        for block, length in enumerate(self._source.lengths.tolist()):
            for file in self._files(block, 0, length):
                total += 1
                with suppress(OSError):
                    size += self._store.path(file.digest).stat().st_size
                    files += 1
        said = f"{files:,} of {total:,} blocks kept, {size / 1e6:,.1f} MB"
        return [("cache", f"{self._store.root}: {said}")]

    def schema(self, key: str, find: Callable[[], pa.Schema]) -> pa.Schema:
        """A schema that is found from the first rows, and kept."""
        digest = digest_of("schema", self._stages, key, self._listed)
        path, about = path_of(self._store.root, SCHEMAS, digest), {"schema": digest}
        table = kept_file.read(path, about)
        if table is not None:
            return table.schema.remove_metadata()
        schema = find()
        with suppress(OSError):  # it is found again
            kept_file.write(path, [pa.Table.from_batches([], schema)], about)
        return schema

    def read(
        self, wanted: Iterable[tuple[int, int, int]], reader: Reader, apply: Apply | None = None
    ) -> Block:
        make = partial(self._make, reader, apply or self._apply)
        files = [file for stretch in wanted for file in self._files(*stretch)]
        blocks_of = {file: self._find(file) for file in files}
        missing = [file for file in files if blocks_of[file] is None]
        count("cached", len(files))
        count("cache hits", len(files) - len(missing))
        if missing and isinstance(reader, LooksAhead):
            reader.expect(list(dict.fromkeys(file.block for file in missing)))
        for wait in (False, True):
            for file in missing:
                if blocks_of[file] is None:
                    blocks_of[file] = self._obtain(file, make, wait)
        blocks = [
            self._wanted(file, block) for file, block in blocks_of.items() if block is not None
        ]
        tables = [block.data for block in blocks]
        return Block(join_payloads(tables), np.concatenate([block.ids for block in blocks]))

    def _wanted(self, file: _File, block: Block) -> Block:
        ids = self._firsts[file.block] + np.arange(file.start, file.stop, dtype=np.int64)
        low, high = np.searchsorted(block.ids, (ids[0], ids[-1] + 1)).tolist()
        block = block.slice(low, high)
        if not self.holes:
            return block
        assert isinstance(block.data, pa.Table)
        return Block(with_holes(block.data, block.ids - ids[0], len(ids)), ids)

    def _files(self, block: int, start: int, stop: int) -> Iterator[_File]:
        source = self._source
        length = int(source.lengths[block])
        size = (source.row_bytes or 0.0) * length
        if source.block_bytes is not None:
            size = float(source.block_bytes[block])
        count = min(length, max(-(-length // FILE_ROWS), int(-(-size // FILE_BYTES))))
        key = source.block_key(block)
        if key is None:
            raise ConfigError(
                f"{self._options} needs a key for each block of rows, and {type(source).__name__} "
                "has none: leave the cache out"
            )
        edges = [n * length // max(1, count) for n in range(count + 1)]
        for begin, end in pairwise(edges):
            if begin < stop and start < end:
                where = None
                if self._by_place:
                    place = str(source.place(block, begin))
                    where = [self._listed, place, int(self._firsts[block])]
                digest = digest_of(self._stages, key, where, begin, end)
                yield _File(block, begin, end, max(start, begin), min(stop, end), digest)

    def _find(self, file: _File) -> Block | None:
        table = kept_file.read(self._store.path(file.digest), {"rows": file.digest})
        if table is None:
            return None
        first = self._firsts[file.block] + file.begin
        if NUMBER not in table.column_names:
            return Block(table, np.arange(first, first + len(table), dtype=np.int64))
        numbers = to_numpy(table.column(NUMBER)).astype(np.int64)
        return Block(table.drop_columns(NUMBER), first + numbers)

    def _obtain(self, file: _File, make: Maker, wait: bool) -> Block | None:
        """At least the wanted rows of a file, made if it is not there; None if another makes it and not to
        ``wait``.
        """
        if (block := self._find(file)) is not None:
            return block
        path = self._store.path(file.digest)
        if self._store.is_off(path):
            return make(file, file.start, file.stop)
        with ExitStack() as stack:
            lock = locked(path.with_suffix(LOCK), PATIENCE if wait else 0, PAUSE)
            try:
                alone = stack.enter_context(lock)
            except OSError as error:
                self._store.failed(error)
                return make(file, file.start, file.stop)
            if (block := self._find(file)) is not None or not (alone or wait):
                return block
            fresh = make(file, file.begin, file.end)
            assert isinstance(fresh.data, pa.Table)
            table = fresh.data.combine_chunks()
            if len(table) < file.end - file.begin:
                numbers = fresh.ids - self._firsts[file.block] - file.begin
                table = table.append_column(NUMBER, to_arrow(numbers.astype(np.int32)))
            fill = partial(kept_file.fill, {"rows": file.digest}, [table], table.schema)
            self._store.make(path, fill)
            block = self._find(file)  # in the file it takes no memory of ours
            return fresh if block is None else block

    def _make(self, reader: Reader, apply: Apply, file: _File, start: int, stop: int) -> Block:
        data = read_rows(self._source, reader, file.block, start, stop)
        ids = self._firsts[file.block] + np.arange(start, stop, dtype=np.int64)
        return apply(Block(data, ids))


class Cache(CacheStage):
    """Keep on disk the rows that the stages before it make.

    Stands before ``shuffle``, ``batch`` and ``repeat``, on a source with blocks. Rows, order and
    states stay the same. An entry's key is made of the data (of files whose content no scan reads,
    such as images, by path, size and time; of those that rows name, by the names and ``folder=``) and of
    the stages before the cache: their options, a tokenizer's content, and a function's ``version=``, or
    its code with the code and values of yours that it uses. Put functions whose result differs from call
    to call after the cache. Processes and ranks of the same user may share a folder. A damaged entry is
    made again; a folder that cannot be written is logged once.

    Args:
        path: the folder; by default that of the environment variable ``TRAINPIPES_CACHE``, else
            ``~/.cache/trainpipes`` on Linux.
        max_bytes: the most bytes in the folder, such as ``"50GB"``, over all pipelines; least
            recently used rows go first.
        version: changes the key: for functions that use files or services that changed, or objects
            that do not identify their content.
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
        apply: Apply,
        holes: bool,
        listed: Any,
        first: Callable[[], Any],
    ) -> BlockCache:
        return BlockCache(source, firsts, stages, self, apply, holes, listed, first)
