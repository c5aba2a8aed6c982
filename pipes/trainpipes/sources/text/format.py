"""The interface of a text format: where its rows end, and how they are parsed.

``block_scan`` asks where rows end, once for each file; readers have pieces of files parsed, in any thread. A
format is a frozen dataclass of options, and can be pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.engine.layout import IntArray

Bytes = npt.NDArray[np.uint8]

#: Bytes of a row, unless a reader is told otherwise; and the most that Arrow holds in a text.
MAX_ROW_BYTES, MOST_ROW_BYTES = "256MB", 2_000_000_000


class Cutter(Protocol):
    """Finds where rows end, in the bytes of a file that it is given one part after the other."""

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        """Where rows end in the next part: the places behind them, int64 ``[rows]``.

        Args:
            data: the part, uint8 ``[bytes]``.
            newlines: places of its line feeds, int64.
        """
        ...

    def finish(self) -> bool:
        """Whether what follows the last stop is a row, too, at the end of the file.

        Raises:
            BadFileError: the file is cut off.
        """
        ...


@dataclass(frozen=True)
class Start:
    """What the first bytes of a file say.

    Args:
        at: where the first row begins.
        header: what is needed to read the rows, such as names of columns.
    """

    at: int = 0
    header: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Where some rows of a file stand, for messages.

    Args:
        path: the file.
        start: what its first bytes say.
        line: line feeds before it.
        begin: bytes before it, decompressed.
        row: rows before it.
        compressed: whether the file is.
    """

    path: str
    start: Start
    line: int
    begin: int
    row: int
    compressed: bool


class TextFormat(ABC):
    """A format of rows in text.

    Attributes:
        name: as messages call it.
        rule: what a row is, for messages.
        reader: the stage that reads it.
        between: bytes that may stand before and behind a row.
        max_row_bytes: of a row at most: what has more is no text, or made to fill the memory.
    """

    name: ClassVar[str]
    rule: ClassVar[str] = "rows are text"
    reader: ClassVar[str]
    between: ClassVar[bytes] = b"\r\n"

    max_row_bytes: int

    @property
    def settings(self) -> dict[str, Any]:
        """The options on which the ends of rows and the inferred types depend; of JSON types."""
        return {"max_row_bytes": self.max_row_bytes}

    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        """Where the rows of a file begin; None if its first bytes do not say, and more are to be shown.

        Args:
            head: the first bytes.
            whole: whether they are all.
            path: the file's name.

        Raises:
            BadFileError: it is no file of this format.
        """
        return Start()

    @abstractmethod
    def cutter(self, start: Start, path: str) -> Cutter:
        """What finds the ends of a file's rows, at the first of them or at any other."""

    @abstractmethod
    def parse(
        self, data: bytes, start: Start, path: str, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        """Rows as columns.

        Args:
            data: whole rows.
            start: what the file's first bytes said.
            path: the file's name.
            schema: columns to read, and types to hold to; None to find them.
            strict: whether a column that is not in the schema is an error; else it is left out.

        Raises:
            pyarrow.ArrowException: they are no rows of this format and of these types.
        """

    def infer(self, data: bytes, start: Start, path: str) -> tuple[pa.Schema, list[float]]:
        """The columns and types of rows, and the bytes of each column in memory."""
        table = self.parse(data, start, path, None)
        return table.schema, [float(column.nbytes) for column in table.columns]

    def drift(
        self, row: bytes, start: Start, path: str, schema: pa.Schema, strict: bool
    ) -> str | None:
        """How a row that cannot be read differs from the schema; None if it is no row of this format."""
        try:
            found, _ = self.infer(row, start, path)
        except (pa.ArrowException, UnicodeDecodeError):
            return None
        return unlike(found, schema, strict)

    def unreadable(self, schema: pa.Schema) -> str | None:
        """The column whose type the format cannot hold, in words; None if there is none."""
        for field in schema:
            try:
                self.empty_as(pa.schema([field]))
            except pa.ArrowNotImplementedError:
                return f"column {field.name!r} as {field.type}"
        return None

    def empty_as(self, schema: pa.Schema) -> None:  # noqa: B027  (formats whose types are fixed)
        """Read no rows with these types.

        Raises:
            pyarrow.ArrowNotImplementedError: one cannot be read.
        """

    def empty(self, start: Start) -> pa.Schema:
        """The columns of a file without rows."""
        return pa.schema([])

    def wider(self, one: pa.Field, other: pa.Field) -> pa.Field:
        """A field that holds the values of two.

        Raises:
            pyarrow.ArrowException: there is none.
        """
        pair = [pa.schema([one]), pa.schema([other])]
        return pa.unify_schemas(pair, promote_options="permissive").field(0)

    @property
    def fixed_schema(self) -> pa.Schema | None:
        """The schema that all rows of the format have; None where they say it themselves."""
        return None

    @property
    def each_names_columns(self) -> bool:
        """Whether every file says which columns it has, so that it can lack one."""
        return False


def unlike(found: pa.Schema, schema: pa.Schema, strict: bool, above: str = "") -> str | None:
    """How the types of a row differ from those that it should have; None if nothing is seen.

    >>> unlike(pa.schema([("a", pa.string())]), pa.schema([("a", pa.int64())]), True)
    "column 'a' is string here, and should be int64"
    """
    for field in found:
        name, place = f"{above}{field.name}", schema.get_field_index(field.name)
        if place < 0:
            if strict:
                return f"column {name!r} is new here"
            continue
        kind, own = schema.field(place).type, field.type
        while pa.types.is_list(kind) and pa.types.is_list(own):
            kind, own = kind.value_type, own.value_type
        if kind.equals(own) or pa.types.is_null(own):
            continue
        if pa.types.is_struct(kind) and pa.types.is_struct(own):
            said = unlike(pa.schema(list(own)), pa.schema(list(kind)), strict, f"{name}.")
            if said:
                return said
        elif _kind(own) != _kind(kind):
            return f"column {name!r} is {field.type} here, and should be {schema.field(place).type}"
    return None


def _kind(kind: pa.DataType) -> str:
    """Types of which one is read where another is written."""
    types = pa.types
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    return str(kind)
