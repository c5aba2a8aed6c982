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
from trainpipes.sources.files.format import Layout, unpacked
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import chosen, same_names
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.text.block_index import BlockIndex, has_types, with_types
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.piece_reader import PieceReader

Infer = Literal["first", "all"]

#: Files whose first block is looked at, at most; and where types are given, to tell the size of a row.
SAMPLED_FILES, SIZED_FILES = 16, 4


def schema_of(
    store: IndexStore,
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
        store: what is known of the files.
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
    files = store.files
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

    _look(store, index, form, asker, looked_at, infer == "all", replace)
    found = [(files.names[n], store.layout(n).schema) for n in looked_at]
    whole = _merged(found, form, asker)
    if not len(whole) and len(index.rows):
        raise SchemaError(
            f"{asker}: {found[0][0]} has rows without a single field, so that no column is known: say the "
            "columns and their types by schema=",
            path=found[0][0],
            stage=asker,
        )
    fields = chosen(whole, columns, asker, found[0][0])
    sampled, size = 0, 0.0
    for n in looked_at:
        extra = unpacked(store.layout(n).extra)
        sampled += extra["sampled_rows"]
        each = zip(store.layout(n).schema.names, extra["sampled_bytes"], strict=True)
        size += sum(bytes_ for name, bytes_ in each if name in fields)
    return pa.schema(list(fields.values())), size / sampled if sampled else None


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
    store: IndexStore,
    index: BlockIndex,
    form: TextFormat,
    asker: str,
    wanted: Sequence[int],
    whole: bool,
    replace: bool,
) -> None:
    """Find the columns and types of files, in the first piece of each or in all."""
    files = store.files

    def pieces_of(file: int) -> range:
        pieces = index.pieces(file)
        return range(pieces.start, pieces.stop if whole else min(pieces.stop, pieces.start + 1))

    def scan(job: Scan) -> Layout:
        assert job.progress is not None
        assert job.known is not None
        reader = PieceReader(files, index, form, job.requests, replace)
        rows, sizes = 0, dict[str, float]()
        found: list[tuple[str, pa.Schema]] = []
        try:
            for piece in pieces_of(job.file):
                schema, each = reader.infer(piece)
                found.append((files.names[job.file], schema))
                rows += int(index.rows[piece])
                job.progress.advance(int(index.stops[piece] - index.begins[piece]))
                for name, size in zip(schema.names, each, strict=True):
                    sizes[name] = sizes.get(name, 0.0) + size
        finally:
            reader.close()
        schema = _merged(found, form, asker) if found else form.empty(index.starts[job.file])
        return with_types(job.known, schema, rows, [sizes.get(name, 0.0) for name in schema.names])

    def progress(missing: list[int]) -> Progress:
        looked = [piece for file in missing for piece in pieces_of(file)]
        total = int((index.stops[looked] - index.begins[looked]).sum())
        return Progress(f"looking at the types of {form.name}", total, "bytes")

    store.complete(
        scan,
        asker,
        wanted=wanted,
        enough=lambda _, layout: has_types(layout),
        progress=progress,
        least=1,
    )


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
