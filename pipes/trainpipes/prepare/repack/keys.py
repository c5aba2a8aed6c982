"""The order of rows that are sorted or without duplicates, found by DuckDB on disk. It gets the columns to
sort by, and 128-bit hashes of what makes rows equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.content_hash import row_hashes
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.storage.executor import cores

#: Rows at a time.
CHUNK = 1 << 20
#: Bytes that DuckDB needs, and for each of its threads.
LEAST_MEMORY = 64 << 20


class Keys:
    def __init__(
        self,
        folder: Path,
        sort: Sequence[str],
        descending: bool,
        by: Sequence[str] | None,
        memory: int,
        caller: str,
    ) -> None:
        import duckdb

        self._sort, self._by, self._caller = list(sort), by, caller
        self._descending = descending
        self._floats: set[int] = set()
        self._rows = 0
        self._memory = memory = max(memory, LEAST_MEMORY)
        config: dict[str, Any] = {
            "memory_limit": f"{max(memory // 2, LEAST_MEMORY)}B",  # while rows are read, too
            "threads": max(1, min(cores(), memory // LEAST_MEMORY)),
            "temp_directory": str(folder / "spilled"),
        }
        self._database = duckdb.connect(str(folder / "keys.duckdb"), config=config)
        # It would be printed among what the command prints.
        self._database.execute("SET enable_progress_bar = false")

    def add(self, table: pa.Table) -> None:
        columns = {"row": to_arrow(np.arange(self._rows, self._rows + len(table)))}
        for number, name in enumerate(self._sort):
            columns[f"key{number}"] = key = comparable(table[name])
            if not any(of(key.type) for of in ORDERED):
                raise SchemaError(
                    f"{self._caller}(sort): column {name!r} holds {table[name].type}, which has no "
                    "order that DuckDB keeps: sort by columns of numbers, text, bytes, bools or times",
                    stage=self._caller,
                )
            if pa.types.is_floating(key.type):
                self._floats.add(number)
        if self._by is not None:
            some = table.select(self._by) if self._by else table
            columns |= {f"hash{n}": to_arrow(row_hashes(some, n)) for n in (1, 2)}
        keys = pa.table(columns)
        self._database.register("next_keys", keys)
        if not self._rows:
            self._database.execute("CREATE TABLE keys AS SELECT * FROM next_keys LIMIT 0")
        self._database.execute("INSERT INTO keys SELECT * FROM next_keys")
        self._database.unregister("next_keys")
        self._rows += len(table)

    def order(self) -> int:
        statement = ranked(len(self._sort), self._floats, self._descending, self._by is not None)
        self._database.execute(f"SET memory_limit = '{self._memory}B'")
        found = self._database.execute(statement)
        return int(found.fetchall()[0][0])

    def places(self) -> Iterator[IntArray]:
        """Where each row goes, -1 for those that are dropped."""
        found = self._database.sql(
            f"SELECT coalesce(ranked.rowid, -1) FROM range({self._rows}) AS every(row) "
            "LEFT JOIN ranked ON ranked.row = every.row ORDER BY every.row"
        )
        for batch in found.to_arrow_reader(CHUNK):
            yield to_numpy(batch.column(0)).copy()

    def close(self) -> None:
        self._database.close()


def ranked(keys: int, floats: set[int], descending: bool, once: bool) -> str:
    """The statement that numbers the rows that stay, in order.

    >>> ranked(1, set(), True, False).split(" ORDER BY ")[1]
    'key0 DESC NULLS LAST, row'
    """
    by = []
    for number in range(keys):
        if number in floats and descending:  # DuckDB takes NaN for the largest number
            by.append(f"isnan(key{number}) NULLS LAST")
        by.append(f"key{number} {'DESC' if descending else 'ASC'} NULLS LAST")
    first = " WHERE row IN (SELECT min(row) FROM keys GROUP BY hash1, hash2)" if once else ""
    return f"CREATE TABLE ranked AS SELECT row FROM keys{first} ORDER BY {', '.join([*by, 'row'])}"


def comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind, types = column.type, pa.types
    if types.is_temporal(kind) and not types.is_interval(kind):
        return column.cast(pa.int64() if kind.bit_width == 64 else pa.int32())
    if types.is_float16(kind):
        return column.cast(pa.float32())
    return column


#: Types whose order DuckDB keeps.
ORDERED = (
    pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal128, pa.types.is_boolean, pa.types.is_null,
    pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
    pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary,
)  # fmt: skip
