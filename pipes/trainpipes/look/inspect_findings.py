"""What to fix in data files before training."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import numpy as np

from trainpipes.errors import SchemaError
from trainpipes.errors.secrets import hidden
from trainpipes.errors.text import amount
from trainpipes.look.inspect_reading import TEXTS, Found
from trainpipes.look.inspect_result import Finding
from trainpipes.sources.files.schema import one_schema

#: Rows that ``shuffle`` mixes at a time in README and recipes, and shards that ``sharding_filter`` makes.
BUFFER_ROWS, NUM_SHARDS = 40_960, 24
#: Rows of a row group above which a resume within it is slow: docs/speed.md.
LARGE_ROWS = 100_000
#: Row groups of fewer rows and bytes cost a seek or a request each. Of few of them it does not matter.
SMALL_ROWS, SMALL_BYTES, MANY = 1000, 1 << 20, 100
#: Rows of a row group that are good for most data.
GOOD_ROWS = 10_000
#: Files that a command names.
NAMED = 5


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
    if not len(lengths) or found.reader != "read_parquet":
        return
    files = " ".join(shlex.quote(hidden(url)) for url in found.urls[:NAMED])
    more = " …" if found.urls[NAMED:] else ""
    cure = f"trainpipes repack {files}{more} OUT --row-group-size {GOOD_ROWS}"
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
