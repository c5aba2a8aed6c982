"""Arrow parses lines of JSON. NumPy finds where an array's objects end, and makes its commas line ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from trainpipes._internal.text import cut
from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.text.block_scan import PIECE_BYTES, Start
from trainpipes.sources.text.cutters import FEED, RETURN, SPACE, Bytes, Cutter, LineCutter
from trainpipes.sources.text.format import BOM, MAX_ROW_BYTES, TextFormat
from trainpipes.sources.text.refused import (
    check_depth,
    check_types,
    refuse_deep,
    refuse_rounded,
    values_of_lines,
)
from trainpipes.sources.text.text_reader import TextReader, row_bytes

WHITE = b" \t\r\n"
#: What a start says of a file that is one array.
ARRAY = "array"
#: What each byte adds to the depth of brackets; 0 for a comma, which is looked at, too.
DEPTH = np.zeros(256, np.int8)
DEPTH[[ord("["), ord("{")]] = 1
DEPTH[[ord("]"), ord("}")]] = -1
LOOKED_AT = DEPTH != 0
LOOKED_AT[ord(",")] = True
#: What names a field; and values that columns may have for each byte of a piece, nulls too.
KEY = re.compile(rb'"([^"\\]*)"\s*:')
CELLS_PER_BYTE = 8
#: Parts of a piece that are looked at for names of fields, and bytes of each.
SAMPLES, SAMPLE_BYTES = 64, 4 << 10
_NONE = np.zeros(0, np.int64)


class ReadJson(TextReader):
    r"""Reads JSON files as Arrow rows: an object on each line, or one array of objects.

    Objects within objects are structs, arrays are lists; a field that a row lacks is null. Files may be
    compressed (.gz, .zst, .bz2, .xz). For the index see docs/formats.md.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the objects ``a``. None for all; a field that
            the first blocks lack is then an error.
        schema: columns and types to read, instead of inferring them; other fields are left out.
        infer: "first" infers columns and types from the first block of up to 16 files; "all" from all rows,
            and widens types.
        block_rows: rows in a block; if left out, about 4 MB.
        max_row_bytes: a file with a longer row is refused.
        errors: "strict" raises where text is not UTF-8; "replace" puts U+FFFD in its place.
        index: where to keep the index: a path, True for the cache folder, False for nowhere.
        storage_options: more options of fsspec; never shown or saved.

    Raises:
        ConfigError: an option is invalid, or ``schema`` has a type that cannot be read from JSON.
        UnreadableError: a line is broken or not UTF-8, or a file is not JSON, or cut off.
        SchemaError: there is no such column, or a row does not fit.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> _ = path.write_text('{"id": 1, "messages": [{"role": "user", "content": "Hi"}]}\n{"id": 2}\n')
    >>> list(tp.list_files(path).read_json())
    [{'id': 1, 'messages': [{'role': 'user', 'content': 'Hi'}]}, {'id': 2, 'messages': None}]
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    schema: pa.Schema | None = None
    infer: Literal["first", "all"] = "first"
    block_rows: int | None = None
    max_row_bytes: Annotated[int | str, row_bytes] = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> Json:
        return Json(**self.common)


@dataclass(eq=False)
class Json(TextFormat):
    name = "JSON"
    rule: ClassVar[str] = "a row is one object, whole on its line or in the file's one array"
    reader: ClassVar[str] = "read_json"
    between: ClassVar[bytes] = b"," + WHITE
    no_rows: ClassVar[bytes] = b"{}\n"

    def start(self, head: bytes, whole: bool, path: str) -> Start | None:
        at = len(BOM) if head.startswith(BOM) else 0
        filled = head[at:].lstrip(WHITE)
        if not filled and not whole:
            return None
        if filled.startswith(b"["):
            return Start(len(head) - len(filled) + 1, kind=ARRAY)
        if filled[:1] not in (b"{", b""):
            raise BadFileError(
                f"not JSON: rows are objects, {{...}}, one on each line or in one array, and it starts "
                f"with {cut(repr(filled[:100]), 40)}"
            )
        return Start(at)

    def cutter(self, start: Start) -> Cutter:
        return ArrayCutter() if start.kind == ARRAY else LineCutter(filled=True)

    def parse(
        self, data: bytes, start: Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if start.kind == ARRAY:
            data = _as_lines(data)
        else:
            check_depth(data)
        if data.startswith(BOM):  # Arrow leaves one out, and this is not the file's
            data = BOM + data
        kinds = None if schema is None else pa.schema([_mapped(f, _readable) for f in schema])
        unexpected = "infer" if schema is None else "error" if strict else "ignore"
        found = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=max(64, len(data) + 1)),
            pj.ParseOptions(explicit_schema=kinds, unexpected_field_behavior=unexpected),
        )
        check_types(found.schema.types, data)
        if self.inferred:
            refuse_rounded(found, data, partial(values_of_lines, data, len(found)))
        return found if kinds is None or kinds.equals(schema) else found.cast(schema)

    def infer(self, data: bytes, start: Start) -> tuple[pa.Schema, list[float]]:
        self._refuse_sparse(data, start)
        return super().infer(data, start)

    def as_written(self, field: pa.Field) -> pa.Field:
        """Text, where Arrow has taken it for times, which JSON does not have."""
        return _mapped(field, lambda kind: pa.string() if pa.types.is_timestamp(kind) else kind)

    def _refuse_sparse(self, data: bytes, start: Start) -> None:
        """Raise for so many different fields that their columns would fill the memory."""
        most = CELLS_PER_BYTE * max(len(data), PIECE_BYTES)
        step = max(len(data) // SAMPLES, SAMPLE_BYTES)
        sample = b" ".join(data[at : at + SAMPLE_BYTES] for at in range(0, len(data), step))
        seen = len(set(KEY.findall(sample))) * step / SAMPLE_BYTES
        if data.count(b"{") * seen <= most:
            return
        try:
            lines = (_as_lines(data) if start.kind == ARRAY else data).split(b"\n")
            rows = [json.loads(line) for line in lines if line.strip()]
        except (ValueError, RecursionError, pa.ArrowInvalid):
            return  # parsing says where
        cells = _cells(rows, len(rows))
        if cells > most:
            keys = sorted(key.decode("utf-8", "replace") for key in set(KEY.findall(data)))
            raise BadFileError(
                f"{len(rows):,} rows have {len(keys):,} different fields ({', '.join(keys[:3])}, ...), which "
                f"would be columns of {cells:,} values, most of them null: say the columns that are wanted "
                "by schema=, or keep such objects as text, by json.dumps()"
            )


class ArrayCutter:
    """Rows are the objects of an array, behind its first bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = False  # a text
        self._escaped = False  # the next byte, by a backslash
        self._rows = self._commas = 0
        self._ended = False
        self.quotes: IntArray = _NONE
        self.depths: IntArray = _NONE

    def stops(self, data: Bytes, newlines: IntArray) -> IntArray:
        objects, commas = self.places(data)
        self._rows += len(objects)
        self._commas += len(commas)
        found: IntArray = objects + 1
        return found

    def places(self, data: Bytes) -> tuple[IntArray, IntArray]:
        if self._ended:
            self._nothing_more(data)
            return _NONE, _NONE
        self.quotes = quotes = self._quotes(data)
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
        self._depth, self.depths = int(depth[-1]) if len(depth) else self._depth, depth
        top = depth == 0
        return seen[top & (change < 0)], seen[top & (change == 0)]

    def _quotes(self, data: Bytes) -> IntArray:
        slashes = np.flatnonzero(data == ord("\\"))
        begins = np.append(True, np.diff(slashes) > 1)
        first = slashes[np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))]
        escapes = slashes[(slashes - first + (first == 0) * self._escaped) % 2 == 0]
        escaped = np.zeros(len(data) + 1, np.bool_)
        escaped[0] = self._escaped
        escaped[escapes + 1] = True
        self._escaped = bool(escaped[-1])
        quotes = np.flatnonzero(data == ord('"'))
        found: IntArray = quotes[~escaped[quotes]]
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


def _as_lines(data: bytes) -> bytes:
    view = np.frombuffer(data, np.uint8).copy()
    cutter = ArrayCutter()
    _, commas = cutter.places(view)
    refuse_deep(cutter.depths)
    ends = np.flatnonzero((view == FEED) | (view == RETURN))
    if (np.searchsorted(cutter.quotes, ends) % 2).any():
        raise pa.ArrowInvalid("a text has a line end in it, which JSON writes as \\n")
    view[ends] = SPACE
    view[commas] = FEED
    return view.tobytes()


def _cells(values: Iterable[Any], length: int) -> int:
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


def _readable(kind: pa.DataType) -> pa.DataType:
    """A type that Arrow reads from JSON and can cast to this one."""
    return pa.float32() if pa.types.is_float16(kind) else kind


def _mapped(field: pa.Field, to: Callable[[pa.DataType], pa.DataType]) -> pa.Field:
    kind, types = field.type, pa.types
    if types.is_struct(kind):
        return field.with_type(
            pa.struct([_mapped(kind.field(n), to) for n in range(kind.num_fields)])
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return field.with_type(pa.list_(_mapped(kind.value_field, to)))
    return field.with_type(to(kind))
