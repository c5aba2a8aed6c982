"""Arrow parses lines of JSON. NumPy finds where an array's objects end, and makes its commas line ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import holds
from trainpipes.errors import cut
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.sources import text_cutters, text_pieces
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.read_text import TextReader
from trainpipes.sources.text_format import TextFormat
from trainpipes.sources.text_pieces import row_bytes

#: What a start says of a file that is an array.
ARRAY = "array"
#: What names a field; and values that columns may have for each byte of a piece, nulls too.
KEY = re.compile(rb'"([^"\\]*)"\s*:')
CELLS_PER_BYTE = 8
#: Parts of a piece that are looked at for names of fields, and bytes of each.
SAMPLES, SAMPLE_BYTES = 64, 4 << 10


class ReadJson(TextReader):
    r"""Reads JSON files as Arrow rows: an object on each line, or an array of objects.

    Objects within objects are structs, arrays are lists; a field that a row lacks is null. Files may be
    compressed (.gz, .zst, .bz2, .xz). For the index see docs/formats.md.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the objects ``a``. None for all; a field that
            the first blocks lack is then an error, and always within a column that is read whole.
        schema: columns and types to read, instead of inferring them; other fields are left out.
        infer: "first" infers columns and types from the first block of up to 16 files; "all" from all rows,
            and widens types.
        block_rows: rows in a block; if left out, about 4 MB.
        max_row_bytes: a longer row is bad, and where bad rows are not left out, its file is refused.
        errors: "strict" raises where text is not UTF-8; "replace" puts U+FFFD in its place.
        on_error: for rows that cannot be read, are too long or do not fit the columns, and files whose rows
            cannot be counted: "raise"; "skip", which leaves them out and logs how many; or a ``Quarantine``.
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
    max_row_bytes: Annotated[int | str, row_bytes] = text_pieces.MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    on_error: OnBadRow = "raise"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> TextFormat:
        return Json(self.options)


class Json(TextFormat):
    """JSON files as a format."""

    name = "JSON"
    rule: ClassVar[str] = "a row is one object, whole on its line or in the file's one array"
    reader: ClassVar[str] = "read_json"
    between: ClassVar[bytes] = b"," + text_cutters.WHITE

    def rule_for(self, row: bytes, start: text_pieces.Start) -> str:
        if row.strip() != b"{":
            return self.rule
        way = "read_text('*.json', 'document') and json.loads in a map() read an object a file"
        return f"{self.rule} ({way})"

    def start(self, head: bytes, whole: bool, path: str) -> text_pieces.Start | None:
        at = len(text_pieces.BOM) if head.startswith(text_pieces.BOM) else 0
        filled = head[at:].lstrip(text_cutters.WHITE)
        if not filled and not whole:
            return None
        if filled.startswith(b"["):
            return text_pieces.Start(len(head) - len(filled) + 1, kind=ARRAY)
        if filled[:1] not in (b"{", b"") and not self.leaves_out:
            raise BadFileError(
                f"not JSON: rows are objects, {{...}}, one on each line or in one array, and it starts "
                f"with {cut(repr(filled[:100]), 40)}"
            )
        return text_pieces.Start(at)

    def cutter(self, start: text_pieces.Start) -> text_cutters.Cutter:
        return (
            text_cutters.ArrayCutter() if start.kind == ARRAY else text_cutters.FilledLineCutter()
        )

    def parse(
        self, data: bytes, start: text_pieces.Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if start.kind == ARRAY:
            data = _as_lines(data)
            text_cutters.refuse_null(data)
        else:
            text_cutters.check_depth(data)
        if data.startswith(text_pieces.BOM):  # Arrow leaves out a BOM, and this is not the file's
            data = text_pieces.BOM + data
        kinds = None if schema is None else pa.schema([_mapped(f, _readable) for f in schema])
        unexpected = "infer" if schema is None else "error" if strict else "ignore"
        whole = () if strict or kinds is None else self._whole(kinds)
        table = self._whole_read(data, kinds, whole) if whole else _read(data, kinds, unexpected)
        text_cutters.check_types(table.schema.types, data)
        if self.inferred:
            text_cutters.refuse_rounded(
                table, data, lambda _, rows: _written(data, len(table), rows)
            )
        return table if kinds is None or kinds.equals(schema) else table.cast(schema)

    def _whole(self, kinds: pa.Schema) -> Sequence[str]:
        """Chosen columns that must come with all that rows hold in them."""
        if not self.inferred:
            return ()
        names = (name for name in self.options["columns"] or () if name in kinds.names)
        return [name for name in names if holds(kinds.field(name).type, pa.types.is_struct)]

    def _whole_read(self, data: bytes, kinds: pa.Schema, whole: Sequence[str]) -> pa.Table:
        """Rows of which some columns may hold no more fields than their types: Arrow ignores unknown ones at
        every depth, or at none.
        """
        try:
            self._refuse_sparse(data, text_pieces.Start())
            table = _read(data, kinds, "infer").select(kinds.names)
            more = any(table.field(n).type != kinds.field(n).type for n in whole)
        except (pa.ArrowInvalid, BadFileError):  # it can be of columns that are not wanted
            table = _read(data, kinds, "ignore")
            more = any(
                _has_more(row.get(n), kinds.field(n).type) for row in _rows(data) for n in whole
            )
        if more:
            raise pa.ArrowInvalid(f"a field within a column is new, of {', '.join(whole)}")
        return table.cast(kinds)

    def infer(self, data: bytes, start: text_pieces.Start) -> tuple[pa.Schema, list[float]]:
        self._refuse_sparse(data, start)
        return super().infer(data, start)

    def as_written(self, field: pa.Field) -> pa.Field:
        """Text, where Arrow has taken it for times, which JSON does not have."""
        return _mapped(field, lambda kind: pa.string() if pa.types.is_timestamp(kind) else kind)

    def _refuse_sparse(self, data: bytes, start: text_pieces.Start) -> None:
        """Raise for so many different fields that their columns would fill the memory."""
        most = CELLS_PER_BYTE * max(len(data), text_pieces.PIECE_BYTES)
        step = max(len(data) // SAMPLES, SAMPLE_BYTES)
        sample = b" ".join(data[at : at + SAMPLE_BYTES] for at in range(0, len(data), step))
        seen = len(set(KEY.findall(sample))) * step / SAMPLE_BYTES
        if data.count(b"{") * seen <= most:
            return
        try:
            rows = _rows(_as_lines(data) if start.kind == ARRAY else data)
        except (RecursionError, pa.ArrowInvalid):
            return  # parsing says where
        cells = _cells(rows, len(rows))
        if cells > most:
            keys = sorted(key.decode("utf-8", "replace") for key in set(KEY.findall(data)))
            raise BadFileError(
                f"{len(rows):,} rows have {len(keys):,} different fields ({', '.join(keys[:3])}, ...), which "
                f"would be columns of {cells:,} values, most of them null: say the columns that are wanted "
                "by schema=, or keep such objects as text, by json.dumps()"
            )


def _read(data: bytes, kinds: pa.Schema | None, unexpected: str) -> pa.Table:
    return pj.read_json(
        pa.BufferReader(data),
        pj.ReadOptions(use_threads=False, block_size=max(64, len(data) + 1)),
        pj.ParseOptions(explicit_schema=kinds, unexpected_field_behavior=unexpected),
    )


def _rows(lines: bytes) -> list[Any]:
    try:
        return [json.loads(line, parse_int=str) for line in lines.split(b"\n") if line.strip()]
    except ValueError as error:
        raise pa.ArrowInvalid(str(error)) from error


def _has_more(value: Any, kind: pa.DataType) -> bool:
    """Whether a value has fields that a type lacks."""
    if isinstance(value, list):
        return any(_has_more(item, kind.value_type) for item in value)
    return isinstance(value, dict) and any(
        kind.get_field_index(name) < 0 or _has_more(inner, kind.field(name).type)
        for name, inner in value.items()
    )


def _as_lines(data: bytes) -> bytes:
    view, cutter = np.frombuffer(data, np.uint8).copy(), text_cutters.ArrayCutter()
    cutter.stops(data)
    text_cutters.refuse_deep(cutter.depths)
    ends = np.flatnonzero((view == text_cutters.FEED) | (view == text_cutters.RETURN))
    if (np.searchsorted(cutter.quotes, ends) % 2).any():
        raise pa.ArrowInvalid("a text has a line end in it, which JSON writes as \\n")
    view[ends] = ord(" ")
    view[cutter.commas] = text_cutters.FEED
    if cutter.ended is not None:
        view[cutter.ended :] = ord(" ")
    return view.tobytes()


def _written(data: bytes, count: int, rows: IntArray) -> Iterator[Any]:
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) == count:  # else it is not an object on each line, which is said elsewhere
        for row in rows.tolist():
            line, loads = lines[row], partial(json.loads, parse_int=text_cutters.integer)
            yield loads(line) if text_cutters.INTEGER.search(line) else {}


def _cells(values: Iterable[Any], length: int) -> int:
    fields: dict[str, list[Any]] = {}
    items: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            for name, field in value.items():
                fields.setdefault(name, []).append(field)
        elif isinstance(value, list):
            items += value
    inner = sum(_cells(cells_of, length) for cells_of in fields.values())
    return length * len(fields) + inner + (_cells(items, len(items)) if items else 0)


def _readable(kind: pa.DataType) -> pa.DataType:
    """A type that Arrow reads from JSON and can cast to this type."""
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
