"""Where rows go: by a seed, or by keys that DuckDB sorts on disk. It gets the columns to sort by, and 128-bit
hashes of what makes rows equal.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.content_hash import row_hashes
from trainpipes.errors import SchemaError
from trainpipes.filesystems.output_file import OutputFile
from trainpipes.filesystems.places import Place
from trainpipes.order.permutation import Permutation
from trainpipes.prepare.pieces import CALLER, few_tables
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.executor import cores
from trainpipes.writers.output_folder import FileInfo

#: Rows at a time.
CHUNK = 1 << 20
#: The file that says where rows go.
PLACES_FILE = "part-00000.places"
#: Times that rows are held while keys are read, with what is read ahead and DuckDB's own memory.
COPIES_OF_KEYS = 8
#: Bytes that DuckDB needs, and for each of its threads.
LEAST_MEMORY = 64 << 20
#: Types whose order DuckDB keeps.
ORDERED = (
    pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal128, pa.types.is_boolean, pa.types.is_null,
    pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
    pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary,
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """Which rows stay, and in which order."""

    seed: int | None
    sort: list[str]
    descending: bool
    drop_duplicates: bool | list[str]

    @property
    def has_keys(self) -> bool:
        return bool(self.sort) or self.drop_duplicates is not False

    @property
    def columns(self) -> list[str]:
        """The columns that are named."""
        alike = self.drop_duplicates
        return list(dict.fromkeys([*self.sort, *([] if isinstance(alike, bool) else alike)]))

    def statement(self, first: pa.Table) -> str:
        """What numbers the rows that stay, in order."""
        by = []
        for number, name in enumerate(self.sort):
            kind = _comparable(first[name]).type
            if not any(of(kind) for of in ORDERED):
                raise SchemaError(
                    f"{CALLER}(sort): column {name!r} holds {first[name].type}, which has no order that "
                    "DuckDB keeps: sort by columns of numbers, text, bytes, bools or times",
                    stage=CALLER,
                )
            if pa.types.is_floating(kind):  # DuckDB takes NaN for the largest number
                by.append(f"isnan(key{number}) NULLS LAST")
            by.append(f"key{number} {'DESC' if self.descending else 'ASC'} NULLS LAST")
        once = "WHERE row IN (SELECT min(row) FROM stored GROUP BY hash1, hash2)"
        which = "" if self.drop_duplicates is False else once
        return f"CREATE TABLE ranked AS SELECT row FROM stored {which} ORDER BY {', '.join([*by, 'row'])}"

    def keys(self, table: pa.Table, at: int) -> pa.Table:
        columns = {"row": to_arrow(np.arange(at, at + len(table)))}
        for number, name in enumerate(self.sort):
            columns[f"key{number}"] = _comparable(table[name])
        if (alike := self.drop_duplicates) is not False:
            some = table if alike is True else table.select(alike)
            columns |= {f"hash{n}": to_arrow(row_hashes(some, n)) for n in (1, 2)}
        return pa.table(columns)


@dataclass(frozen=True)
class Listed:
    """Where rows go, as a file in a folder says; asked for rows that come after each other."""

    folder: Place

    def __call__(self, rows: IntArray) -> IntArray:
        start, stop = 8 * int(rows[0]), 8 * int(rows[-1]) + 8
        return np.frombuffer(self.folder.read(PLACES_FILE, start, stop), dtype=np.int64)


def find_places(
    order: Order, statement: str, memory: int, place: Place,
    task: Any, file: OutputFile, rows: EpochRows,
) -> FileInfo:  # fmt: skip
    """Make the file that says where rows go, 8 bytes for each; -1 for those that are dropped."""
    import duckdb

    first, stop = task.given
    at, chunk, memory = 0, memory // COPIES_OF_KEYS, max(memory, LEAST_MEMORY)
    with ExitStack() as stack:
        folder = place.at("keys") if place.is_local else tempfile.mkdtemp(prefix="trainpipes-")
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        os.makedirs(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config: dict[str, Any] = {
            "memory_limit": f"{max(memory // 2, LEAST_MEMORY)}B",  # while rows are read, too
            "threads": max(1, min(cores(), memory // LEAST_MEMORY)),
            "temp_directory": f"{folder}/spilled",
        }
        database = stack.enter_context(duckdb.connect(f"{folder}/keys.duckdb", config=config))
        # It would be printed among what the command prints.
        database.execute("SET enable_progress_bar = false")
        for tables in few_tables(rows, first, stop, chunk):
            keys = order.keys(pa.concat_tables(tables), at)
            database.execute("CREATE TABLE IF NOT EXISTS stored AS SELECT * FROM keys LIMIT 0")
            database.execute("INSERT INTO stored SELECT * FROM keys")
            at += len(keys)
            file.advance(len(keys))
            tables.clear()
            del keys
        pa.default_memory_pool().release_unused()
        database.execute(f"SET memory_limit = '{memory}B'")
        kept = int(database.execute(statement).fetchall()[0][0])
        found = database.sql(
            f"SELECT coalesce(ranked.rowid, -1) FROM range({at}) AS every(row) "
            "LEFT JOIN ranked ON ranked.row = every.row ORDER BY every.row"
        )
        permuted = None if order.seed is None else Permutation(kept, order.seed, CALLER)
        for batch in found.to_arrow_reader(CHUNK):
            places = to_numpy(batch.column(0)).copy()
            stays = places >= 0
            if permuted is not None:
                places[stays] = permuted(places[stays])
            file.write(places.astype("<i8").tobytes())
    return FileInfo(kept, {})


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind, types = column.type, pa.types
    if types.is_temporal(kind) and not types.is_interval(kind):
        return column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
    if types.is_float16(kind):
        return column.cast(pa.float32())
    return column
