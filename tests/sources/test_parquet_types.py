"""What pyarrow reads of a Parquet file is read alike: every type, encoding and nesting; large columns too."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from every_format import opened
from trainpipes.sources.files.formats import plain

ROWS = 60


def every(values: list[Any], kind: pa.DataType) -> pa.Array:
    """These values and null, over and over."""
    return pa.array([[*values, None][n % (len(values) + 1)] for n in range(ROWS)], kind)


UUIDS = [uuid.UUID(int=n).bytes for n in (0, 1, 2**127)]
NESTED = pa.struct(
    [
        ("lang", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("parts", pa.list_(pa.int32()))]))),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("point", pa.list_(pa.float32(), 2)),
    ]
)
MESSAGES = [
    {
        "lang": "de",
        "messages": [{"role": "user", "parts": [1, None]}, {"role": None, "parts": []}, None],
        "counts": [("a", 1), ("b", None)],
        "point": [0.5, None],
    },
    {"lang": None, "messages": [], "counts": [], "point": None},
    {"lang": "en", "messages": None, "counts": None, "point": [1.0, 2.0]},
]
LONG_AGO = [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59), datetime(1970, 1, 1)]

#: Columns, and how they are written.
FILES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nested": (every(MESSAGES, NESTED), {}),
    "nested, 2.0 data pages": (every(MESSAGES, NESTED), {"data_page_version": "2.0"}),
    "nested, older names": (every(MESSAGES, NESTED), {"use_compliant_nested_type": False}),
    "lists of lists": (every([[[1], [], None], [], [[2, 3]]], pa.list_(pa.large_list(pa.int8()))), {}),
    "uuid": (pa.ExtensionArray.from_storage(pa.uuid(), every(UUIDS, pa.binary(16))), {}),
    "decimal256": (
        every([Decimal("1." + "3" * 60), Decimal("-9e15"), Decimal(0)], pa.decimal256(76, 60)),
        {},
    ),
    "decimal as integers": (
        every([Decimal("1.5"), Decimal("-2.25")], pa.decimal128(9, 2)),
        {"store_decimal_as_integer": True},
    ),
    "int96": (every(LONG_AGO[2:], pa.timestamp("ns")), {"use_deprecated_int96_timestamps": True}),
    "timestamps out of the range of ns": (every(LONG_AGO, pa.timestamp("us")), {}),
    "timestamps out of the range of Python": (
        every([2**62, -(2**62)], pa.int64()).cast(pa.timestamp("us")),
        {},
    ),
    "timestamps with a zone": (every(LONG_AGO[2:], pa.timestamp("ms", "Europe/Paris")), {}),
    "times": (every([1, 86_399], pa.int32()).cast(pa.time32("s")), {}),
    "durations": (every([timedelta(days=-1), timedelta(0)], pa.duration("us")), {}),
    "dictionary": (every(["a", "b", ""], pa.string()).dictionary_encode(), {}),
    "dictionary of lists' values": (
        pa.ListArray.from_arrays(
            pa.array(range(0, 2 * ROWS + 1, 2), pa.int32()),
            pa.array(["x", "y", None] * ROWS).slice(0, 2 * ROWS).dictionary_encode(),
        ),
        {},
    ),
    "byte stream split": (
        every([0.5, float("nan"), -0.0, float("inf")], pa.float32()),
        {"use_byte_stream_split": True, "use_dictionary": False},
    ),
    "byte stream split of integers": (
        every([1, -(2**62)], pa.int64()),
        {"use_byte_stream_split": True, "use_dictionary": False},
    ),
    "delta of integers": (
        every([1, -(2**62), 2**62], pa.int64()),
        {"column_encoding": "DELTA_BINARY_PACKED", "use_dictionary": False},
    ),
    "delta of texts": (
        every(["common", "common prefix", ""], pa.string()),
        {"column_encoding": "DELTA_BYTE_ARRAY", "use_dictionary": False},
    ),
    "delta of lengths": (
        every([b"a", b"\xff\x00", b""], pa.binary()),
        {"column_encoding": "DELTA_LENGTH_BYTE_ARRAY", "use_dictionary": False},
    ),
    "half floats": (every([np.float16(0.5), np.float16("nan")], pa.float16()), {}),
    "unsigned": (every([0, 2**64 - 1], pa.uint64()), {"version": "1.0"}),
    "views": (every(["short", "a text that is too long to be inline"], pa.string_view()), {}),
    "large texts": (every(["a", "b"], pa.large_string()), {}),
    "only nulls": (pa.nulls(ROWS), {}),
    "brotli": (every(["a", "b"], pa.string()), {"compression": "brotli"}),
    "zstd, tiny pages": (every(["a", "b"], pa.string()), {"compression": "zstd", "data_page_size": 16}),
}  # fmt: skip


def rows_of(table: pa.Table) -> list[str]:
    """Rows as texts, also of those that are no values of Python; NaN is NaN."""
    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = field.type
        plain = column.cast(pa.int64()) if pa.types.is_timestamp(kind) else column
        plain = plain.cast(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else plain
        columns[field.name] = plain.to_pylist()
    return [repr(row) for row in zip(*columns.values(), strict=True)]


def as_text(table: pa.Table) -> pa.Table:
    return pa.table({"row": rows_of(table)})


@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_that_pyarrow_reads(tmp_path, name):
    column, options = FILES[name]
    table = pa.table({"value": column, "n": range(ROWS)})
    if "column_encoding" in options:
        options = {**options, "column_encoding": {"value": options["column_encoding"]}}
    for number, start in enumerate((0, 33)):
        part = table.slice(start, 33)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=7, **options)
    whole = pq.read_table(tmp_path)
    wanted, kind = rows_of(whole), plain(whole.schema.field("value")).type
    assert opened(tp.read_parquet(tmp_path)).schema.field("value").type == kind
    rows = tp.read_parquet(tmp_path).map_batches(as_text, format="arrow")
    assert [row["row"] for row in rows] == wanted
    shuffled = rows.sharding_filter(2).shuffle(16, seed=1).batch(4)
    batches = [[row["row"] for row in batch] for batch in shuffled]
    assert sorted(row for batch in batches for row in batch) == sorted(wanted)
    assert [row for batch in batches for row in batch] != wanted


# Parts of columns


def nested(folder: Path, **options: Any) -> Path:
    table = pa.table({"meta": every(MESSAGES, NESTED), "n": range(ROWS)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=7, **options)
    return folder / "rows.parquet"


PARTS = [
    ["meta.lang"], ["meta.messages.list.element.role"], ["meta.messages.list.element.parts"],
    ["meta.messages.list.element.parts.list.element"], ["n", "meta.counts"], ["meta.point", "meta.messages"],
    ["meta.lang", "meta.messages.list.element.role", "n"], ["meta", "meta.lang"],
]  # fmt: skip


def test_parts_of_columns_are_those_that_pyarrow_reads(tmp_path):
    path = nested(tmp_path)
    for columns in PARTS:
        wanted = pq.ParquetFile(path).read(columns=columns).to_pylist()
        assert list(tp.read_parquet(path, columns)) == wanted, columns


def test_parts_of_lists_are_named_as_in_the_file(tmp_path):
    path = nested(tmp_path, use_compliant_nested_type=False)
    columns = ["meta.messages.list.item.role"]
    wanted = pq.ParquetFile(path).read(columns=columns).to_pylist()
    assert list(tp.read_parquet(path, columns)) == wanted
    said = r"no column 'meta\.messages\.list\.element\.role' \(did you"
    with pytest.raises(tp.SchemaError, match=said):
        list(tp.read_parquet(path, ["meta.messages.list.element.role"]))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("meta.messages.role", r"no column 'meta\.messages\.role'.*'meta\.lang'"),
        ("meta.messages.list.element.rle", r"did you mean 'meta\.messages\.list\.element\.role'"),
        ("meta.counts.key_value.key", r"no column 'meta\.counts\.key_value\.key'"),
        ("n.x", r"no column 'n\.x'"),
    ],
)
def test_a_part_that_is_not_there_is_named(tmp_path, column, message):
    with pytest.raises(tp.SchemaError, match=message):
        tp.read_parquet(nested(tmp_path), [column]).explain()


# Large columns


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.uint8())], ids=str)
def test_a_window_may_hold_more_than_2_gib_of_a_column(tmp_path, kind):
    """A window of 44 rows of 50 MiB each; of text or lists with 32-bit offsets no array holds as much."""
    size, rows = 50 << 20, 44
    schema = pa.schema([("text", kind), ("n", pa.int64())])
    with pq.ParquetWriter(tmp_path / "rows.parquet", schema, use_dictionary=False) as writer:
        for n in range(rows):
            content = pa.py_buffer(bytes([97 + n % 26]) * size)
            offsets = pa.py_buffer(np.array([0, size], np.int32))
            if pa.types.is_string(kind):
                text = pa.StringArray.from_buffers(1, offsets, content)
            else:
                values = pa.Array.from_buffers(pa.uint8(), size, [None, content])
                text = pa.Array.from_buffers(kind, 1, [None, offsets], children=[values])
            writer.write_table(pa.table({"text": text, "n": [n]}, schema=schema))
    pipe = tp.read_parquet(tmp_path).shuffle(rows, seed=0, max_bytes=16 << 30)
    assert pipe.explain().window_rows == rows
    lengths = pipe.map_batches(lengths_and_ends, format="arrow").batch(4)
    found = [row for batch in lengths for row in batch]
    assert sorted(row["n"] for row in found) == list(range(rows)) != [row["n"] for row in found]
    assert all(row == {"n": row["n"], "size": size, "end": 97 + row["n"] % 26} for row in found)


def lengths_and_ends(table: pa.Table) -> pa.Table:
    sizes, ends = [], []
    for text in table["text"]:
        content = (
            text.as_buffer() if isinstance(text, pa.StringScalar) else text.values.buffers()[1]
        )
        sizes.append(len(text.values) if isinstance(text, pa.ListScalar) else content.size)
        start = text.values.offset if isinstance(text, pa.ListScalar) else 0
        ends.append(memoryview(content)[start + sizes[-1] - 1])
    return pa.table({"n": table["n"], "size": sizes, "end": ends})
