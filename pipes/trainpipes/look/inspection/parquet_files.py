"""What the footers of Parquet files say, file by file: a file that is damaged does not hide the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trainpipes.errors import ConfigError, UnreachableError
from trainpipes.look.inspection.inspection import BadFile
from trainpipes.look.inspection.part import ColumnFacts, Found, Part
from trainpipes.sources.files.each_file import each_file, reason
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet.index import footer_of
from trainpipes.sources.parquet.probe import Probe
from trainpipes.sources.parquet.read_parquet import ParquetSource
from trainpipes.sources.parquet.size import WIDTHS, arrow_bytes
from trainpipes.sources.remote.retry import Requests, Stopped

__all__ = ["parquet_files"]

#: Column chunks that are looked at in all footers together: about 25 us each. More files, row groups or
#: columns are looked at in part, evenly spread.
MOST_CHUNKS = 40_000
#: Distinct values of row groups of one value that are remembered of a column.
MOST_VALUES = 10_000


@dataclass
class _Chunks:
    """What the column chunks of one file say.

    Args:
        rows: of the row groups that were looked at.
        memory: bytes of these in memory.
        codecs: bytes by codec.
        columns: by the name of the column.
    """

    rows: int = 0
    memory: float = 0.0
    codecs: Counter[str] = field(default_factory=Counter)
    columns: dict[str, ColumnFacts] = field(default_factory=dict)


def parquet_files(files: FileList) -> Found:
    """What the footers say. Costs a read of each file's end, 16 files at a time; no row is read.

    Raises:
        UnreachableError: a server does not answer, or denies access.
    """
    found = Found("row groups")
    chunks: dict[int, _Chunks] = {}

    def look(file: int, requests: Requests) -> Part | BadFile:
        own = _Chunks()
        size = int(files.sizes[file])
        try:
            footer = footer_of(
                files, file, None, False, requests,
                lambda _, metadata: _look(own, metadata, file, len(files), size),
            )  # fmt: skip
        except (UnreachableError, Stopped, MemoryError, ConfigError):
            raise
        except Exception as error:
            return BadFile(files.names[file], reason(error))
        chunks[file] = own
        rows = np.array(footer.rows, dtype=np.int64)
        names = footer.schema.names
        times = Counter(names)
        columns = [name for name in names if times[name] == 1]
        return Part(
            name=files.names[file],
            size=footer.size,
            rows=int(rows.sum()),
            counted=True,
            lengths=rows,
            block_bytes=np.array(footer.group_bytes, dtype=np.float64),
            row_bytes=-1.0,
            schema=footer.schema,
            open=partial(
                ParquetSource,
                files.pick(np.array([file], dtype=np.int64)),
                None if len(columns) == len(names) else columns,
                "inspect_files()",
                False,
            ),
        )

    read = each_file(files, look, "inspect_files()", "Parquet", job="reading Parquet footers")
    looked = 0
    for file, part in read.items():
        if isinstance(part, BadFile):
            found.bad.append(part)
            continue
        found.parts.append(part)
        looked += chunks[file].rows
        found.codecs.update(chunks[file].codecs)
        for name, facts in chunks[file].columns.items():
            _add(found.columns.setdefault(name, ColumnFacts()), facts)
    _fill_row_bytes(found, [chunks[f] for f, part in read.items() if isinstance(part, Part)])
    found.looked = looked / found.rows if found.rows else 1.0
    return found


def _fill_row_bytes(found: Found, chunks: list[_Chunks]) -> None:
    """Bytes of a row of each file; of files that were not looked at, those of the others."""
    rows = sum(own.rows for own in chunks)
    usual = sum(own.memory for own in chunks) / rows if rows else None
    for part, own in zip(found.parts, chunks, strict=True):
        if own.rows:
            part.row_bytes = own.memory / own.rows
        elif usual is not None:
            part.row_bytes = usual
        else:
            part.row_bytes = float(part.block_bytes.sum()) / max(1, part.rows)


def _look(own: _Chunks, metadata: Any, file: int, files: int, size: int) -> None:
    """Look at the column chunks of some row groups of a file."""
    leaves = metadata.num_columns
    if not leaves or not metadata.num_row_groups:
        return
    budget = MOST_CHUNKS / files  # of this file
    if file % max(1, int(leaves / budget)):
        return
    count = int(min(metadata.num_row_groups, max(1, budget // leaves)))
    picked = np.unique(np.linspace(0, metadata.num_row_groups - 1, count).astype(int)).tolist()
    schema = metadata.schema
    columns = [schema.column(n) for n in range(leaves)]
    tops = [leaf.path.split(".", 1)[0] if "." in leaf.path else leaf.path for leaf in columns]
    names = set(metadata.schema.to_arrow_schema().names)
    tops = [
        leaf.path if leaf.path in names else top for leaf, top in zip(columns, tops, strict=True)
    ]
    probe = Probe.of(metadata, size)
    every = list(range(leaves))
    for number in picked:
        group = metadata.row_group(number)
        if not group.num_rows or not probe.passes(number, every):
            continue
        own.rows += group.num_rows
        own.memory += sum(arrow_bytes(metadata, number, every))
        for n, leaf in enumerate(columns):
            chunk = group.column(n)
            facts = own.columns.setdefault(tops[n], ColumnFacts())
            facts.bytes += chunk.total_compressed_size
            codec = chunk.compression.lower()
            own.codecs["none" if codec == "uncompressed" else codec] += chunk.total_compressed_size
            flat = leaf.max_repetition_level == 0 and leaf.path == tops[n]
            if flat and chunk.physical_type == leaf.physical_type:
                _statistics(facts, chunk.statistics, leaf, group.num_rows)


def _statistics(facts: ColumnFacts, statistics: Any, leaf: Any, rows: int) -> None:
    if leaf.max_definition_level == 0:  # it has no nulls
        facts.rows += rows
    elif statistics is not None and statistics.has_null_count:
        facts.rows += rows
        facts.nulls += statistics.null_count
    if statistics is None or not statistics.has_min_max:
        return
    least, most = statistics.min_raw, statistics.max_raw
    facts.groups += 1
    if least == most:
        facts.constant += 1
        if len(facts.values) < MOST_VALUES:
            facts.values.add(least)
    if leaf.physical_type not in WIDTHS and leaf.logical_type.type not in ("STRING", "DECIMAL"):
        return
    try:
        _widen(facts, statistics.min, statistics.max)
    except (UnicodeDecodeError, ValueError, OverflowError):
        return  # not UTF-8, or beyond what Python has


def _add(facts: ColumnFacts, more: ColumnFacts) -> None:
    facts.bytes += more.bytes
    facts.rows += more.rows
    facts.nulls += more.nulls
    facts.groups += more.groups
    facts.constant += more.constant
    if len(facts.values) < MOST_VALUES:
        facts.values |= more.values
    if more.least is not None:
        _widen(facts, more.least, more.most)


def _widen(facts: ColumnFacts, least: Any, most: Any) -> None:
    """Take more values into the range that is known."""
    try:
        facts.least = least if facts.least is None else min(facts.least, least)
        facts.most = most if facts.most is None else max(facts.most, most)
    except TypeError:
        return  # files have the column in types that do not compare
