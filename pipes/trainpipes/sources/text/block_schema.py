"""The columns and types of text files: inferred from their first blocks or from all, and fixed from then on.

Called by whoever opens a pipeline. What was found of a file is kept with its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.sources.files.each_file import each_file
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import chosen, same_names
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.block_index import BlockIndex, Kept
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.piece_reader import PieceReader

Infer = Literal["first", "all"]

#: Files whose first block is looked at, at most; and where types are given, to tell the size of a row.
SAMPLED_FILES, SIZED_FILES = 16, 4


def schema_of(
    kept: Kept,
    index: BlockIndex,
    form: TextFormat,
    asker: str,
    columns: Sequence[str] | None,
    schema: pa.Schema | None,
    infer: Infer,
    replace: bool = False,
) -> tuple[pa.Schema, float | None]:
    """The schema of the chosen columns, and bytes of an average row of them in memory; None without rows.

    Args:
        kept: what is known of the files.
        index: their pieces.
        form: their format.
        asker: the stage, for messages.
        columns: names of columns; None for all.
        schema: columns and types as the user says; None to find them.
        infer: where to look.
        replace: put U+FFFD in place of what is not UTF-8.

    Raises:
        SchemaError: a column is missing, or has types that do not fit together.
        UnreadableError: rows are not what they must be; names the line.
    """
    files = kept.files
    if form.each_names_columns:
        _check_headers(files, index, asker, columns if schema is None else schema.names)
    fixed = form.fixed_schema
    if fixed is not None:
        text = float((index.stops - index.begins).sum())
        return fixed, text / int(index.rows.sum()) + 4 if len(index.rows) else None
    if schema is not None:
        _check_types(form, schema, asker)
        wanted = pa.schema(list(chosen(schema, columns, asker, "schema=").values()))
        return wanted, _row_bytes(files, index, form, wanted, replace)
    # A file without rows says nothing of types.
    looked_at = np.flatnonzero(np.diff(index.first_piece)).tolist() or range(len(files))
    if infer == "first":
        looked_at = looked_at[:: -(-len(looked_at) // SAMPLED_FILES)]

    def lacking() -> list[int]:
        return [n for n in looked_at if kept.entry(n).schema is None]

    def look(wanted: Sequence[int]) -> None:
        _look(kept, index, form, asker, wanted, infer == "all", replace)

    if lacking():
        kept.complete(look, lacking)
    found = [(files.names[n], _known(kept, n)) for n in looked_at]
    whole = _merged(found, form, asker)
    if not len(whole) and len(index.rows):
        raise SchemaError(
            f"{asker}: {found[0][0]} has rows without a single field, so that no column is known: say the "
            "columns and their types by schema=",
            path=found[0][0],
            stage=asker,
        )
    wanted = pa.schema(list(chosen(whole, columns, asker, found[0][0]).values()))
    sampled = sum(kept.entry(n).sampled_rows for n in looked_at)
    size = sum(
        bytes_
        for n in looked_at
        for name, bytes_ in zip(_known(kept, n).names, kept.entry(n).sampled_bytes, strict=True)
        if name in wanted.names
    )
    return wanted, size / sampled if sampled else None


def _known(kept: Kept, file: int) -> pa.Schema:
    found = kept.entry(file).schema
    return pa.schema([]) if found is None else found


def _check_headers(
    files: FileList, index: BlockIndex, asker: str, columns: Sequence[str] | None
) -> None:
    first = index.starts[0].header
    for file, start in enumerate(index.starts):
        if columns is not None:
            names = pa.schema([(name, pa.string()) for name in start.header])
            chosen(names, columns, asker, files.names[file])
        elif start.header != first:
            same_names(files.names[0], first, files.names[file], start.header, asker)


def _check_types(form: TextFormat, schema: pa.Schema, asker: str) -> None:
    problem = form.unreadable(schema)
    if problem:
        raise ConfigError(
            f"{asker}: schema= has {problem}, which is not read from {form.name}: choose another type, and "
            "cast it by map_batches()",
            stage=asker,
        )


def _look(
    kept: Kept,
    index: BlockIndex,
    form: TextFormat,
    asker: str,
    missing: Sequence[int],
    whole: bool,
    replace: bool,
) -> None:
    """Find the columns and types of files, in the first piece of each or in all."""
    files = kept.files

    def work(file: int, requests: Requests) -> None:
        reader = PieceReader(files, index, form, requests, replace)
        pieces = index.pieces(file)
        last = pieces.stop if whole else min(pieces.stop, pieces.start + 1)
        entry = kept.entry(file)
        rows, sizes = 0, dict[str, float]()
        found: list[tuple[str, pa.Schema]] = []
        try:
            for piece in range(pieces.start, last):
                schema, each = reader.infer(piece)
                found.append((files.names[file], schema))
                rows += int(index.rows[piece])
                progress.advance(int(index.stops[piece] - index.begins[piece]))
                for name, size in zip(schema.names, each, strict=True):
                    sizes[name] = sizes.get(name, 0.0) + size
        finally:
            reader.close()
        entry.schema = _merged(found, form, asker) if found else form.empty(index.starts[file])
        entry.sampled_rows = rows
        entry.sampled_bytes = [sizes.get(name, 0.0) for name in entry.schema.names]

    total = 0
    for file in missing:
        pieces = index.pieces(file)
        looked = slice(pieces.start, pieces.stop if whole else min(pieces.stop, pieces.start + 1))
        total += int((index.stops[looked] - index.begins[looked]).sum())
    with Progress(f"looking at the types of {form.name}", total, "bytes") as progress:
        each_file(files, work, asker, form.name, wanted=missing, progress=progress, least=1)


def _merged(found: Sequence[tuple[str, pa.Schema]], form: TextFormat, asker: str) -> pa.Schema:
    """One schema that holds the values of all."""
    fields: dict[str, pa.Field] = {}
    where: dict[str, str] = {}
    for path, schema in found:
        for field in schema:
            known = fields.get(field.name)
            try:
                fields[field.name] = field if known is None else form.wider(known, field)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise SchemaError(
                    f"{asker}: column {field.name!r} is {known.type} in {where[field.name]} and "  # type: ignore[union-attr]
                    f"{field.type} in {path}, and no type can hold both; convert one, leave the "
                    "column out by "
                    "columns=[...], or say the type by schema=",
                    path=path,
                    stage=asker,
                ) from error
            where.setdefault(field.name, path)
    return pa.schema(list(fields.values()))


def _row_bytes(
    files: FileList, index: BlockIndex, form: TextFormat, schema: pa.Schema, replace: bool
) -> float | None:
    """Bytes of an average row in memory, told from the first piece of some files."""
    rows, size = 0, 0.0
    requests = Requests(files.retry_seconds)
    reader = PieceReader(files, index, form, requests, replace)
    try:
        for file in range(0, len(files), max(1, -(-len(files) // SIZED_FILES))):
            pieces = index.pieces(file)
            if pieces.start < pieces.stop:
                table = reader.table(pieces.start, schema, False)
                rows, size = rows + len(table), size + table.nbytes
    finally:
        reader.close()
    return size / rows if rows else None
