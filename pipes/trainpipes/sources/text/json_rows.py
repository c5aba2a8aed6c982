"""JSON as rows: objects on lines of their own, or in one array.

Arrow parses lines. Where an array's objects end is found by NumPy, from quotes and brackets; its commas are
made line ends then, which JSON has none of within texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from trainpipes._internal.text import cut
from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.text.block_scan import PIECE_BYTES
from trainpipes.sources.text.exact_integers import refuse_rounded_values
from trainpipes.sources.text.format import (
    MOST_ROW_BYTES,
    Bytes,
    Cutter,
    Start,
    TextFormat,
)
from trainpipes.sources.text.json_depth import check_depth, check_types, refuse_deep
from trainpipes.sources.text.lines import LineCutter
from trainpipes.sources.text.row_errors import BOM

WHITE = b" \t\r\n"
#: What a start's header says of a file that is one array.
ARRAY = "array"
QUOTE, BACKSLASH, COMMA, FEED, RETURN, SPACE = 34, 92, 44, 10, 13, 32
#: What each byte adds to the depth of brackets; 0 for a comma, which is looked at, too.
DEPTH = np.zeros(256, np.int8)
DEPTH[[ord("["), ord("{")]] = 1
DEPTH[[ord("]"), ord("}")]] = -1
LOOKED_AT = DEPTH != 0
LOOKED_AT[COMMA] = True
#: What names a field; and values that columns may have for each byte of a piece, nulls too.
KEY = re.compile(rb'"([^"\\]*)"\s*:')
CELLS_PER_BYTE = 8
#: Parts of a piece that are looked at for names of fields, and bytes of each.
SAMPLES, SAMPLE_BYTES = 64, 4 << 10


class ArrayCutter:
    """Rows are the objects of an array, of which the first bracket has been read."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = False  # a text
        self._slashes = 0  # backslashes at the end of what was read
        self._rows = self._commas = 0
        self._ended = False

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        objects, commas = self.places(data)
        self._rows += len(objects)
        self._commas += len(commas)
        found: IntArray = objects + 1
        return found

    def places(self, data: Bytes, deep: bool = True) -> tuple[IntArray, IntArray]:
        """Where objects end in the next bytes, and the commas between them.

        Args:
            data: the bytes.
            deep: whether objects may nest too deep.
        """
        if self._ended:
            self._nothing_more(data)
            return _NONE, _NONE
        quotes = self._quotes(data)
        seen = np.flatnonzero(LOOKED_AT[data])
        inside = (np.searchsorted(quotes, seen) + self._inside) % 2 == 1
        seen = seen[~inside]
        self._inside = (len(quotes) + self._inside) % 2 == 1
        change = DEPTH[data[seen]]
        depth = np.cumsum(change, dtype=np.int64) + self._depth
        if len(depth) and depth.min() < 0:
            last = int(np.argmax(depth < 0))
            self._nothing_more(data[seen[last] + 1 :])
            self._ended = True
            seen, change, depth = seen[:last], change[:last], depth[:last]
        if not deep:
            refuse_deep(depth)
        self._depth = int(depth[-1]) if len(depth) else self._depth
        top = depth == 0
        objects: IntArray = seen[top & (change < 0)]
        commas: IntArray = seen[top & (change == 0)]
        return objects, commas

    def _quotes(self, data: Bytes) -> IntArray:
        """Where texts begin and end."""
        quotes = np.flatnonzero(data == QUOTE)
        slashes = np.flatnonzero(data == BACKSLASH)
        if not len(data):
            return _NONE
        before = self._slashes
        if len(slashes):
            # How many backslashes stand in a row up to each.
            begins = np.append(True, np.diff(slashes) > 1)
            first = np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))
            count = np.arange(len(slashes)) - first + 1
            count[slashes - count < 0] += before
            place = np.searchsorted(slashes, quotes - 1)
            place[place == len(slashes)] = 0
            escaped = (slashes[place] == quotes - 1) & (count[place] % 2 == 1)
            self._slashes = int(count[-1]) if slashes[-1] == len(data) - 1 else 0
        else:
            escaped = np.zeros(len(quotes), np.bool_)
            self._slashes = 0
        if len(quotes) and quotes[0] == 0 and before % 2:
            escaped[0] = True
        found: IntArray = quotes[~escaped]
        return found

    def _nothing_more(self, data: Bytes) -> None:
        rest = data.tobytes().strip(WHITE)
        if rest:
            raise BadFileError(f"there is more after the array's end: {cut(repr(rest[:100]), 60)}")

    def finish(self) -> bool:
        if not self._ended:
            raise BadFileError("cut off: its array has no end")
        if self._commas != max(0, self._rows - 1):
            raise BadFileError(
                f"its array has {self._rows:,} objects and {self._commas:,} commas between: rows are "
                "objects, {...}"
            )
        return False


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Json(TextFormat):
    """JSON lines, or an array of objects.

    Args:
        exact: whether integers that floats would round are refused.
        max_row_bytes: of a row at most.
    """

    name: ClassVar[str] = "JSON"
    rule: ClassVar[str] = "a row is one object, whole on its line or in the file's one array"
    reader: ClassVar[str] = "read_json"
    between: ClassVar[bytes] = b"," + WHITE

    exact: bool = False
    max_row_bytes: int = MOST_ROW_BYTES

    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        at = len(BOM) if head.startswith(BOM) else 0
        filled = head[at:].lstrip(WHITE)
        if not filled and not whole:
            return None
        if not filled.startswith(b"["):
            if filled[:1] not in (b"{", b""):
                raise BadFileError(
                    f"not JSON: rows are objects, {{...}}, one on each line or in one array, and it starts "
                    f"with {cut(repr(filled[:100]), 40)}"
                )
            return Start(at)
        return Start(len(head) - len(filled) + 1, (ARRAY,))

    def cutter(self, start: Start, path: str) -> Cutter:
        return ArrayCutter() if start.header else LineCutter(filled=True)

    def parse(
        self, data: bytes, start: Start, path: str, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if start.header:
            data = _as_lines(data)
        else:
            check_depth(data)
        if data.startswith(BOM):  # Arrow leaves one out, and this is not the file's
            data = BOM + data
        kinds = None if schema is None else pa.schema([_plainer(field) for field in schema])
        unexpected = "infer" if schema is None else "error" if strict else "ignore"
        found = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=max(64, len(data) + 1)),
            pj.ParseOptions(explicit_schema=kinds, unexpected_field_behavior=unexpected),
        )
        check_types(found.schema.types, data)
        if self.exact:
            refuse_rounded_values(found, data)
        return found if kinds is None or kinds.equals(schema) else found.cast(schema)

    def infer(self, data: bytes, start: Start, path: str) -> tuple[pa.Schema, list[float]]:
        self._refuse_sparse(data, start)
        table = self.parse(data, start, path, None)
        fields = [_as_written(field) for field in table.schema]
        return pa.schema(fields), [float(column.nbytes) for column in table.columns]

    def _refuse_sparse(self, data: bytes, start: Start) -> None:
        """Raise if the rows have so many different fields that a column for each would fill the memory."""
        most = CELLS_PER_BYTE * max(len(data), PIECE_BYTES)
        step = max(len(data) // SAMPLES, SAMPLE_BYTES)
        sample = b" ".join(data[at : at + SAMPLE_BYTES] for at in range(0, len(data), step))
        seen = len(set(KEY.findall(sample))) * step / SAMPLE_BYTES
        if data.count(b"{") * seen <= most:
            return
        keys = set(KEY.findall(data))
        try:
            lines = (_as_lines(data) if start.header else data).split(b"\n")
            rows = [json.loads(line) for line in lines if line.strip()]
        except (ValueError, RecursionError, pa.ArrowInvalid):
            return  # parsing says where
        cells = _cells(rows, len(rows))
        if cells > most:
            few = ", ".join(sorted(key.decode("utf-8", "replace") for key in keys)[:3])
            raise BadFileError(
                f"{len(rows):,} rows have {len(keys):,} different fields ({few}, ...), which would be "
                f"columns of {cells:,} values, most of them null: say the columns that are wanted by "
                "schema=, or keep such objects as text, by json.dumps()"
            )

    def empty_as(self, schema: pa.Schema) -> None:
        self.parse(b"{}\n", Start(), "", schema)


def _cells(values: Iterable[Any], length: int) -> int:
    """Values of all columns of some objects, and of what is in them, nulls too.

    Args:
        values: the objects; others have no fields.
        length: how long a column of them is.
    """
    fields: dict[str, list[Any]] = {}
    items: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            for name, one in value.items():
                fields.setdefault(name, []).append(one)
        elif isinstance(value, list):
            items += value
    inner = sum(_cells(found, length) for found in fields.values())
    return length * len(fields) + inner + (_cells(items, len(items)) if items else 0)


def _as_lines(data: bytes) -> bytes:
    """Objects of an array as lines."""
    view = np.frombuffer(data, np.uint8).copy()
    _, commas = ArrayCutter().places(view, deep=False)
    view[(view == FEED) | (view == RETURN)] = SPACE
    view[commas] = FEED
    return view.tobytes()


def _as_written(field: pa.Field) -> pa.Field:
    """A field as it is in the file: Arrow takes some texts for times, and JSON has none."""
    return field.with_type(_mapped(field.type, _time_as_text))


def _plainer(field: pa.Field) -> pa.Field:
    """A field of a type that Arrow reads from JSON and can cast to the field's own."""
    return field.with_type(_mapped(field.type, _readable))


def _time_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _readable(kind: pa.DataType) -> pa.DataType:
    return pa.float32() if pa.types.is_float16(kind) else kind


def _mapped(kind: pa.DataType, to: Any) -> pa.DataType:
    """A type with others in place of those at its leaves, and plain lists for others."""
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return pa.struct([field.with_type(_mapped(field.type, to)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_mapped(kind.value_type, to)))
    return to(kind)
