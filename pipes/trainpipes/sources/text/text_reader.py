from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainpipes._internal.pool import default_threads
from trainpipes._internal.progress import Progress
from trainpipes.errors import ConfigError, SchemaError, UnreadableError
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.bad_rows import above_reader, without_bad_files
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.format import Columns, Layout, OtherBytesError
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.schema import chosen, same_names, wider
from trainpipes.sources.text.format import TextFormat
from trainpipes.sources.text.pieces import PIECE_BYTES, TextLayout
from trainpipes.sources.text.text_rows import Start

#: Threads that index files of a server, at most.
MAX_THREADS = 16
#: Files whose first block is looked at, at most; and where types are given, to tell the size of a row.
SAMPLED_FILES, SIZED_FILES = 16, 4
#: Options that rows' ends and inferred types depend on.
SHAPE = ("unit", "delimiter", "quote", "column_names", "null_values", "block_rows", "infer")


class TextReader(FileReader, has_blocks=True):
    """A stage that reads files of a ``TextFormat``: ``read_csv``, ``read_json`` or ``read_text``."""

    free = FileReader.free | {"max_row_bytes"}

    @property
    @abstractmethod
    def form(self) -> TextFormat:
        """The format of the files."""

    @without_bad_files
    def _open_on(self, files: Sequence[Stage]) -> FileSource:
        form, listed, caller, given = self.form, self.listed(files), str(self), self.options
        shape = [given[name] for name in SHAPE if name in given]
        shape += ["bad rows are left out"] * form.leaves_out
        key = json.dumps([*shape, form.max_row_bytes, PIECE_BYTES])
        local = all(map(is_local, listed.systems))
        store = IndexStore(listed, self.name, form.name, key, given["index"], PIECE_BYTES)
        store.complete(
            lambda job: form.scan(job.data, job.progress),
            caller,
            progress=_progress(f"indexing {form.name}", lambda file: int(listed.sizes[file])),
            most=max(1, default_threads()) if local else MAX_THREADS,
        )
        layouts = [TextLayout.of(layout) for layout in store.layouts()]
        schema, columns = given.get("schema"), given.get("columns")
        if form.names_columns:
            wanted = columns if schema is None else schema.names
            _check_names(listed.names, layouts, wanted, caller)
        size = None
        if form.schema is not None:
            text = sum(float((each.stop - each.start).sum()) for each in layouts)
            rows = sum(int(each.rows.sum()) for each in layouts)
            size = text / rows + 4 if rows else None
        elif schema is not None:
            form.schema = _given(form, schema, columns, caller)
        else:
            types = _Types(store, layouts, form, caller, given["infer"])
            form.schema, size = types.found(columns)
            form.strict = columns is None
        edges = [layout.edges for layout in layouts]
        source = FileSource(
            store, form, layouts=layouts, edges=edges, schema=form.schema, row_bytes=size
        )
        source.leave_out(given["on_error"])
        if schema is not None:
            source.row_bytes = source.sampled(SIZED_FILES)
        return source

    def _above(self) -> Sequence[Stage]:
        return above_reader(self, self.options["max_row_bytes"])


def _progress(said: str, size: Callable[[int], int]) -> Callable[[list[int]], Progress]:

    def progress(missing: list[int]) -> Progress:
        sizes = [size(file) for file in missing]
        return Progress(said, sum(sizes) if min(sizes) >= 0 else None, "bytes")

    return progress


def _check_names(
    paths: Sequence[str], layouts: Sequence[TextLayout], columns: Columns, caller: str
) -> None:
    heads = [(path, each.head.names) for path, each in zip(paths, layouts, strict=True)]
    heads = [head for head in heads if head[1]] or heads  # a file of 0 bytes has no rows
    first_path, first = heads[0]
    for path, names in heads:
        if columns is not None:
            chosen(_texts(names), columns, caller, path)
        elif names != first:
            same_names(first_path, first, path, names, caller)


def _texts(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _given(form: TextFormat, schema: pa.Schema, columns: Columns, caller: str) -> pa.Schema:
    for field in schema:
        try:
            form.parse(b"{}\n", Start(0, (field.name,), ","), pa.schema([field]))
        except pa.ArrowNotImplementedError as error:
            raise ConfigError(
                f"{caller}: schema= has column {field.name!r} as {field.type}, which is not read from "
                f"{form.name}: choose another type, and cast it by map_batches()",
                stage=caller,
            ) from error
        except pa.ArrowInvalid:
            pass  # to CSV these are a cell of text
    return pa.schema(list(chosen(schema, columns, caller, "schema=").values()))


@dataclass(frozen=True)
class _Types:
    """The columns of some files and their types, found in their rows."""

    store: IndexStore
    layouts: Sequence[TextLayout]
    form: TextFormat
    caller: str
    infer: str

    def found(self, columns: Columns) -> tuple[pa.Schema, float | None]:
        """The schema of the chosen columns, and bytes of an average row in memory, if known."""
        # A file without rows says nothing of types.
        filled = [file for file, layout in enumerate(self.layouts) if len(layout.rows)]
        files: Sequence[int] = filled or range(len(self.layouts))
        if self.infer == "first":
            files = files[:: -(-len(files) // SAMPLED_FILES)]
        self._look(files)
        layouts = [TextLayout.of(self.store.layout(n)) for n in files]
        paths = [self.store.files.names[n] for n in files]
        whole = self._merged(paths, [layout.schema for layout in layouts])
        if not len(whole) and filled:
            bad = self.form.leaves_out
            what = "no row that can be read" if bad else "rows without a single field"
            raise SchemaError(
                f"{self.caller}: {paths[0]} has {what}, so that no column is known: say the columns and "
                "their types by schema=",
                path=paths[0],
                stage=self.caller,
            )
        fields = chosen(whole, columns, self.caller, paths[0])
        rows, size = 0, 0.0
        for layout in layouts:
            assert layout.sampled is not None
            rows += layout.sampled[0]
            each = zip(layout.schema.names, layout.sampled[1], strict=True)
            size += sum(bytes_ for name, bytes_ in each if name in fields)
        kinds = ((f.type if f.type != pa.null() else self.form.empty) for f in fields.values())
        return pa.schema(list(zip(fields, kinds, strict=True))), size / rows if rows else None

    def _look(self, files: Sequence[int]) -> None:
        """Have the types of some files in the index, by their first pieces."""
        most = 1 if self.infer == "first" else None

        def infer(text: bytes, start: Start, _: int) -> tuple[pa.Schema, list[float]]:
            return self.form.infer(text, start)

        def scan(job: Scan) -> Layout:
            layout, sizes = self.layouts[job.file], Counter[str]()
            schemas: list[pa.Schema] = []
            most = 1 if self.infer == "first" else len(layout.rows)
            opened: Any = self.form.open(job.data, layout)
            with closing(opened) if layout.compression else nullcontext():
                for piece, length in enumerate((layout.stop - layout.start).tolist()):
                    if piece == most and schemas:
                        break
                    if piece == most:  # all rows so far are bad
                        most += 1
                    parts = self.form.parsed(opened, layout, piece, infer)
                    good = [
                        (rows, *types_of)
                        for rows, types_of in parts
                        if not isinstance(types_of, str)
                    ]
                    for _, schema, each in sorted(good, key=lambda part: -part[0]):
                        schemas.append(schema)
                        if self.form.leaves_out:
                            try:
                                schemas = [self._merged([job.data.name] * len(schemas), schemas)]
                            except SchemaError:  # these rows are bad
                                schemas.pop()
                                continue
                        sizes.update(dict(zip(schema.names, each, strict=True)))
                    if job.progress is not None:
                        job.progress.advance(length)
            nothing = pa.schema([(name, pa.null()) for name in layout.head.names])
            schemas = schemas or [nothing]  # without rows
            schema = self._merged([job.data.name] * len(schemas), schemas)
            in_memory = [float(sizes[name]) for name in schema.names]
            return layout.with_types(schema, int(layout.rows[:most].sum()), in_memory)

        def size(file: int) -> int:
            return int((self.layouts[file].stop - self.layouts[file].start)[:most].sum())

        try:
            self.store.complete(
                scan,
                self.caller,
                wanted=files,
                enough=lambda _, layout: TextLayout.of(layout).sampled is not None,
                progress=_progress(f"looking at the types of {self.form.name}", size),
            )
        except UnreadableError as error:
            if isinstance(error.__cause__, OtherBytesError):
                self.store.forget()  # what was kept is wrong
            raise

    def _merged(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
        fields: dict[str, tuple[pa.Field, str]] = {}
        for path, schema in zip(paths, schemas, strict=True):
            for field in schema:
                known, where = fields.get(field.name, (field, path))
                unify, way = self.form.wider, "or give the other columns by schema="
                united = wider(known, field, where, path, self.caller, unify, way)
                fields[field.name] = united, where
        return pa.schema([field for field, _ in fields.values()])
