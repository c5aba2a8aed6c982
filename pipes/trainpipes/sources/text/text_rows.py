"""What rows of text are to the options of a reader: where they begin and end, and what is parsed of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from trainpipes._internal.checks import byte_count, require
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.sources.compressed import ReadAgain
from trainpipes.sources.files.format import Format
from trainpipes.sources.files.schema import unified
from trainpipes.sources.text.cutters import Cutter

#: Bytes of a row, unless a reader says otherwise; and the most that Arrow holds in a text.
MAX_ROW_BYTES, MOST_ROW_BYTES = "256MB", 2_000_000_000
#: What some programs write before UTF-8.
BOM = b"\xef\xbb\xbf"


class Start(NamedTuple):
    """The first row's place, the columns' names, and the delimiter or "array", by the first bytes."""

    at: int = 0
    names: Sequence[str] = ()
    kind: str = ""


def row_bytes(value: Any, option: str) -> int:
    most = byte_count(value, option)
    rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
    require(most <= MOST_ROW_BYTES, option, rule, value)
    return most


class TextRows(Format):
    """A format of rows in text, by the options of a reader; ``rule`` tells what a row is, bytes of
    ``between`` may surround one; with ``names_columns`` a file may lack a column. ``schema`` is that of all
    rows once it is known, ``inferred`` if it is not the user's; only ``strict`` refuses columns it lacks.
    """

    known_by_blocks = True
    reader: ClassVar[str]
    rule: ClassVar[str] = "rows are text"
    between: ClassVar[bytes] = b"\r\n"
    names_columns: ClassVar[bool] = False
    #: The type of a column without a single value.
    empty: ClassVar[pa.DataType] = pa.null()

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.block_rows: int | None = options["block_rows"]
        self.max_row_bytes = row_bytes(options["max_row_bytes"], "max_row_bytes")
        self.inferred = "schema" in options and options["schema"] is None
        self.schema: pa.Schema | None = None
        self.strict, self.replace = False, options["errors"] == "replace"
        self.leaves_out = leaves_out(options["on_error"])
        self.again = ReadAgain()

    @abstractmethod
    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        """Where the rows of a file begin; None if more bytes must be seen. Raises BadFileError."""

    @abstractmethod
    def cutter(self, start: Start) -> Cutter:
        """What finds the ends of a file's rows, at the first of them or at any other."""

    @abstractmethod
    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        """Rows as columns, of inferred types if ``schema`` is None. Raises pyarrow.ArrowException."""

    def infer(self, data: bytes, start: Start) -> tuple[pa.Schema, list[float]]:
        """The columns and types of rows, and the bytes of each column in memory."""
        table = self.parse(data, start, None)
        sizes = [float(column.nbytes) for column in table.columns]
        return pa.schema([self.as_written(field) for field in table.schema]), sizes

    def as_written(self, field: pa.Field) -> pa.Field:
        """A field that was found, in the type that the file means."""
        return field

    def wider(self, one: pa.Field, other: pa.Field) -> pa.Field:
        return unified(one, other)
