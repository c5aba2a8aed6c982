"""The columns and types of text files: inferred from their first blocks or from all, and fixed from then on.

Called by whoever opens a pipeline. What was found of a file is kept with its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from trainpipes._internal.progress import Progress
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.sources.files.file_bytes import open_bytes
from trainpipes.sources.files.format import Layout
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import chosen, same_names
from trainpipes.sources.text.blocks import TextBlocks, TextLayout
from trainpipes.sources.text.format import TextFormat

Infer = Literal["first", "all"]

#: Files whose first block is looked at, at most; and where types are given, to tell the size of a row.
SAMPLED_FILES, SIZED_FILES = 16, 4


def schema_of(
    store: IndexStore,
    layouts: Sequence[TextLayout],
    blocks: TextBlocks,
    asker: str,
    columns: Sequence[str] | None,
    schema: pa.Schema | None,
    infer: Infer,
) -> tuple[pa.Schema, float | None]:
    """The schema of the chosen columns, and bytes of an average row of them in memory; None without rows.

    Args:
        store: what is known of the files.
        layouts: their pieces.
        blocks: what reads them, without a schema.
        asker: the stage, for messages.
        columns: names of columns; None for all.
        schema: columns and types as the user says; None to find them.
        infer: where to look.

    Raises:
        SchemaError: a column is missing, or has types that do not fit together.
        UnreadableError: rows are not what they must be; names the line.
    """
    files, form = store.files, blocks.form
    if form.each_names_columns:
        _check_headers(files, layouts, asker, columns if schema is None else schema.names)
    fixed = form.fixed_schema
    if fixed is not None:
        text = float(sum(int((each.stop - each.start).sum()) for each in layouts))
        rows = sum(int(each.rows.sum()) for each in layouts)
        return fixed, text / rows + 4 if rows else None
    if schema is not None:
        _check_types(form, schema, asker)
        wanted = pa.schema(list(chosen(schema, columns, asker, "schema=").values()))
        given = TextBlocks(form, wanted, replace=blocks.replace)
        return wanted, _row_bytes(files, layouts, given)
    # A file without rows says nothing of types.
    filled = [file for file, layout in enumerate(layouts) if len(layout.rows)]
    looked_at: Sequence[int] = filled or range(len(files))
    if infer == "first":
        looked_at = looked_at[:: -(-len(looked_at) // SAMPLED_FILES)]

    _look(store, layouts, blocks, asker, looked_at, infer == "all")
    found = [(files.names[n], store.layout(n).schema) for n in looked_at]
    whole = _merged(found, form, asker)
    if not len(whole) and filled:
        raise SchemaError(
            f"{asker}: {found[0][0]} has rows without a single field, so that no column is known: say the "
            "columns and their types by schema=",
            path=found[0][0],
            stage=asker,
        )
    fields = chosen(whole, columns, asker, found[0][0])
    sampled, size = 0, 0.0
    for n in looked_at:
        layout = TextLayout.of(store.layout(n))
        assert layout.sampled is not None
        sampled += layout.sampled[0]
        each = zip(layout.schema.names, layout.sampled[1], strict=True)
        size += sum(bytes_ for name, bytes_ in each if name in fields)
    return pa.schema(list(fields.values())), size / sampled if sampled else None


def _check_headers(
    files: FileList, layouts: Sequence[TextLayout], asker: str, columns: Sequence[str] | None
) -> None:
    first = layouts[0].head.header
    for name, layout in zip(files.names, layouts, strict=True):
        header = layout.head.header
        if columns is not None:
            chosen(pa.schema([(one, pa.string()) for one in header]), columns, asker, name)
        elif header != first:
            same_names(files.names[0], first, name, header, asker)


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
    layouts: Sequence[TextLayout],
    blocks: TextBlocks,
    asker: str,
    wanted: Sequence[int],
    whole: bool,
) -> None:
    """Find the columns and types of files, in the first piece of each or in all."""
    most = None if whole else 1

    def scan(job: Scan) -> Layout:
        assert job.progress is not None
        layout = layouts[job.file]
        file = blocks.open(job.data, layout)
        sizes = dict[str, float]()
        found: list[tuple[str, pa.Schema]] = []
        try:
            for piece, length in enumerate((layout.stop - layout.start)[:most].tolist()):
                schema, each = blocks.infer(file, piece)
                found.append((file.name, schema))
                job.progress.advance(length)
                for name, size in zip(schema.names, each, strict=True):
                    sizes[name] = sizes.get(name, 0.0) + size
        finally:
            file.close()
        form = blocks.form
        schema = _merged(found, form, asker) if found else form.empty(layout.head)
        in_memory = [sizes.get(name, 0.0) for name in schema.names]
        return layout.with_types(schema, int(layout.rows[:most].sum()), in_memory)

    def progress(missing: list[int]) -> Progress:
        looked = [layouts[file] for file in missing]
        total = sum(int((each.stop - each.start)[:most].sum()) for each in looked)
        return Progress(f"looking at the types of {blocks.name}", total, "bytes")

    store.complete(
        scan,
        asker,
        wanted=wanted,
        enough=lambda _, layout: TextLayout.of(layout).sampled is not None,
        progress=progress,
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


def _row_bytes(files: FileList, layouts: Sequence[TextLayout], blocks: TextBlocks) -> float | None:
    """Bytes of an average row in memory, told from the first piece of some files."""
    rows, size = 0, 0.0
    for number in range(0, len(files), max(1, -(-len(files) // SIZED_FILES))):
        if len(layouts[number].rows):
            file = blocks.open(open_bytes(files, number), layouts[number])
            try:
                table = blocks.table(file, 0)
            finally:
                file.close()
            rows, size = rows + len(table), size + table.nbytes
    return size / rows if rows else None
