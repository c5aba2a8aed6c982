"""What is kept of Parquet footers: a row for each file, and of its footer what ``index.py`` needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart, one_chunk, python_to_arrow, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.index_file import IndexKind

#: Bytes of the shortest footer, more rows than a row group has, and more rows or bytes than a data set.
SMALLEST, MOST_ROWS, MOST = 8, 1 << 32, 2.0**62

COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("footer", pa.int64()),
        ("checksum", pa.int64()),
        ("rows", pa.list_(pa.int64())),
        ("group_bytes", pa.list_(pa.int64())),
        ("schema", pa.dictionary(pa.int32(), pa.binary())),
        ("sampled_rows", pa.int64()),
        ("leaves", pa.list_(pa.string())),
        ("leaf_bytes", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class Footer:
    """What is kept of one footer.

    Args:
        size: bytes of the file.
        footer: bytes of the footer.
        checksum: CRC-32 of the footer.
        rows: rows of each row group.
        group_bytes: uncompressed bytes of each row group.
        schema: the file's Arrow schema.
        sampled_rows: rows of the row groups that sizes in memory were told of.
        leaves: paths of the Parquet columns; empty where nothing was sampled.
        leaf_bytes: bytes of the sampled rows in memory, of each of these; NaN where not asked for.
    """

    size: int
    footer: int
    checksum: int
    rows: list[int]
    group_bytes: list[int]
    schema: pa.Schema
    sampled_rows: int = 0
    leaves: tuple[str, ...] = ()
    leaf_bytes: tuple[float, ...] = ()


class FooterTable:
    """Footers of several files, as columns.

    Args:
        table: with the columns of ``COLUMNS``.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table.unify_dictionaries().combine_chunks()

    def __len__(self) -> int:
        return len(self.table)

    @staticmethod
    def of(footers: Sequence[Footer], names: Sequence[str], stamps: Sequence[str]) -> FooterTable:
        """Footers of files with these names and stamps."""
        values = {"path": names, "stamp": stamps}
        for name in set(COLUMNS.names) - {*values, "schema"}:
            values[name] = [getattr(footer, name) for footer in footers]
        columns = {name: python_to_arrow(values[name], COLUMNS.field(name).type) for name in values}
        schemas: list[pa.Schema] = []
        numbers = []
        for footer in footers:
            equal = (n for n, schema in enumerate(schemas) if schema.equals(footer.schema))
            number = next(equal, len(schemas))
            if number == len(schemas):
                schemas.append(footer.schema)
            numbers.append(number)
        written = python_to_arrow(
            [schema.serialize().to_pybytes() for schema in schemas], pa.binary()
        )
        places = python_to_arrow(numbers, pa.int32())
        columns["schema"] = pa.DictionaryArray.from_arrays(places, written)
        return FooterTable(pa.table(columns, schema=COLUMNS))

    def column(self, name: str) -> Any:
        """A column's values as one Arrow array."""
        return one_chunk(self.table.column(name))

    def numbers(self, name: str) -> IntArray:
        """A column of integers, int64 ``[files]``."""
        return to_numpy(self.column(name)).astype(np.int64)

    def flat(self, name: str) -> tuple[IntArray, IntArray]:
        """A column of lists of integers: all of them, and where each file's begin, int64 ``[files + 1]``."""
        values, starts = apart(self.column(name))
        return to_numpy(values).astype(np.int64), starts.astype(np.int64)

    def schemas(self) -> list[tuple[int, pa.Schema]]:
        """The first file with each schema, and that schema."""
        column = self.column("schema")
        if not len(column):
            return []
        numbers, firsts = np.unique(to_numpy(column.indices), return_index=True)
        written = column.dictionary
        return [
            (first, pa.ipc.read_schema(written[number].as_buffer()))
            for first, number in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True))
        ]

    def sample(self, file: int) -> tuple[int, list[str], list[float]]:
        """Rows sampled of a file, its Parquet columns, and bytes of these rows in each."""
        row = (
            self.table.slice(file, 1)
            .select(["sampled_rows", "leaves", "leaf_bytes"])
            .to_pylist()[0]
        )
        return row["sampled_rows"], row["leaves"], row["leaf_bytes"]

    def take(self, index: IntArray) -> FooterTable:
        return FooterTable(self.table.take(to_arrow(index)))

    @staticmethod
    def join(parts: Sequence[FooterTable]) -> FooterTable:
        return FooterTable(pa.concat_tables([part.table for part in parts]))


def with_more(footer: Footer, leaves: Sequence[str], leaf_bytes: Sequence[float]) -> Footer:
    """A footer with sizes of columns that were asked for earlier, too."""
    if tuple(leaves) != footer.leaves:
        return footer
    pairs = zip(footer.leaf_bytes, leaf_bytes, strict=True)
    return replace(footer, leaf_bytes=tuple(old if new != new else new for new, old in pairs))


def _is_sound(table: pa.Table) -> bool:
    """Whether a table can be what footers say: nothing missing, no number out of its range."""
    if not table.schema.equals(COLUMNS) or any(c.null_count for c in table.columns):
        return False
    table.validate(full=True)
    footers = FooterTable(table)
    numbers = {name: footers.numbers(name) for name in ("size", "footer", "checksum")}
    lists = [footers.column(n) for n in ("rows", "group_bytes", "leaves", "leaf_bytes")]
    if any(column.flatten().null_count for column in lists):
        return False
    counts = [to_numpy(column.value_lengths()) for column in lists]
    rows, starts = footers.flat("rows")
    sizes, _ = footers.flat("group_bytes")
    leaves = to_numpy(footers.column("leaf_bytes").flatten())
    sampled = footers.numbers("sampled_rows")
    try:
        footers.schemas()
    except (pa.ArrowException, OSError):
        return False
    return bool(
        (counts[0] == counts[1]).all()
        and (counts[2] == counts[3]).all()
        and (numbers["footer"] >= SMALLEST).all()
        and (numbers["footer"] <= numbers["size"]).all()
        and ((numbers["checksum"] >= 0) & (numbers["checksum"] < 1 << 32)).all()
        and ((rows >= 0) & (rows < MOST_ROWS)).all()
        and (sizes >= 0).all()
        and not (leaves < 0).any()  # some are NaN
        and max(np.sum(each, dtype=np.float64) for each in (rows, sizes, leaves[leaves == leaves]))
        < MOST
        and (sampled >= 0).all()
        and (sampled <= np.add.reduceat(np.append(rows, 0), starts[:-1])).all()
    )


FOOTERS = IndexKind("read_parquet", "footers", {"footers": 1}, COLUMNS, _is_sound)
