"""``inspect_files``: what files of data hold, and what to know of them before training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes._internal.shown import cut, shown
from trainpipes.errors import ConfigError
from trainpipes.look.inspection.cells import cell, harmless, shown_type
from trainpipes.look.inspection.file_findings import changed_files, file_findings
from trainpipes.look.inspection.given_files import GivenFiles, given_files
from trainpipes.look.inspection.inspection import Column, Groups, Inspection, Spread
from trainpipes.look.inspection.lengths import lengths_of, measured_columns
from trainpipes.look.inspection.other_files import other_files
from trainpipes.look.inspection.parquet_files import parquet_files
from trainpipes.look.inspection.part import ColumnFacts, Found, one_type, rows_with, types_of
from trainpipes.look.inspection.row_findings import row_findings
from trainpipes.look.inspection.sample import Sample, read_sample
from trainpipes.tokenizers.load import load

__all__ = ["inspect_files"]

#: Rows that are looked at unless the user says.
SAMPLE = 10_000
#: Shards that ``sharding_filter`` has unless told otherwise.
NUM_SHARDS = 24
#: Characters of a least or greatest value.
BOUND = 40


def inspect_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tokenizer: Any = None,
    column: str | Sequence[str] | None = None,
    rows: int = 3,
    sample: int = SAMPLE,
    duplicates: bool = False,
    num_shards: int = NUM_SHARDS,
    storage_options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Look at files before training on them: rows, sizes, columns, some rows, how long texts are, and what
    may cost speed or quality, each with what to do about it.

    Files are read as their names say, as recipes read them: Parquet, Arrow, JSON lines, CSV, text, NumPy, tar
    archives, images; and folders that ``write_memmap`` wrote. Where formats are mixed, the one with most
    bytes is looked at, and the others are named. A file that cannot be read is named, and the others are
    looked at.

    Of Parquet files, only footers are read, about 0.2 ms a file, and a sample of rows, from all files; from a
    large row group only its beginning. JSON, CSV and text files of up to 256 MB in all (a quarter of that if
    they are compressed or remote) are read once to count rows; of more, the first 1 MiB of up to 64 files is
    read. Memory is at most 256 MiB of rows, or one row.

    Args:
        files: a path, folder, glob or URL, or a list of them.
        tokenizer: counts tokens of text; given as for ``tokenize``. None to count bytes.
        column: the column whose lengths are shown; lengths of several are added, such as prompt and response.
            None for all columns of texts, bytes and lists of numbers, each by itself.
        rows: number of rows to show.
        sample: the most rows to look at.
        duplicates: read all rows to count duplicates; else they are counted in the sample.
        num_shards: ``num_shards`` of the pipeline that will read the files.
        storage_options: options of the file system, as fsspec takes them. They are not shown.

    Raises:
        MissingFilesError: there are no files.
        ConfigError: no name says how to read a file, or an option is invalid.
        SchemaError: there is no such column.
        UnreachableError: a server does not answer, or denies access.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> pq.write_table(pa.table({"text": ["a", "bc", None]}), path)
    >>> found = inspect_files(path)
    >>> found.rows, [one.kind for one in found.warnings]
    (3, ['nulls'])
    """
    whole_number(rows, 0, "inspect_files(rows)", "rows that are shown")
    whole_number(sample, 1, "inspect_files(sample)", "rows that are looked at")
    whole_number(num_shards, 1, "inspect_files(num_shards)", "shards")
    several = [files] if isinstance(files, str | os.PathLike) else files
    urls = [os.fspath(url) for url in several]
    asked = [column] if isinstance(column, str) else list(column or ())
    if not all(isinstance(name, str) for name in asked):
        raise ConfigError(
            f"inspect_files(column) is the name of a column, or several, got {shown(column)}"
        )
    engine = None if tokenizer is None else load(tokenizer)
    given = given_files(urls, storage_options)
    found = parquet_files(given.files) if given.reader == "read_parquet" else other_files(given)
    looked = read_sample(found, sample, given.remote, given.reader == "read_images")
    columns = _columns(found, looked)
    total = found.rows
    schemas = found.schemas
    measured = measured_columns(looked, asked, _schema(found)) if looked.rows else []
    lengths = [lengths_of(looked, names, engine, rows_with(schemas, names)) for names in measured]
    told = [
        *file_findings(given, found, num_shards),
        *row_findings(given, found, looked, columns, duplicates, asked),
        *changed_files(given),
    ]
    bad = {one.path: one for one in [*found.bad, *looked.bad]}
    return Inspection(
        reader=given.reader,
        files=found.memory_maps or len(given.files) - len(bad),
        bytes=int(np.maximum(given.files.sizes, 0).sum()) or sum(p.size for p in found.parts),
        rows=None if found.passed_over and not found.parts else total,
        rows_counted=all(part.counted for part in found.parts) and not found.passed_over,
        memory_bytes=round(found.row_bytes * total) if total else None,
        codecs=dict(found.codecs.most_common()),
        groups=_groups(given, found),
        columns=tuple(columns),
        sampled_rows=looked.rows,
        beginnings=looked.beginnings,
        shown=tuple(_rows(looked, rows)),
        lengths=tuple(one for one in lengths if one is not None),
        findings=tuple(sorted(told, key=lambda one: one.level == "note")),
        unreadable=tuple(bad.values()),
    )


def _schema(found: Found) -> pa.Schema:
    """The columns of all files, each as the first file that has it."""
    fields: dict[str, pa.Field] = {}
    for part in found.parts:
        for field in part.schema:
            known = fields.get(field.name)
            if known is None or pa.types.is_null(known.type):
                fields[field.name] = field
    return pa.schema(list(fields.values()))


def _groups(given: GivenFiles, found: Found) -> Groups | None:
    lengths, sizes = found.lengths, found.block_bytes
    if not len(lengths) or given.reader == "read_images":
        return None
    if not all(part.counted for part in found.parts):
        return None
    return Groups(found.called, len(lengths), _spread(lengths), _spread(sizes))


def _spread(values: Any) -> Spread:
    return Spread(int(values.min()), int(np.median(values)), int(values.max()))


def _columns(found: Found, sample: Sample) -> list[Column]:
    """All columns: what footers say of them, else what the sample does."""
    nulls: dict[str, int] = {}
    seen: dict[str, int] = {}
    for stretch in sample.stretches:
        for name, column in stretch.columns.items():
            nulls[name] = nulls.get(name, 0) + column.null_count
            seen[name] = seen.get(name, 0) + len(column)
    told = []
    schemas = found.schemas
    scale = 1 / found.looked if found.looked else 1.0
    for field in _schema(found):
        facts, name = found.columns.get(field.name, ColumnFacts()), field.name
        there, kinds = rows_with(schemas, [name]), one_type(types_of(schemas, name))
        count, share = facts.rows, facts.nulls / facts.rows if facts.rows else None
        if share is None and seen.get(name):
            count, share = seen[name], nulls[name] / seen[name]
        told.append(
            Column(
                name=name,
                type=" or ".join(map(shown_type, kinds)),
                nulls=share,
                null_rows=None if share is None else round(share * there),
                nulls_counted=count == there,
                bytes=round(facts.bytes * scale) if facts.bytes else None,
                # Of some row groups only they would be misleading.
                least=_bound(facts.least) if found.looked == 1 else None,
                most=_bound(facts.most) if found.looked == 1 else None,
            )
        )
    return told


def _bound(value: object) -> str | None:
    return None if value is None else harmless(cut(str(value), BOUND))


def _rows(sample: Sample, count: int) -> list[dict[str, str]]:
    """Some rows, from the beginning, the middle and so on, each value in short."""
    filled = [stretch.table for stretch in sample.stretches if len(stretch.table)]
    if not filled:
        return []
    picked = np.unique(np.linspace(0, sample.rows - 1, min(count, sample.rows)).astype(int))
    ends = np.cumsum([len(table) for table in filled])
    found = []
    for row in picked.tolist():
        number = int(np.searchsorted(ends, row, side="right"))
        table = filled[number].slice(row - int(ends[number] - len(filled[number])), 1)
        found.append(
            {
                name: cell(next(c for c in column.chunks if len(c)), 0)
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
        )
    return found
