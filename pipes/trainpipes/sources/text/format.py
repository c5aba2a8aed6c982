from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.schema import unified

Bytes = npt.NDArray[np.uint8]

#: Bytes of a row, unless a reader says otherwise; and the most that Arrow holds in a text.
MAX_ROW_BYTES, MOST_ROW_BYTES = "256MB", 2_000_000_000
#: What some programs write before UTF-8.
BOM = b"\xef\xbb\xbf"
FEED, RETURN, SPACE, TAB = 10, 13, 32, 9


class Cutter(Protocol):
    """Finds where rows end, in consecutive parts of a file."""

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        """The places behind the rows that end in this part, int64; ``newlines`` are its line feeds."""
        ...

    def finish(self) -> bool:
        """Whether a row follows the last stop, at the end of the file."""
        ...


class LineCutter:
    def __init__(self, filled: bool) -> None:
        self._filled_only = filled
        self._more = False  # the line at hand has something

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        if self._filled_only:
            filled, self._more = filled_lines(data, newlines, self._more)
            newlines = newlines[filled]
        elif len(data):
            self._more = bool(data[-1] != FEED)
        found: IntArray = newlines + 1
        return found

    def finish(self) -> bool:
        return self._more


def filled_lines(
    data: Bytes, newlines: IntArray, begun: bool
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], bool]:
    """Which lines hold more than white space, bool ``[lines]``, and whether the rest does."""
    starts = np.append(0, newlines + 1)
    ends = np.append(newlines, len(data))
    filled = starts < ends
    first = data[np.minimum(starts, max(0, len(data) - 1))] if len(data) else np.zeros(1, np.uint8)
    is_space = (first == SPACE) | (first == TAB) | (first == RETURN)
    for line in np.flatnonzero(filled & is_space).tolist():
        filled[line] = bool(data[starts[line] : ends[line]].tobytes().strip(b" \t\r"))
    filled[0] |= begun
    return filled[:-1], bool(filled[-1])


@dataclass(frozen=True)
class Start:
    """The first row's place, the columns' names, and the delimiter or "array", by the first bytes."""

    at: int = 0
    names: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class TextFormat(ABC):
    """A format of rows in text; ``rule`` tells what a row is, bytes of ``between`` may surround one; with
    ``names_columns`` a file may lack a column.
    """

    name: ClassVar[str]
    rule: ClassVar[str] = "rows are text"
    reader: ClassVar[str]
    between: ClassVar[bytes] = b"\r\n"
    names_columns: ClassVar[bool] = False

    max_row_bytes: int = MOST_ROW_BYTES

    @property
    def settings(self) -> dict[str, Any]:
        """The options that rows' ends and inferred types depend on, of JSON types."""
        return {
            name: value for name, value in vars(self).items() if name not in ("exact", "column")
        }

    @property
    def fixed_schema(self) -> pa.Schema | None:
        """The schema of all rows; None where they show it."""
        return None

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
        """Rows as columns, of inferred types if ``schema`` is None; only ``strict`` refuses other columns.
        Raises pyarrow.ArrowException.
        """

    def infer(self, data: bytes, start: Start) -> tuple[pa.Schema, list[float]]:
        """The columns and types of rows, and the bytes of each column in memory."""
        table = self.parse(data, start, None)
        sizes = [float(column.nbytes) for column in table.columns]
        return pa.schema([self.as_written(field) for field in table.schema]), sizes

    def as_written(self, field: pa.Field) -> pa.Field:
        """A field that was found, in the type that the file means."""
        return field

    def read_none(self, schema: pa.Schema) -> None:  # noqa: B027  (formats whose types are fixed)
        """Read no rows with these types."""

    def wider(self, one: pa.Field, other: pa.Field) -> pa.Field:
        return unified(one, other)
