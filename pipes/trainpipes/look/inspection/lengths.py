"""How long rows are, in tokens or bytes: a histogram, and how much of padded or packed batches would be
padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.naming import nearest
from trainpipes.columns.arrays import python_to_arrow, to_numpy
from trainpipes.columns.utf8 import has_text, is_utf8, replaced
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.look.inspection.inspection import Lengths
from trainpipes.look.inspection.sample import Sample
from trainpipes.look.inspection.texts import (
    byte_lengths,
    holds_bytes,
    is_number_list,
    item_counts,
    plain_array,
    texts_of,
)
from trainpipes.sources.files.schema import plain
from trainpipes.stages.pack_fit import best_fit, placed
from trainpipes.tokenizers.engine import Engine

__all__ = ["NAMES", "lengths_of", "measured_columns"]

#: Columns whose lengths are shown, at most, if none are named: those with most bytes.
MOST_COLUMNS = 4
#: Columns of names, of the samples of archives and of images, whose lengths say nothing.
NAMES = ("__key__", "path")
#: Bars of a histogram.
BARS = 12
#: Lengths at which sequences are usually cut.
LIMITS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
#: Rows of a batch whose padding is told, and how often all rows are put in a random order for it.
BATCH, ORDERS = 8, 4
#: Bytes of text that are tokenized at a time, about; of a longer text its first bytes are, and count for the
#: rest.
TOKENIZED_BYTES = 1 << 20


def measured_columns(
    sample: Sample, asked: Sequence[str], schema: pa.Schema
) -> list[tuple[str, ...]]:
    """The columns whose lengths are told, in groups that are told as one.

    Args:
        sample: rows.
        asked: columns that the user names, as one; if none, those of texts, bytes or lists of numbers.
        schema: all columns.

    Raises:
        SchemaError: there is no such column, or its rows have no length.
    """
    for name in asked:
        if name not in schema.names:
            raise SchemaError(
                f"inspect_files(column): no column {name!r}{nearest(name, schema.names)}; there are "
                f"{schema.names}"
            )
        kind = plain(schema.field(name)).type
        if not (has_text(kind) or holds_bytes(kind) or is_number_list(kind)):
            raise SchemaError(
                f"inspect_files(column) is a column of text, bytes or lists of numbers, and {name!r} holds "
                f"{kind}; choose another"
            )
    if asked:
        return [tuple(asked)]
    names = [name for name in sample.names if name not in NAMES]
    sizes = {name: _bytes(sample, name) for name in names}
    found = sorted((n for n in names if sizes[n] > 0), key=lambda n: -sizes[n])[:MOST_COLUMNS]
    return [(name,) for name in names if name in found]


def _bytes(sample: Sample, name: str) -> float:
    """Bytes of a column whose rows have a length; 0 for others, and for those where all are alike."""
    total, seen = 0.0, set()
    for array in sample.chunks(name):
        kind = plain_array(array.slice(0, 0)).type
        if not (has_text(kind) or holds_bytes(kind) or is_number_list(kind)):
            return 0.0
        lengths = item_counts(array) if is_number_list(kind) else byte_lengths(array)
        seen.update(np.unique(lengths)[:2].tolist())
        total += float(lengths.sum())
    return total if len(seen) > 1 or sample.rows == 1 else 0.0


def lengths_of(
    sample: Sample, columns: tuple[str, ...], engine: Engine | None, rows: int
) -> Lengths | None:
    """How long rows are in these columns together; None if there are no such rows.

    Args:
        sample: rows.
        columns: of text, bytes or lists of numbers.
        engine: counts tokens of text; None to count bytes.
        rows: of the files that have these columns.
    """
    parts, units = [], set()
    for stretch in sample.stretches:
        if not set(columns) <= stretch.columns.keys():
            continue
        own = np.zeros(len(stretch.table), dtype=np.int64)
        for name in columns:
            found = [_measured(chunk, engine) for chunk in stretch.columns[name].chunks]
            units |= {unit for _, unit in found}
            own += np.concatenate([np.empty(0, np.int64), *(each for each, _ in found)])
        parts.append(own)
    lengths = np.concatenate([np.empty(0, np.int64), *parts])
    if not len(lengths):
        return None
    unit: Literal["tokens", "bytes", "items"] = "items"
    if "tokens" in units:
        unit = "tokens"
        prefix, suffix = engine.affixes() if engine is not None else ((), ())
        lengths += len(prefix) + len(suffix)
    elif "bytes" in units:
        unit = "bytes"
    return _told(lengths, columns, unit, rows)


def _measured(array: pa.Array, engine: Engine | None) -> tuple[IntArray, str]:
    """The length of each row, and in what."""
    kind = plain_array(array.slice(0, 0)).type
    if is_number_list(kind):
        return item_counts(array), "items"
    if engine is None or holds_bytes(kind):
        return byte_lengths(array), "bytes"
    found = np.zeros(len(array), dtype=np.int64)
    for texts, rows in texts_of(array):
        found += np.bincount(rows, _tokens(texts, engine), minlength=len(array)).astype(np.int64)
    return found, "tokens"


def _tokens(texts: pa.Array, engine: Engine) -> IntArray:
    """Tokens of each text."""
    sizes = to_numpy(pc.binary_length(texts)).astype(np.int64)
    found, first = [np.empty(0, dtype=np.int64)], 0
    while first < len(texts):
        count = int(np.searchsorted(np.cumsum(sizes[first:]), TOKENIZED_BYTES, side="right"))
        some = texts.slice(first, max(1, count))
        if not is_utf8(some):
            some = replaced(some)
        scale = 1.0
        if count == 0:  # one long text
            content = bytes(memoryview(some[0].as_buffer())[:TOKENIZED_BYTES])
            some = python_to_arrow([content.decode("utf-8", "ignore")], pa.large_string())
            scale = int(sizes[first]) / TOKENIZED_BYTES
        tokens = engine.encode(some.cast(pa.large_string())).lengths
        found.append((tokens * scale).astype(np.int64))
        first += len(some)
    return np.concatenate(found)


def _told(
    lengths: IntArray,
    columns: tuple[str, ...],
    unit: Literal["tokens", "bytes", "items"],
    rows: int,
) -> Lengths:
    most = int(lengths.max())
    edges, counts = _bars(lengths)
    longer = {
        str(limit): float((lengths > limit).mean())
        for limit in LIMITS
        if limit < most or limit == 512
    }
    padding = packed = packed_length = None
    if unit != "bytes":
        padding = _padding(lengths)
        # The least of the usual lengths that holds nearly all rows; longer ones are cut in pieces.
        high = float(np.percentile(lengths, 99))
        packed_length = next((limit for limit in LIMITS if limit >= high), LIMITS[-1])
        some = lengths[lengths > 0]
        if len(some):
            packed = 1 - float(some.sum()) / (
                len(placed(some, packed_length, None, best_fit)) * packed_length
            )
    return Lengths(
        columns=columns,
        unit=unit,
        rows=len(lengths),
        mean=float(lengths.mean()),
        percentiles={
            str(p): int(np.percentile(lengths, p, method="higher")) for p in (50, 90, 95, 99)
        },
        most=most,
        total=round(float(lengths.mean()) * rows),
        edges=edges,
        counts=counts,
        longer={} if unit == "bytes" else longer,
        padding=padding,
        packed_length=packed_length if packed is not None else None,
        packed_padding=packed,
        rows_of_files=rows,
    )


def _bars(lengths: IntArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Edges and counts of a histogram: bars of one round width up to the 99th percentile, and one for the
    rest."""
    least, high, most = int(lengths.min()), int(np.percentile(lengths, 99)), int(lengths.max())
    if least == most:
        return (least, most), (len(lengths),)
    step = _round_up(max(1, -(-(high - least + 1) // (BARS - 1))))
    first = least // step * step
    edges = [*range(first, high + 1, step)]
    edges.append(edges[-1] + step)
    if edges[-1] <= most:
        edges.append(most + 1)
    counts, _ = np.histogram(lengths, bins=np.array(edges))
    edges[-1] = max(most, edges[-2])
    return tuple(edges), tuple(counts.tolist())


def _round_up(step: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50 and so on."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10


def _padding(lengths: IntArray) -> float:
    """The part of batches of 8 rows, in random order and padded to their longest, that is padding."""
    cells = tokens = 0
    for number in range(ORDERS):
        draw: Any = np.random.Generator(np.random.Philox(key=[0, number]))
        order = lengths[draw.permutation(len(lengths))]
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            cells += len(batch) * int(batch.max())
            tokens += int(batch.sum())
    return 1 - tokens / cells if cells else 0.0
