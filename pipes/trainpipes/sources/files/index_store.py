"""Layouts of files, kept in an Arrow file while size and stamp stay. One process scans, the others wait."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes import cache
from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import warn_once
from trainpipes._internal.progress import Progress
from trainpipes.cache.kept_file import locked
from trainpipes.columns import arrays
from trainpipes.errors import ConfigError
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files.file_bytes import FileBytes, KeptFiles
from trainpipes.sources.files.file_reader import MAX_REQUESTS, each_file
from trainpipes.sources.files.formats import Layout, checked_layout
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.remote_bytes import fetch_small, open_bytes

log = logging.getLogger("trainpipes")

#: Local files of which none is kept, unless it is asked for: to read them takes milliseconds.
FEW = 64
#: Seconds to wait for another process that makes the index; a process that hangs is not waited for without
#: end.
PATIENCE = 600.0
#: Nanoseconds within which a disk may give two changes of a file the same time.
TICK = 10_000_000
#: Entries of files that are not listed now: most for each listed file, and most in any case.
OTHERS, SOME_OTHERS = 4, 10_000
#: Schemas of files scanned lately that others are compared with.
MOST_SCHEMAS = 16
#: A row for each file: its blocks' rows, starts and stops in a single array, and the rest of its layout.
COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("schema", pa.dictionary(pa.int32(), pa.binary())),
        ("blocks", pa.large_binary()),
        ("extra", pa.large_binary()),
    ]
)


@dataclass(frozen=True)
class Scan:
    """One file whose blocks are to be found."""

    file: int
    data: FileBytes
    known: Layout | None
    requests: Requests
    progress: Progress | None = None


class IndexStore:
    """The layouts of all files of a reader: those kept, and those that are found now."""

    def __init__(
        self,
        files: FileList,
        reader: str,
        format: str,
        key: str = "",
        index: str | bool | None = None,
        least_bytes: float = float("inf"),
    ) -> None:
        self.files, self._reader, self._format = files, reader, format
        self._about = {"layouts": 7, "format": format, "key": key}
        self._own = not isinstance(index, str)
        self.path = self._path(index, key, least_bytes)
        self.sizes: IntArray = files.sizes.copy()
        self.kept = KeptFiles()
        self._found: dict[int, Layout] = {}
        self._schemas: list[pa.Schema] = []  # of files scanned lately, each once

    def _path(self, index: str | bool | None, key: str, least_bytes: float) -> Path | None:
        root, files = cache.folder(), self.files
        if index is False or not len(files):
            return None
        # Stands for the lowest folder that holds all files, and for their cached layouts.
        shared = os.path.commonprefix(files.known_names()).rpartition("/")[0]  # noqa: RUF071  (cut at a "/")
        digest = hashlib.sha256(os.fsencode(f"{shared}\0{self._format}\0{key}")).hexdigest()[:32]
        if isinstance(index, str):
            named = Path(index).expanduser().absolute()
            is_file = index.endswith(cache.SUFFIX) or os.path.isfile(named)
            return named if is_file else named / f"{digest}{cache.SUFFIX}"
        if root is None:
            return None
        small = len(files) < FEW and int(files.sizes.sum()) < least_bytes
        if index is None and small and all(map(is_local, files.systems)):
            return None
        return cache.path_of(root, cache.FOOTERS, digest)

    @property
    def kept_in(self) -> str | None:
        return None if self.path is None else str(self.path)

    def layout(self, file: int) -> Layout:
        return self._found[file]

    def layouts(self) -> list[Layout]:
        return [self._found[file] for file in range(len(self.files))]

    def complete(
        self,
        scan: Callable[[Scan], Layout],
        caller: str,
        *,
        wanted: Sequence[int] | None = None,
        enough: Callable[[int, Layout], bool] | None = None,
        alone: bool = True,
        progress: Callable[[list[int]], Progress] | None = None,
        **how: Any,
    ) -> None:
        numbers, known = range(len(self.files)) if wanted is None else wanted, self._found

        def lacking() -> list[int]:
            good = enough or (lambda *_: True)
            return [n for n in numbers if n not in known or not good(n, known[n])]

        self._find()
        with self._alone(alone and any(map(self._can_be_kept, lacking()))):
            missing = lacking()
            if not missing:
                return
            read = 0 if self.path is None else _settled(self.files, missing)
            try:
                with progress(missing) if progress is not None else nullcontext() as bar:

                    def look(file: int, requests: Requests) -> None:
                        data = open_bytes(self.files, file, requests, self.kept)
                        layout = scan(Scan(file, data, known.get(file), requests, bar))
                        known[file] = self._with_shared_schema(layout)
                        self.sizes[file] = data.size

                    if self.files.cache is None:
                        asked = Requests(self.files.retry)
                        fetch_small(self.files, missing, self.kept, asked, MAX_REQUESTS)
                    each_file(
                        self.files, look, caller, self._format, wanted=missing, progress=bar, **how
                    )
            finally:
                self._save(
                    read
                )  # layouts read so far are not read again, even if the rest was in vain

    def forget(self) -> None:
        forget(self.path)

    def _with_shared_schema(self, layout: Layout) -> Layout:
        """Files of the same columns share a schema, which takes 290 bytes a column."""
        for schema in self._schemas:
            if schema.equals(layout.schema, check_metadata=True):
                return replace(layout, schema=schema)
        self._schemas = [*self._schemas[-MOST_SCHEMAS:], layout.schema]
        return layout

    def _find(self) -> None:
        if (table := self._load()) is None:
            return
        columns = (table.column(name).to_pylist() for name in ("path", "stamp", "size"))
        known = {key: row for row, key in enumerate(zip(*columns, strict=True))}
        files = self.files
        listed = zip(files.kept_names(), files.stamps, files.sizes.tolist(), strict=True)
        rows = {n: known[key] for n, key in enumerate(listed) if key[1] and key in known}
        self._found |= _layouts(table, rows)

    def _load(self) -> pa.Table | None:
        if self.path is None:
            return None
        try:
            return cache.kept_file.read(self.path, self._about, private=self._own)
        except cache.kept_file.ForeignError as error:
            raise ConfigError(
                f"{self._reader}(index={str(self.path)!r}) names a file that exists, but is not an index of "
                "trainpipes: name another one, or remove it",
                path=str(self.path),
            ) from error

    @contextmanager
    def _alone(self, alone: bool) -> Iterator[None]:
        root = cache.folder()
        with ExitStack() as stack:
            if alone and self.path is not None and root is not None:
                digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]
                with suppress(OSError):  # nothing depends on it
                    path = cache.path_of(root, cache.FOOTERS, digest).with_suffix(cache.LOCK)
                    stack.enter_context(locked(path, PATIENCE))
                self._find()
            yield

    def _can_be_kept(self, file: int) -> bool:
        return bool(self.files.stamps[file]) and self.files.sizes[file] >= 0

    def _save(self, read: int) -> None:
        files = self.files
        # A local file may have changed once more without another time.
        new = {n for n in files.local(self._found) if int(files.stamps[n]) >= read - TICK}
        known = [n for n in sorted(self._found) if self._can_be_kept(n) and n not in new]
        if self.path is None or not known:
            return
        parts = [_table_of(files, known, [self._found[n] for n in known])]
        earlier = self._load()  # others may have written since
        if earlier is not None:
            names = set(files.kept_names())
            others = [n for n, p in enumerate(earlier.column("path").to_pylist()) if p not in names]
            most = max(SOME_OTHERS, OTHERS * len(files))
            parts.append(earlier.take(arrays.to_arrow(np.array(others[-most:], dtype=np.int64))))
        try:
            whole = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
            cache.kept_file.write(self.path, [whole], self._about, private=self._own)
        except OSError as error:
            why = f"the index cannot be kept in {self.path} ({error.strerror or error})"
            if self._own:
                log.info("%s", why)
            else:
                way = "allow writing, or name another place"
                warn_once(f"{self._reader}(index): {why}, and files are looked at again: {way}")


def forget(path: Path | str | None) -> None:
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _settled(files: FileList, which: Sequence[int]) -> int:
    """Wait until new local files' times of change would show a change; return the time, ns."""
    left = (
        max((int(files.stamps[n]) for n in files.local(which)), default=0) + TICK - time.time_ns()
    )
    if 0 <= left <= TICK:
        time.sleep((left + TICK / 10) / 1e9)
    return time.time_ns()


def _table_of(files: FileList, which: Sequence[int], layouts: Sequence[Layout]) -> pa.Table:
    names = files.kept_names()
    numbers: dict[int, int] = {}  # of objects that many files share
    written: dict[bytes, int] = {}
    for layout in layouts:
        if id(layout.schema) not in numbers:
            content = layout.schema.serialize().to_pybytes()
            numbers[id(layout.schema)] = written.setdefault(content, len(written))
    blocks = [np.concatenate([each.rows, each.start, each.stop]).tobytes() for each in layouts]
    columns = {
        "path": arrays.python_to_arrow([names[n] for n in which], pa.string()),
        "stamp": arrays.python_to_arrow([files.stamps[n] for n in which], pa.string()),
        "size": arrays.to_arrow(files.sizes[list(which)]),
        "schema": pa.DictionaryArray.from_arrays(
            arrays.python_to_arrow([numbers[id(each.schema)] for each in layouts], pa.int32()),
            arrays.python_to_arrow(list(written), pa.binary()),
        ),
        "blocks": arrays.python_to_arrow(blocks, pa.large_binary()),
        "extra": arrays.python_to_arrow([each.extra for each in layouts], pa.large_binary()),
    }
    return pa.table(columns, schema=COLUMNS)


def _layouts(table: pa.Table, rows: dict[int, int]) -> dict[int, Layout]:
    schema = arrays.one_chunk(table.column("schema"))
    schemas = [pa.ipc.read_schema(each.as_buffer()) for each in schema.dictionary]
    schema_of = arrays.to_numpy(schema.indices).tolist()
    blocks, extra = (table.column(name).to_pylist() for name in ("blocks", "extra"))
    layouts = {}
    for file, row in rows.items():
        counts, start, stop = np.frombuffer(blocks[row], np.int64).reshape(3, -1)
        layouts[file] = checked_layout(counts, start, stop, schemas[schema_of[row]], extra[row])
    return layouts
