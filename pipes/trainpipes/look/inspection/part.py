"""A file as it is inspected: how many rows and blocks it has, and how to read some of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.kinds.source import RowSource
from trainpipes.look.inspection.inspection import BadFile
from trainpipes.sources.files.schema import plain

__all__ = ["ColumnFacts", "Found", "Part", "one_type", "own_reason", "rows_with", "types_of"]


@dataclass
class Part:
    """A file, or several that are read as one.

    Args:
        name: of the file.
        size: its bytes.
        rows: how many it has.
        counted: whether they were counted; else ``rows`` is an estimate.
        lengths: rows of each block that can be read, int64 ``[blocks]``.
        block_bytes: bytes of each before they are compressed, float64 ``[blocks]``.
        row_bytes: of an average row in memory.
        schema: its columns.
        open: makes what reads its blocks.
    """

    name: str
    size: int
    rows: int
    counted: bool
    lengths: IntArray
    block_bytes: npt.NDArray[np.float64]
    row_bytes: float
    schema: pa.Schema
    open: Callable[[], RowSource]


@dataclass
class ColumnFacts:
    """What footers say of a column.

    Args:
        bytes: compressed, of the row groups that were looked at.
        rows: in row groups of which they say how many values are null.
        nulls: of these.
        least: the least and the greatest value so far.
        most: see there.
        groups: row groups that note their least and greatest value.
        constant: of these, those in which both are the same.
        values: the values of those, up to some.
    """

    bytes: int = 0
    rows: int = 0
    nulls: int = 0
    least: Any = None
    most: Any = None
    groups: int = 0
    constant: int = 0
    values: set[Any] = field(default_factory=set)


@dataclass
class Found:
    """What was found out without reading rows.

    Args:
        called: what blocks are called.
        parts: files that can be read, in order.
        bad: files that cannot.
        codecs: bytes by what they are compressed with.
        columns: what footers say of each column, by name.
        looked: the part of all rows that ``columns`` and ``codecs`` were told of.
        passed_over: files that were not looked at, because all of their bytes would have to be read.
        memory_maps: how many there are, in place of files.
    """

    called: str
    parts: list[Part] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    codecs: Counter[str] = field(default_factory=Counter)
    columns: dict[str, ColumnFacts] = field(default_factory=dict)
    looked: float = 1.0
    passed_over: list[str] = field(default_factory=list)
    memory_maps: int = 0

    @property
    def lengths(self) -> IntArray:
        """Rows of all blocks, int64 ``[blocks]``."""
        return np.concatenate([np.empty(0, np.int64), *(part.lengths for part in self.parts)])

    @property
    def block_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes of all blocks, float64 ``[blocks]``."""
        return np.concatenate([np.empty(0), *(part.block_bytes for part in self.parts)])

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def schemas(self) -> dict[pa.Schema, int]:
        """The rows of each schema that files have."""
        found: dict[pa.Schema, int] = {}
        for part in self.parts:
            found[part.schema] = found.get(part.schema, 0) + part.rows
        return found

    @property
    def row_bytes(self) -> float:
        """Bytes of an average row in memory."""
        total = sum(part.row_bytes * part.rows for part in self.parts)
        return total / self.rows if self.rows else 0.0


def rows_with(schemas: Mapping[pa.Schema, int], columns: Iterable[str]) -> int:
    """Rows of the files that have all of these columns."""
    needed = {*columns}
    return sum(rows for schema, rows in schemas.items() if needed <= {*schema.names})


def types_of(schemas: Iterable[pa.Schema], column: str) -> list[pa.DataType]:
    """Each type that a column has in some file."""
    types: list[pa.DataType] = []
    for schema in schemas:
        own = [field.type for field in schema if field.name == column]
        types += [kind for kind in own[:1] if not any(kind.equals(one) for one in types)]
    return types


def one_type(types: list[pa.DataType]) -> list[pa.DataType]:
    """The type that holds all of these; where there is none, each."""
    if len(types) == 1:
        return types
    fields = [plain(pa.field("", kind)) for kind in types]
    try:
        schema = pa.unify_schemas(
            [pa.schema([field]) for field in fields], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return types
    return [schema.field(0).type]


def own_reason(name: str, error: Exception) -> str:
    """What an error says of one file, without the frame of a message about many, and without what to write in
    a pipeline that goes on without the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    inner = next(
        (line for line in lines if line.startswith((f"{name}: ", f"{name}, "))), " ".join(lines)
    )
    said = inner.removeprefix(f"{name}: ").removeprefix(f"{name}, ")
    return re.split(
        r"[;,]? (?:or )?(?:replace the file, or )?leave (?:it|the file|them) out with ", said
    )[0]
