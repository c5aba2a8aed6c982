"""Shards of MosaicML Streaming (MDS) as a format: ``tp.read_files("data/*.mds", MosaicShards())``.

Shards that are compressed (``shard.00000.mds.zstd``) are decompressed first: ``zstd -d``. Pictures stay bytes
for ``decode_image``, JSON stays text. Pickled columns are refused: leave them out by ``columns=``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

import trainpipes as tp

KINDS = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float32",
    "float64",
]
NUMBERS = {kind: pa.type_for_alias(kind) for kind in KINDS}
TEXTS = {
    "str_int": (pa.int64(), int),
    "str_float": (pa.float64(), float),
    "str_decimal": (pa.string(), str),
}
BYTES = ("bytes", "jpeg", "jpeg_array", "jpegarray", "png")
#: How a shard writes the type of an array, where the column's name does not say it.
CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 34: "float32"} | {
    64: "uint64", 65: "int64", 66: "float64"
}  # fmt: skip
BLOCK = 1 << 20


def array_of(encoding: str) -> tuple[pa.DataType, Callable[[bytes], Any]]:
    """ndarray, ndarray:int32 or ndarray:int32:3,224: the values, one after the other."""
    kind, shape = ([*encoding.split(":")[1:], "", ""])[:2]

    def values(content: bytes) -> Any:
        at, dtype = (0, kind) if kind else (1, CODES[content[0]])
        if not shape:
            at += 1 + (content[at] >> 2) * (1 << (content[at] & 3))
        return np.frombuffer(content, dtype, offset=at).astype(kind or "float64")

    return pa.list_(NUMBERS[kind or "float64"]), values


def column_of(name: str, encoding: str) -> tuple[pa.DataType, Callable[[bytes], Any]]:
    """The type of a column, and what makes a value of its bytes."""
    if encoding in BYTES:
        return pa.binary(), bytes
    if encoding in ("str", "json"):
        return pa.string(), bytes.decode
    if encoding in TEXTS:
        kind, make = TEXTS[encoding]
        return kind, lambda content: make(content.decode())
    if encoding.split(":")[0] == "ndarray":
        return array_of(encoding)
    dtype = "int64" if encoding == "int" else encoding
    if dtype not in NUMBERS:
        raise ValueError(f"column {name!r} is {encoding}, which MosaicShards does not read")
    return NUMBERS[dtype], lambda content: np.frombuffer(content, dtype)[0]


class MosaicShards(tp.Format):
    name, suffixes = "MDS", (".mds",)

    def scan(self, file: Any) -> tp.Layout:
        with file.stream() as content:
            rows = int.from_bytes(content.read(4), "little")
            edges = np.frombuffer(content.read(4 * (rows + 1)), "<u4").astype(np.int64)
            config = content.read(int(edges[0]) - 4 * (rows + 2))
        if len(edges) != rows + 1 or edges[-1] > file.size:
            raise ValueError("the shard ends early")
        about = json.loads(config)
        if about["version"] != 2:
            raise ValueError(f"version {about['version']} of MDS")
        fields = [
            (name, column_of(name, encoding)[0])
            for name, encoding in zip(about["column_names"], about["column_encodings"], strict=True)
        ]
        # The first row of each block.
        first = np.unique(
            np.searchsorted(edges[:-1], np.arange(edges[0], max(edges[-1], edges[0] + 1), BLOCK))
        )
        last = [*first[1:].tolist(), rows]
        counts = [stop - start for start, stop in zip(first.tolist(), last, strict=True)]
        return tp.Layout(
            counts, edges[first].tolist(), edges[last].tolist(), pa.schema(fields), config
        )

    def decode(
        self, data: Any, layout: tp.Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        [content] = data.read(self.ranges(layout, block, columns))
        about = json.loads(layout.extra)
        names, fixed = about["column_names"], about["column_sizes"]
        wanted = [*(names if columns is None else columns)]
        made = {
            name: column_of(name, encoding)
            for name, encoding in zip(names, about["column_encodings"], strict=True)
            if name in wanted
        }
        values: dict[str, list[Any]] = {name: [] for name in wanted}
        open_sizes, at = fixed.count(None), 0
        for _ in range(layout.rows[block]):
            sizes = iter(np.frombuffer(content, "<u4", open_sizes, at).tolist())
            at += 4 * open_sizes
            for name, size in zip(names, fixed, strict=True):
                size = size or next(sizes)
                if name in values:
                    values[name].append(made[name][1](bytes(content[at : at + size])))
                at += size
        schema = pa.schema([(name, made[name][0]) for name in wanted])
        arrays = [pa.array(values[name], schema.field(name).type) for name in wanted]
        yield pa.record_batch(arrays, schema=schema)
