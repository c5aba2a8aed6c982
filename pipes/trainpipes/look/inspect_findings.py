"""What to fix in data files before training."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.content_hash import row_hashes
from trainpipes.errors import SchemaError
from trainpipes.errors.secrets import hidden
from trainpipes.errors.text import amount, cut
from trainpipes.look.inspect_reading import NAMES, TEXTS, Found
from trainpipes.look.inspect_result import Column, Finding, Lengths, percent
from trainpipes.sources.files.schema import one_schema

#: The rows of the sample, by column.
Chunks = Mapping[str, Sequence[pa.Array]]
#: Rows that ``shuffle`` mixes at a time in README and recipes, and shards that ``sharding_filter`` makes.
BUFFER_ROWS, NUM_SHARDS = 40_960, 24
#: Rows of a row group above which a resume within it is slow: docs/speed.md. Bytes of a compressed
#: block that is decoded as a whole.
LARGE_ROWS, LARGE_BYTES = 100_000, 64 << 20
#: Row groups of fewer rows and bytes cost a seek or a request each. Of few of them it does not matter.
SMALL_ROWS, SMALL_BYTES, MANY = 1000, 1 << 20, 100
#: Rows of a row group that are good for most data.
GOOD_ROWS = 10_000
#: Files or columns that a finding or a command names.
NAMED = 5
#: Formats of which every row can be read by itself.
BY_ROW = ("read_images", "read_numpy", "from_memmap")
#: Distinct values of a label at most, rows of each on average at least, and rows that are compared.
MOST_LABELS, LABEL_ROWS, LEAST_ROWS = 1000, 4, 32
#: So far apart are rows that are compared, at most: a few of one label in a row are no cluster.
APART = 64
#: From 0, where rows near each other are as any two, to 1, where they are all alike.
CLUSTERED = 0.5


def of_files(found: Found) -> Iterator[Finding]:
    if others := found.others:
        named = " ".join(map(shlex.quote, others[:NAMED]))
        text = f"{found.reader}() does not read files of other formats: {len(others):,} beside the data"
        yield Finding("other_formats", text, f"trainpipes inspect {named}")
    with_rows = {name for name, source in found.sources if len(source.lengths)}
    several = [(name, schema) for name, schema in found.schemas.items() if name in with_rows]
    try:
        if several:
            one_schema(several, None, f"{found.reader}()")
    except SchemaError as error:
        cure = f".{found.reader}(columns=[...]) with columns that all files have, or convert files"
        yield Finding("mixed_schemas", str(error), cure)


def of_bad_rows(found: Found) -> Iterator[Finding]:
    if found.bad_rows:
        text = f"{found.bad_rows:,} of {found.looked_at:,} rows that were looked at cannot be used"
        stage = found.reader if found.reader in TEXTS else "decode_image"
        yield Finding(
            "bad_rows", text, f".{stage}(..., on_error=tp.Quarantine(folder)), which lists them"
        )


def of_blocks(found: Found, rows: int) -> Iterator[Finding]:
    filled = found.lengths > 0
    lengths, sizes = found.lengths[filled], found.block_bytes[filled]
    if not len(lengths) or found.reader in BY_ROW:
        return
    if found.reader != "read_parquet":
        if sizes.max() > LARGE_BYTES:
            text = (
                f"files can only be read from few places on, up to {amount(sizes.max())} apart: each shard, "
                "and each resume, reads from the last such place"
            )
            yield Finding("large_blocks", text, _repack(found, ""))
        return
    cure = _repack(found, f"--row-group-size {GOOD_ROWS}")
    if lengths.max() > LARGE_ROWS or len(lengths) < min(NUM_SHARDS, rows // BUFFER_ROWS):
        text = (
            f"{len(lengths):,} row groups for {NUM_SHARDS} shards, of up to {lengths.max():,} rows "
            f"({amount(sizes.max())}): .shuffle({BUFFER_ROWS}) mixes within {BUFFER_ROWS:,} consecutive rows "
            "of one, and each is decoded again by every shard that shares it and by a resume"
        )
        yield Finding("large_row_groups", text, cure)
    median, size = int(np.median(lengths)), float(np.median(sizes))
    if len(lengths) >= MANY and median < SMALL_ROWS and size < SMALL_BYTES:
        text = (
            f"half of the {len(lengths):,} row groups have {median:,} rows or fewer, of {amount(size)}: each "
            "costs a seek, or a request to a server"
        )
        yield Finding("small_row_groups", text, cure)


def of_values(chunks: Chunks, columns: Sequence[Column]) -> Iterator[Finding]:
    if nulls := {one.name: one.nulls for one in columns if one.nulls}:
        some = [name for name, share in nulls.items() if share < 1][:1]
        ways = [f".filter(pc.field({name!r}).is_valid())" for name in some]
        cure = " or ".join([*ways, "leave the column out by columns=[...]"])
        yield Finding("nulls", f"nulls in {_named(nulls)}", cure)
    empty = {}
    for name, own in chunks.items():
        texts = [one.drop_null() for one in own if one.type in (pa.string(), pa.large_string())]
        if count := sum(int((to_numpy(pc.binary_length(one)) == 0).sum()) for one in texts):
            empty[name] = count / sum(map(len, own))
    if empty:
        cure = f'.filter(pc.field({next(iter(empty))!r}) != "")'
        yield Finding("empty_texts", f"empty texts in {_named(empty)}", cure)


def of_lengths(lengths: Sequence[Lengths], max_length: int | None) -> Iterator[Finding]:
    for one in lengths:
        if one.too_long:
            text = (
                f"{percent(one.too_long)} of rows have more than {max_length:,} {one.unit} in "
                f"{_joined(one.columns)}, up to {one.most:,}"
            )
            cure = f".tokenize(..., max_length={max_length}), which cuts them"
            if one.unit == "items":
                cure = f"a larger max_length than {max_length}, or shorter rows"
            yield Finding("too_long", text, cure)


def of_order(found: Found, chunks: Chunks, rows: int) -> Iterator[Finding]:
    """Columns that files are sorted by."""
    seen = set()
    for name, own in chunks.items() if rows > BUFFER_ROWS else ():  # of fewer, a shuffle mixes all
        alike, usual = _alike(own)
        # A class and its number are one label.
        if usual == 1 or (alike - usual) / (1 - usual) < CLUSTERED or (alike, usual) in seen:
            continue
        seen.add((alike, usual))
        text = (
            f"rows with the same {_joined([name])} stand together ({percent(alike)} of neighbors are alike, "
            f"{percent(usual)} of any two rows), and .shuffle({BUFFER_ROWS}) mixes rows that are near each "
            "other"
        )
        cure = _repack(found, f"--shuffle --row-group-size {GOOD_ROWS}")
        cure = '.shuffle(scope="global")' if found.reader in BY_ROW else cure
        yield Finding("clustered", text, cure)


def _alike(chunks: Sequence[pa.Array]) -> tuple[float, float]:
    """The chance that near rows have the same value, and any two; (0, 0) for no labels."""
    kinds, types = {chunk.type for chunk in chunks}, pa.types
    labels = (types.is_string, types.is_large_string, types.is_integer, types.is_boolean)
    if len(kinds) == 1 and any(is_label(*kinds) for is_label in labels):
        joined = pa.concat_arrays(chunks).dictionary_encode(null_encoding="encode")
        codes, distinct = to_numpy(joined.indices), len(joined.dictionary)
        most = min(MOST_LABELS, len(codes) / LABEL_ROWS)
        if len(codes) >= LEAST_ROWS and 1 < distinct <= most:
            shares, apart = np.bincount(codes) / len(codes), min(APART, len(codes) // 16)
            return float((codes[apart:] == codes[:-apart]).mean()), float((shares**2).sum())
    return 0.0, 0.0


def of_equal_rows(
    found: Found, tables: Sequence[pa.Table], asked: Sequence[str]
) -> Iterator[Finding]:
    hashes = [np.empty(0, dtype=np.uint64)]
    for table in tables:
        if names := [name for name in table.column_names if name in (asked or {name} - {*NAMES})]:
            own = table.select(names)
            null = np.logical_and.reduce([to_numpy(column.is_null()) for column in own.columns])
            hashes.append(row_hashes(own)[~null])
    every = np.concatenate(hashes)
    if equal := len(every) - len(np.unique(every)):
        same = f" in {_joined(asked)}" if asked else ""
        text = (
            f"{equal:,} of {len(every):,} rows that were looked at are equal to another one{same} "
            f"({percent(equal / len(every))})"
        )
        by = f"-by {shlex.quote(','.join(asked))}" if asked else ""
        cure = _repack(found, f"--drop-duplicates{by}")
        yield Finding("duplicates", text, "remove copies" if found.reader in BY_ROW else cure)


def _repack(found: Found, options: str) -> str:
    files = " ".join(shlex.quote(hidden(url)) for url in found.urls[:NAMED])
    more = " …" if found.urls[NAMED:] else ""
    return f"trainpipes repack {files}{more} OUT {options}".rstrip()


def _named(shares: dict[str, float]) -> str:
    largest = sorted(shares, key=lambda name: -shares[name])
    said = ", ".join(f"{_joined([name])} ({percent(shares[name])})" for name in largest[:NAMED])
    return said + (f" and {len(largest) - NAMED:,} more columns" if largest[NAMED:] else "")


def _joined(names: Sequence[str]) -> str:
    return " + ".join(repr(cut(name, 60)) for name in names)
