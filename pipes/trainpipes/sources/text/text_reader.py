from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import byte_count, require
from trainpipes._internal.progress import Progress
from trainpipes.engine.pool import default_threads
from trainpipes.errors import ConfigError, SchemaError, UnreadableError
from trainpipes.kinds.source import Place
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.block_reader import explained
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.format import Layout, OtherBytesError
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.files.schema import chosen, same_names, wider
from trainpipes.sources.text.block_scan import PIECE_BYTES, Start, TextLayout
from trainpipes.sources.text.format import MOST_ROW_BYTES, TextFormat

#: Threads that index files of a server, at most.
MAX_THREADS = 16
#: Files whose first block is looked at, at most; and where types are given, to tell the size of a row.
SAMPLED_FILES, SIZED_FILES = 16, 4


def row_bytes(value: Any, option: str) -> int:
    found = byte_count(value, option)
    rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
    require(found <= MOST_ROW_BYTES, option, rule, value)
    return found


class TextReader(FileReader):
    has_blocks = True
    free = FileReader.free | {"max_row_bytes"}

    @property
    @abstractmethod
    def form(self) -> TextFormat:
        """The format of the files."""

    @property
    def common(self) -> dict[str, Any]:
        """Options that all formats have."""
        given = self.options
        return {
            "block_rows": given["block_rows"],
            "max_row_bytes": row_bytes(given["max_row_bytes"], f"{self.name}(max_row_bytes)"),
            "replace": given["errors"] == "replace",
            "inferred": "schema" in given and given["schema"] is None,
        }

    def open_files(self, files: Sequence[Stage]) -> FileSource:
        form, listed, caller, given = self.form, self.listed(files), str(self), self.options
        shape = [getattr(form, name) for name in (*form.shaped_by, "block_rows", "max_row_bytes")]
        key = json.dumps([*shape, PIECE_BYTES, given.get("infer")])
        local = all(map(is_local, listed.systems))
        store = IndexStore(listed, self.name, form.name, key, given["index"], PIECE_BYTES)
        store.complete(
            lambda job: form.scan(job.data, job.progress),
            caller,
            progress=_progress(f"indexing {form.name}", lambda file: int(listed.sizes[file])),
            most=max(1, default_threads()) if local else MAX_THREADS,
        )
        layouts = [TextLayout.of(layout) for layout in store.layouts()]
        types = _Types(store, layouts, form, caller, given.get("columns"), given.get("infer"))
        try:
            form.schema, size = types.of(given.get("schema"))
        except UnreadableError as error:
            if isinstance(error.__cause__, OtherBytesError):
                store.forget()  # what was kept is wrong
            raise
        form.strict = types.columns is None and form.inferred
        edges = [layout.edges(form.block_rows) for layout in layouts]
        how: Any = {"layouts": layouts, "edges": edges, "schema": form.schema}
        if given.get("schema") is not None:
            size = types.row_bytes()
        return FileSource(store, form, row_bytes=size, **how)


def _progress(said: str, size: Callable[[int], int]) -> Callable[[list[int]], Progress]:

    def progress(missing: list[int]) -> Progress:
        sizes = [size(file) for file in missing]
        return Progress(said, sum(sizes) if min(sizes) >= 0 else None, "bytes")

    return progress


@dataclass(frozen=True)
class _Types:
    """The columns of some files and their types, given or found in their rows."""

    store: IndexStore
    layouts: Sequence[TextLayout]
    form: TextFormat
    caller: str
    columns: Sequence[str] | None
    infer: str | None

    def of(self, schema: pa.Schema | None) -> tuple[pa.Schema, float | None]:
        """The schema of the chosen columns, and bytes of an average row in memory, if known."""
        form = self.form
        if form.names_columns:
            self._check_names(self.columns if schema is None else schema.names)
        if form.schema is not None:
            text = sum(float((each.stop - each.start).sum()) for each in self.layouts)
            rows = sum(int(each.rows.sum()) for each in self.layouts)
            return form.schema, text / rows + 4 if rows else None
        if schema is None:
            return self._found()
        for field in schema:
            try:
                form.parse(form.no_rows, Start(0, (field.name,), ","), pa.schema([field]))
            except pa.ArrowNotImplementedError as error:
                raise ConfigError(
                    f"{self.caller}: schema= has column {field.name!r} as {field.type}, which is not read "
                    f"from {form.name}: choose another type, and cast it by map_batches()",
                    stage=self.caller,
                ) from error
        return pa.schema(list(chosen(schema, self.columns, self.caller, "schema=").values())), None

    def row_bytes(self) -> float | None:
        """Bytes of an average row in memory, by the first pieces of some files."""
        rows, size, files = 0, 0.0, self.store.files
        for file in range(0, len(files), -(-len(files) // SIZED_FILES) or 1):
            layout, place = self.layouts[file], Place(files.names[file])
            if len(layout.rows):
                with explained(place, kept_in=self.store.kept_in), ExitStack() as stack:
                    opened: Any = self.form.open(open_bytes(files, file), layout)
                    if layout.compression:
                        stack.enter_context(closing(opened))
                    table = pa.Table.from_batches(self.form.decode(opened, layout, 0, None))
                rows, size = rows + len(table), size + table.nbytes
        return size / rows if rows else None

    def _check_names(self, columns: Sequence[str] | None) -> None:
        paths = self.store.files.names
        first = self.layouts[0].head.names
        for path, names in zip(paths, (each.head.names for each in self.layouts), strict=True):
            if columns is not None:
                texts = pa.schema([(name, pa.string()) for name in names])
                chosen(texts, columns, self.caller, path)
            elif names != first:
                same_names(paths[0], first, path, names, self.caller)

    def _found(self) -> tuple[pa.Schema, float | None]:
        # A file without rows says nothing of types.
        filled = [file for file, layout in enumerate(self.layouts) if len(layout.rows)]
        looked_at: Sequence[int] = filled or range(len(self.layouts))
        if self.infer == "first":
            looked_at = looked_at[:: -(-len(looked_at) // SAMPLED_FILES)]
        self._look(looked_at, None if self.infer == "all" else 1)
        layouts = [TextLayout.of(self.store.layout(n)) for n in looked_at]
        paths = [self.store.files.names[n] for n in looked_at]
        whole = self._merged(paths, [layout.schema for layout in layouts])
        if not len(whole) and filled:
            raise SchemaError(
                f"{self.caller}: {paths[0]} has rows without a single field, so that no column is known: say "
                "the columns and their types by schema=",
                path=paths[0],
                stage=self.caller,
            )
        fields = chosen(whole, self.columns, self.caller, paths[0])
        rows, size = 0, 0.0
        for layout in layouts:
            assert layout.sampled is not None
            rows += layout.sampled[0]
            each = zip(layout.schema.names, layout.sampled[1], strict=True)
            size += sum(bytes_ for name, bytes_ in each if name in fields)
        return pa.schema(list(fields.values())), size / rows if rows else None

    def _look(self, files: Sequence[int], most: int | None) -> None:
        """Have the types of some files in the index, by their first pieces."""

        def scan(job: Scan) -> Layout:
            layout, found, sizes = self.layouts[job.file], [], dict[str, float]()
            opened: Any = self.form.open(job.data, layout)
            with closing(opened) if layout.compression else nullcontext():
                for piece, length in enumerate((layout.stop - layout.start)[:most].tolist()):
                    schema, each = self.form.parsed(opened, layout, piece, self.form.infer)
                    found.append(schema)
                    for name, size in zip(schema.names, each, strict=True):
                        sizes[name] = sizes.get(name, 0.0) + size
                    if job.progress is not None:
                        job.progress.advance(length)
            names = layout.head.names if self.form.names_columns else ()
            found = found or [pa.schema([(name, pa.string()) for name in names])]  # without rows
            schema = self._merged([job.data.name] * len(found), found)
            in_memory = [sizes.get(name, 0.0) for name in schema.names]
            return layout.with_types(schema, int(layout.rows[:most].sum()), in_memory)

        def size(file: int) -> int:
            return int((self.layouts[file].stop - self.layouts[file].start)[:most].sum())

        self.store.complete(
            scan,
            self.caller,
            wanted=files,
            enough=lambda _, layout: TextLayout.of(layout).sampled is not None,
            progress=_progress(f"looking at the types of {self.form.name}", size),
        )

    def _merged(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
        fields: dict[str, tuple[pa.Field, str]] = {}
        for path, schema in zip(paths, schemas, strict=True):
            for field in schema:
                known, where = fields.get(field.name, (field, path))
                unify, way = self.form.wider, "say the type by schema="
                found = wider(known, field, where, path, self.caller, unify, way)
                fields[field.name] = found, where
        return pa.schema([field for field, _ in fields.values()])
