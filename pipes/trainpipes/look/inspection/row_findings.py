"""What to know of rows before training, by a sample of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.progress import Progress
from trainpipes._internal.shown import cut
from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.utf8 import has_text, is_utf8
from trainpipes.look.inspection.duplicates import repeats_of
from trainpipes.look.inspection.file_findings import BUFFER_ROWS, GOOD_ROWS, repack
from trainpipes.look.inspection.given_files import GivenFiles
from trainpipes.look.inspection.inspection import Column, Finding
from trainpipes.look.inspection.lengths import NAMES as NAME_COLUMNS
from trainpipes.look.inspection.part import Found
from trainpipes.look.inspection.row_order import clustered_columns
from trainpipes.look.inspection.sample import Sample, all_rows
from trainpipes.look.inspection.texts import is_text, plain_array

__all__ = ["percent", "row_findings"]

#: Columns that a finding names.
NAMED = 5
#: A row group has so many rows fewer than a window that enough of them are in one to mix sorted labels.
GROUPS_IN_WINDOW = 32


def row_findings(
    given: GivenFiles,
    found: Found,
    sample: Sample,
    columns: Sequence[Column],
    duplicates: bool,
    asked: Sequence[str],
) -> Iterator[Finding]:
    """Everything that is to be said of rows.

    Args:
        given: the files.
        found: what they say of themselves.
        sample: rows.
        columns: what is known of each column.
        duplicates: whether to read all rows for those that are equal.
        asked: columns in which rows are to be equal; all if none.
    """
    yield from _nulls(columns)
    yield from _texts(given, sample)
    yield from _order(given, found, sample)
    yield from _repeats(given, found, sample, duplicates, asked)
    for said in sample.unlike[:NAMED]:
        yield Finding("warning", "unlike_rows", said, "mend the row, or say the types by schema=")


def percent(share: float) -> str:
    """A share in words: never 0 % for what is there, nor 100 % for what is not all.

    >>> percent(0.00001), percent(0.123), percent(0.99999), percent(1.0)
    ('under 0.1 %', '12.3 %', 'over 99.9 %', '100 %')
    """
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def _nulls(columns: Sequence[Column]) -> Iterator[Finding]:
    with_nulls = sorted((c for c in columns if c.nulls), key=lambda c: -(c.nulls or 0))
    if not with_nulls:
        return
    said = [
        f"{_quoted(c.name)} ({percent(c.nulls or 0)}, "
        f"{'' if c.nulls_counted else 'about '}{c.null_rows:,} row{'s' * (c.null_rows != 1)})"
        for c in with_nulls[:NAMED]
    ]
    more = f" and {len(with_nulls) - NAMED:,} more columns" if len(with_nulls) > NAMED else ""
    some = next((c for c in with_nulls if c.nulls and c.nulls < 1), None)
    cure = "leave the column out by columns=[...]"
    if some is not None:
        cure = (
            f".filter(pc.field({some.name!r}).is_valid()), or leave the column out by columns=[...]"
        )
    yield Finding("warning", "nulls", f"nulls in {', '.join(said)}{more}", cure)


def _texts(given: GivenFiles, sample: Sample) -> Iterator[Finding]:
    empty: dict[str, int] = {}
    bad: list[str] = []
    for stretch in sample.stretches:
        for name, column in stretch.columns.items():
            for chunk in column.chunks:
                if not has_text(chunk.type):
                    continue
                if name not in bad and not is_utf8(chunk):
                    bad.append(name)
                plain = plain_array(chunk)
                if is_text(plain.type):
                    sizes = pc.binary_length(plain).drop_null()
                    empty[name] = empty.get(name, 0) + int((to_numpy(sizes) == 0).sum())
    rows = sample.rows
    said = [
        f"{_quoted(name)} ({percent(count / rows)} of {rows:,} rows looked at)"
        for name, count in empty.items()
        if count
    ]
    if said:
        first = next(name for name, count in empty.items() if count)
        yield Finding(
            "warning", "empty_texts", f"empty texts in {', '.join(said[:NAMED])}",
            f".filter(pc.field({first!r}) != \"\")",
        )  # fmt: skip
    if bad:
        cure = ""
        if given.reader in ("read_parquet", "read_json", "read_csv", "read_text"):
            cure = f'.{given.reader}(errors="replace") puts U+FFFD in its place'
        yield Finding(
            "warning",
            "not_utf8",
            f"text that is not UTF-8 in {', '.join(map(_quoted, bad[:NAMED]))}",
            cure,
        )


def _order(given: GivenFiles, found: Found, sample: Sample) -> Iterator[Finding]:
    for one in clustered_columns(found, sample)[:NAMED]:
        said = (
            f"rows with the same {_quoted(one.name)} stand together ({percent(one.alike)} of neighbours are "
            f"alike, {percent(one.usual)} of any two rows)"
        )
        if found.rows <= BUFFER_ROWS:
            yield Finding("note", "clustered", f"{said}: shuffle all", f".shuffle({BUFFER_ROWS})")
            continue
        cure = repack(given, f"--shuffle --row-group-size {GOOD_ROWS}")
        if given.reader in ("read_images", "read_numpy", "from_memmap"):
            cure = '.shuffle(scope="global")'
        rows = max(1, int(np.median(found.lengths[found.lengths > 0])))
        window = max(1, BUFFER_ROWS // rows)
        told = f"a shuffle of {BUFFER_ROWS:,} rows holds {window:,} of the {found.called} at a time"
        mixed = "so that batches hold few of its values"
        if window >= GROUPS_IN_WINDOW:
            mixed = "which mixes them less well than rows in random order"
        yield Finding("warning", "clustered", f"{said}: {told}, {mixed}", cure)


def _repeats(
    given: GivenFiles, found: Found, sample: Sample, duplicates: bool, asked: Sequence[str]
) -> Iterator[Finding]:
    tables: Iterator[pa.Table] = (stretch.table for stretch in sample.stretches)
    where = "rows" if sample.whole else "rows that were looked at"
    if duplicates and not sample.whole:
        tables, where = all_rows(found, sample), "rows"
    with Progress("looking for equal rows", found.rows if duplicates else 0, "rows") as progress:
        rows, repeated = repeats_of(_compared(tables, asked, progress))
    if not repeated:
        return
    same = f" in {' + '.join(map(_quoted, asked))}" if asked else ""
    more = "" if duplicates or sample.whole else "; --duplicates looks at all rows"
    by = f"-by {shlex.quote(','.join(asked))}" if asked else ""
    cure = "" if given.reader == "read_images" else repack(given, f"--drop-duplicates{by}")
    yield Finding(
        "warning",
        "duplicates",
        f"{repeated:,} of {rows:,} {where} are equal to another one{same} "
        f"({percent(repeated / rows)}){more}",
        cure,
    )


def _compared(
    tables: Iterable[pa.Table], asked: Sequence[str], progress: Progress
) -> Iterator[pa.Table]:
    """What rows are compared by: the columns asked for, else all but names of files and samples."""
    for table in tables:
        if asked:
            kept = table.select([name for name in asked if name in table.column_names])
            null = [to_numpy(column.is_null()) for column in kept.columns]
            kept = kept.filter(to_arrow(~np.logical_and.reduce(null))) if null else kept
        else:
            kept = table.drop_columns([name for name in NAME_COLUMNS if name in table.column_names])
        if kept.num_columns:
            yield kept
        progress.advance(len(table))


def _quoted(name: str) -> str:
    return repr(cut(name, 60))
