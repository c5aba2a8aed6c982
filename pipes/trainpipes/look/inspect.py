"""``inspect_files``: the content of data files, and problems to fix before training, printed as tables."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import IntArray, column_names, whole_number
from trainpipes._internal.messages import Report, folded, need_columns, table, terminal_width
from trainpipes.columns.arrays import has_text, is_number, is_text, laid_out, to_numpy, viewless
from trainpipes.columns.utf8 import replaced
from trainpipes.errors import SchemaError, amount, cut, escaped, hidden, shown
from trainpipes.look import inspect_reading as sampling
from trainpipes.look.values import python_value
from trainpipes.sources.files.formats import one_schema
from trainpipes.tokenizers.adapters import load
from trainpipes.tokenizers.engine import TokenizerEngine

#: Columns, and unreadable files, that are printed; ``to_dict`` has them all.
MOST_PRINTED, MOST_UNREADABLE = 40, 20

Rows = list[list[str]]


@dataclass(frozen=True)
class Column:
    """A column of the files.

    Attributes:
        name: of the column.
        type: of Arrow; several where files differ, such as "int64 or string".
        nulls: their share in the sample, 0 to 1; None if it has none of the column.
    """

    name: str
    type: str
    nulls: float | None


@dataclass(frozen=True)
class Lengths:
    """How long the rows of the sample are.

    Attributes:
        columns: whose lengths are added.
        unit: "tokens", "bytes", or "items" of lists of numbers.
        rows: that were measured.
        mean: of the lengths.
        percentiles: by "50", "90", "95", "99".
        most: the greatest length.
    """

    columns: list[str]
    unit: str
    rows: int
    mean: float
    percentiles: dict[str, int]
    most: int


@dataclass(frozen=True)
class Finding:
    """Something to fix before training.

    Attributes:
        kind: a name for scripts, such as "bad_rows".
        text: the problem.
        cure: the command or the code that fixes it.
    """

    kind: str
    text: str
    cure: str


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """What was found in data files. Prints as tables.

    Attributes:
        reader: the function that reads the files, such as "read_parquet".
        files: number of files, without those that cannot be read.
        bytes: bytes of all files.
        rows: rows of all files that can be read.
        rows_counted: whether all rows were counted; else ``rows`` is an estimate.
        memory_bytes: estimated bytes of all rows in memory.
        row_groups: of Parquet files: their "count", and the "least", "median" and "most" rows of each; else
            None.
        columns: all columns, in the order of the first file.
        sampled_rows: number of rows in the sample.
        shown: some rows of the sample, each value in short, by column.
        lengths: how long rows are.
        findings: problems to fix before training.
        unreadable: why files cannot be read, by path.
        bad_rows: how many rows of the sample cannot be used: lines that cannot be parsed, images, sounds
            and videos that cannot be decoded.
        bad_places: why, of the first ten of them, by place.
        clips: how long sounds and videos are, by their headers.
        table: of a table with versions: its "version", and how many rows in its files are "deleted rows".
    """

    reader: str
    files: int
    bytes: int
    rows: int
    rows_counted: bool
    memory_bytes: int
    row_groups: dict[str, int] | None
    columns: list[Column]
    sampled_rows: int
    shown: list[dict[str, str]]
    lengths: list[Lengths]
    findings: list[Finding]
    unreadable: dict[str, str]
    bad_rows: int = 0
    bad_places: dict[str, str] = dataclasses.field(default_factory=dict)
    clips: list[sampling.Clips] = dataclasses.field(default_factory=list)
    table: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def readable(self) -> bool:
        """Whether every file and every row of the sample can be read, and there are rows."""
        return not self.unreadable and not self.bad_rows and self.rows > 0

    def __str__(self) -> str:
        width, lines = terminal_width(), []
        for rows in self._tables():
            lines += [table([list(map(escaped, row)) for row in rows], width), ""]
        for line in map(escaped, self._lines()):
            copied = line.startswith(("  ->", "cannot be read"))  # a command or a path
            lines += [line] if copied else folded(line, width)
        return "\n".join(lines)

    def _tables(self) -> Iterator[Rows]:
        about = "" if self.rows_counted else "about "
        summary = [
            ["files", f"{self.files:,} of {amount(self.bytes)}, for {self.reader}()"],
            ["rows", f"{about}{self.rows:,}, about {amount(self.memory_bytes)} in memory"],
            *(list(pair) for pair in self.table.items()),
        ]
        if self.row_groups:
            count, *sizes = (f"{value:,}" for value in self.row_groups.values())
            said = f"{count} of {' / '.join(sizes)} rows (least / median / most)"
            summary.append(["row groups", said])
        if self.sampled_rows != self.rows:
            summary.append(["looked at", f"a sample of {self.sampled_rows:,} rows"])
        yield summary
        if self.columns:
            rows = [[column.name, column.type, percent(column.nulls)] for column in self.columns]
            yield _cut([["column", "type", "nulls"], *rows])
        if names := dict.fromkeys(name for row in self.shown for name in row):
            head = ["", *(f"row {n + 1}" for n in range(len(self.shown)))]
            rows = [[name, *(row.get(name, "") for row in self.shown)] for name in names]
            yield _cut([head, *rows])
        for kind in sorted({clips.kind for clips in self.clips}):
            head = [f"{kind} in", "hours in all", "seconds (least / mean / most)", "most are"]
            yield [head, *(clips.cells for clips in self.clips if clips.kind == kind)]
        if self.lengths:
            head = ["length of", "in", "mean", "50 / 90 / 95 / 99 %", "longest"]
            yield [head, *map(self._length, self.lengths)]

    def _length(self, lengths: Lengths) -> list[str]:
        chats = {c.name for c in self.columns if "list<" in c.type and "content:" in c.type}
        names = [f"{c} (texts, without the template)" if c in chats else c for c in lengths.columns]
        percentiles = " / ".join(f"{value:,}" for value in lengths.percentiles.values())
        return [
            " + ".join(names),
            lengths.unit,
            f"{lengths.mean:,.1f}",
            percentiles,
            f"{lengths.most:,}",
        ]

    def _lines(self) -> Iterator[str]:
        for path, reason in list(self.unreadable.items())[:MOST_UNREADABLE]:
            yield f"cannot be read: {path}: {reason}"
        if (more := len(self.unreadable) - MOST_UNREADABLE) > 0:
            yield f"cannot be read: {more:,} more files"
        for place, reason in self.bad_places.items():
            yield f"cannot be read: {place}: {reason}"
        for finding in self.findings:
            yield f"warning: {finding.text}"
            yield f"  -> {finding.cure}"


def percent(share: float | None) -> str:
    """A share as text: never 0 % for a few, nor 100 % for nearly all.

    >>> percent(0.00001), percent(0.123), percent(0.99999), percent(1.0)
    ('under 0.1 %', '12.3 %', 'over 99.9 %', '100 %')
    """
    if share is None:
        return "?"
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %".replace(".0 %", " %")


def _cut(rows: Rows) -> Rows:
    more = len(rows) - 1 - MOST_PRINTED
    if more <= 0:
        return rows
    return [*rows[: MOST_PRINTED + 1], [f"… {more:,} more columns", *[""] * (len(rows[0]) - 1)]]


#: The rows of the sample, by column.
Columns = Mapping[str, Sequence[pa.Array]]
#: Columns whose lengths are measured if none are named: those with most bytes.
MOST_COLUMNS = 4
#: Characters of a value that is shown.
MOST_SHOWN = 80
#: What lengths are in; of several columns together, the last of these.
UNITS = ("items", "bytes", "tokens")
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


def inspect_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tokenizer: Any = None,
    column: str | Sequence[str] | None = None,
    rows: int = 3,
    sample: int = 10_000,
    storage_options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Look at files before training on them: rows, sizes, columns, some rows, lengths of texts, and what to
    fix, each with the command or code that fixes it.

    Reads Parquet, Arrow, JSON lines, CSV, text, NumPy, tar archives, images and folders of
    ``write_memmap``; of several formats that with most bytes. Of a folder that is a Delta, Lance or
    Iceberg table it reads the newest version.

    Nulls, sizes and lengths are those of a sample: 256 MB at most, 32 MB with a tokenizer or
    of remote files. Of JSON, CSV, text and tar files above 256 MB (64 MB if compressed or remote) only some
    are read, and the number of rows is an estimate.

    Args:
        files: a path, folder, glob or URL, or a list of them.
        tokenizer: counts tokens of text, as ``tokenize`` takes it; None to count bytes.
        column: the columns whose lengths are measured, and added; None for each column of texts, bytes or
            lists of numbers by itself.
        rows: number of rows to show.
        sample: the most rows to look at.
        storage_options: options of the file system, as fsspec takes them. They are not shown.

    Raises:
        MissingFilesError: there are no files.
        ConfigError: no name says how to read a file, or an option is invalid.
        SchemaError: there is no such column, or its values have no length.
        UnreachableError: a server does not answer, or denies access.

    >>> import pathlib, tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.parquet"
    >>> pq.write_table(pa.table({"text": ["a", "bc", None]}), path)
    >>> found = inspect_files(path)
    >>> found.rows, found.lengths[0].most, [one.kind for one in found.findings]
    (3, 2, [])
    """
    whole_number(rows, 0, "inspect_files(rows)", "rows that are shown")
    whole_number(sample, 1, "inspect_files(sample)", "rows that are looked at")
    asked = [] if column is None else column_names(column, "inspect_files(column)")
    engine = None if tokenizer is None else load(tokenizer)
    urls = [files] if isinstance(files, str | os.PathLike) else files
    reading = sampling.find_files([os.fspath(url) for url in urls], storage_options)
    tables = sampling.read_sample(reading, sample, small=engine is not None)
    sampled = sum(map(len, tables))
    total = round(int(reading.lengths.sum()) * reading.scale)
    chunks = _chunks(tables)
    columns = _columns(reading, chunks)
    need_columns([each.name for each in columns], asked, "inspect_files(column)")
    together = [asked] if asked else [[name] for name in _measured_columns(chunks)]
    having = [table for table in tables if set(asked) <= set(table.column_names)]
    measured = _chunks(having) if asked else chunks
    lengths = [_lengths(measured, names, engine) for names in together if any(map(len, having))]
    groups = None
    if reading.reader in sampling.ROW_GROUPS and len(reading.lengths):
        sizes = np.quantile(reading.lengths, (0, 0.5, 1)).astype(int).tolist()
        names = ("count", "least", "median", "most")
        groups = dict(zip(names, [len(reading.lengths), *sizes], strict=True))
    return Inspection(
        reader=reading.reader,
        files=reading.count - len(reading.unreadable),
        bytes=reading.bytes,
        rows=total,
        rows_counted=reading.scale == 1,
        memory_bytes=round(sum(table.nbytes for table in tables) / max(1, sampled) * total),
        row_groups=groups,
        columns=columns,
        sampled_rows=reading.looked_at,
        shown=_shown(tables, np.linspace(0, sampled - 1, min(rows, sampled)).astype(int).tolist()),
        lengths=lengths,
        findings=list(_findings(reading, total)),
        unreadable=reading.unreadable,
        bad_rows=reading.bad_rows,
        bad_places=reading.bad,
        clips=[
            sampling.clips_of(name, kind, found, total, sampled)
            for (name, kind), found in reading.clips.items()
        ],
        table=reading.table,
    )


def _findings(sample: sampling.Found, rows: int) -> Iterator[Finding]:
    if others := sample.others:
        named = " ".join(map(shlex.quote, others[:NAMED]))
        text = f"{sample.reader}() does not read files of other formats: {len(others):,} beside the data"
        yield Finding("other_formats", text, f"trainpipes inspect {named}")
    with_rows = {name: source for name, source in sample.sources if len(source.lengths)}
    several = [(name, schema) for name, schema in sample.schemas.items() if name in with_rows]
    try:
        if several:
            format = getattr(with_rows[several[0][0]], "format", None)
            one_schema(several, None, f"{sample.reader}()", getattr(format, "type_rule", "files"))
    except SchemaError as error:
        cure = f".{sample.reader}(columns=[...]) with columns that all files have, or convert files"
        yield Finding("mixed_schemas", str(error), cure)
    if sample.bad_rows:
        text = (
            f"{sample.bad_rows:,} of {sample.looked_at:,} rows that were looked at cannot be used"
        )
        kinds = {"sound": "decode_audio", "video": "decode_video"}
        decoders = [kinds[kind] for _, kind in sample.clips]
        stage = sample.reader if sample.reader in sampling.TEXTS else (*decoders, "decode_image")[0]
        cure = f".{stage}(..., on_error=tp.Quarantine(folder)), which lists them"
        yield Finding("bad_rows", text, cure)
    filled = sample.lengths > 0
    lengths, sizes = sample.lengths[filled], sample.block_bytes[filled]
    if not len(lengths) or sample.reader != "read_parquet":
        return
    files = " ".join(shlex.quote(hidden(url)) for url in sample.urls[:NAMED])
    more = " …" if sample.urls[NAMED:] else ""
    cure = f"trainpipes repack {files}{more} OUT --row-group-size {GOOD_ROWS}"
    if lengths.max() > LARGE_ROWS or len(lengths) < min(NUM_SHARDS, rows // BUFFER_ROWS):
        text = (
            f"{len(lengths):,} row groups for {NUM_SHARDS} shards, of up to {lengths.max():,} rows "
            f"({amount(sizes.max())}): .shuffle({BUFFER_ROWS}) mixes within one of them, and each is decoded "
            "again by every shard that shares it and by a resume"
        )
        yield Finding("large_row_groups", text, cure)
    median, size = int(np.median(lengths)), float(np.median(sizes))
    if len(lengths) >= MANY and median < SMALL_ROWS and size < SMALL_BYTES:
        text = (
            f"half of the {len(lengths):,} row groups have {median:,} rows or fewer, of {amount(size)}: each "
            "costs a seek, or a request to a server"
        )
        yield Finding("small_row_groups", text, cure)


def _chunks(tables: Iterable[pa.Table]) -> dict[str, list[pa.Array]]:
    chunks: dict[str, list[pa.Array]] = {}
    for rows in tables:
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            chunks.setdefault(name, []).extend(map(_plain, column.chunks))
    return chunks


def _plain(array: pa.Array) -> pa.Array:
    """An array without views, run ends and types of Python packages. Readers decode dictionaries."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return viewless(laid_out(array))


def _columns(sample: sampling.Found, chunks: Columns) -> list[Column]:
    types: dict[str, dict[str, None]] = {}
    for each in (field for schema in sample.schemas.values() for field in schema):
        types.setdefault(each.name, {})[cut(str(each.type))] = None
    columns = []
    for name, kinds in types.items():
        column_chunks = chunks.get(name, ())
        seen = sum(map(len, column_chunks))
        nulls = sum(chunk.null_count for chunk in column_chunks) / seen if seen else None
        columns.append(Column(name, " or ".join(kinds), nulls))
    return columns


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _shown(tables: Sequence[pa.Table], rows: Sequence[int]) -> list[dict[str, str]]:
    every = [(table, n) for table in tables for n in range(len(table))]
    chosen = [every[row] for row in rows]
    return [{name: _value(table[name][n]) for name in table.column_names} for table, n in chosen]


def _value(scalar: pa.Scalar) -> str:
    value = python_value(scalar)
    if isinstance(value, bytes):
        return f"<{amount(len(value))}>"
    if isinstance(value, list | dict):
        return shown(value, MOST_SHOWN)
    return "null" if value is None else cut(str(value), MOST_SHOWN)


def _measured_columns(chunks: Columns) -> list[str]:
    """The columns with most bytes whose lengths differ."""
    total: dict[str, int] = {}
    for name in (name for name in chunks if name not in sampling.NAMES):
        lengths, _ = _measured(chunks[name], None) or (np.empty(0), "")
        if not lengths.any():
            continue
        if len(lengths) == 1 or lengths.min() < lengths.max():
            total[name] = int(lengths.sum())
    largest = sorted(total, key=lambda name: -total[name])[:MOST_COLUMNS]
    return [name for name in chunks if name in largest]


def _lengths(chunks: Columns, names: list[str], engine: TokenizerEngine | None) -> Lengths:
    lengths, units = np.zeros(1, dtype=np.int64), []
    for name in names:
        measured = _measured(chunks[name], engine)
        if measured is None:
            odd = next(chunk for chunk in chunks[name] if _measured([chunk], None) is None)
            raise SchemaError(
                f"inspect_files(column) must be a column of text, bytes or lists of numbers, got {name!r} of "
                f"{odd.type}; choose another"
            )
        lengths = lengths + measured[0]
        units.append(measured[1])
    unit = max(units, key=UNITS.index)
    if engine is not None and unit == "tokens":
        lengths += sum(map(len, engine.affixes()))
    percentiles = np.percentile(lengths, (50, 90, 95, 99), method="higher").tolist()
    return Lengths(
        columns=names,
        unit=unit,
        rows=len(lengths),
        mean=float(lengths.mean()),
        percentiles=dict(zip(("50", "90", "95", "99"), percentiles, strict=True)),
        most=int(lengths.max()),
    )


def _measured(
    chunks: Iterable[pa.Array], engine: TokenizerEngine | None
) -> tuple[IntArray, str] | None:
    """The length of each row and its unit; None if rows have no length."""
    lengths, unit = [np.empty(0, dtype=np.int64)], "items"
    for chunk in chunks:
        kind, sizes = chunk.type, np.zeros(len(chunk), dtype=np.int64)
        if has_text(kind):
            unit = "bytes" if engine is None else "tokens"
            for texts, rows in _texts(chunk, np.arange(len(chunk))):
                sizes += np.bincount(rows, _sizes(texts, engine), len(chunk)).astype(np.int64)
        elif _is_list(kind) and is_number(kind.value_type):
            sizes += to_numpy(pc.list_value_length(chunk).fill_null(0))
        elif kind in (pa.binary(), pa.large_binary()):
            sizes, unit = sizes + to_numpy(pc.binary_length(chunk).fill_null(0)), "bytes"
        elif not pa.types.is_null(kind):
            return None
        lengths.append(sizes)
    return np.concatenate(lengths), unit


def _texts(array: pa.Array, rows: IntArray) -> Iterator[tuple[pa.Array, IntArray]]:
    """Texts in an array without nulls, in any lists and structs; and the row of each."""
    array = _plain(array)
    kind = array.type
    if pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _texts(child, rows)
    elif pa.types.is_map(kind):
        pairs = pa.list_(pa.struct([kind.key_field, kind.item_field]))
        yield from _texts(array.cast(pairs), rows)
    elif _is_list(kind):
        parents = to_numpy(pc.list_parent_indices(array))
        yield from _texts(pc.list_flatten(array), rows[parents])
    elif is_text(kind):
        yield array.drop_null(), rows[to_numpy(array.is_valid())]


def _sizes(texts: pa.Array, engine: TokenizerEngine | None) -> IntArray:
    if engine is None:
        return to_numpy(pc.binary_length(texts))
    return engine.encode(replaced(texts).cast(pa.large_string())).lengths
