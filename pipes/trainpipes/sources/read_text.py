"""``read_text``, and what it shares with ``read_csv`` and ``read_json``."""

from __future__ import annotations

import json
import logging
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cache as once
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal import pool
from trainpipes._internal.checks import ColumnName, IntArray
from trainpipes._internal.progress import Progress
from trainpipes.errors import ConfigError, SchemaError, UnreadableError, hidden
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.stage import Stage
from trainpipes.sources import text_cutters, text_pieces
from trainpipes.sources.files import formats
from trainpipes.sources.files.decoded_files import above_reader, without_bad_files
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.text_format import TextFormat
from trainpipes.sources.text_pieces import TextLayout, row_bytes

log = logging.getLogger("trainpipes")

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
        form, listed, caller, options = self.form, self.listed(files), str(self), self.options
        shape = [options[name] for name in SHAPE if name in options]
        shape += ["bad rows are left out"] * form.leaves_out
        shape += ["names are replaced"] * (form.names_columns and form.replace)
        key = json.dumps([*shape, form.max_row_bytes, text_pieces.PIECE_BYTES])
        local = all(map(is_local, listed.systems))
        store = IndexStore(
            listed, self.name, form.name, key, options["index"], text_pieces.PIECE_BYTES
        )
        store.complete(
            lambda job: form.scan(job.data, job.progress),
            caller,
            progress=_progress(f"indexing {form.name}", lambda file: int(listed.sizes[file])),
            most=max(1, pool.default_threads()) if local else MAX_THREADS,
        )
        layouts = [TextLayout.of(layout) for layout in store.layouts()]
        schema, columns = options.get("schema"), options.get("columns")
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
            types = _Types(store, layouts, form, caller, options["infer"])
            form.schema, size = types.found(columns)
            form.strict = columns is None
        edges = [layout.edges for layout in layouts]
        source = FileSource(
            store, form, layouts=layouts, edges=edges, schema=form.schema, row_bytes=size
        )
        source.leave_out(options["on_error"])
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
    paths: Sequence[str], layouts: Sequence[TextLayout], columns: formats.Columns, caller: str
) -> None:
    heads = [(path, each.head.names) for path, each in zip(paths, layouts, strict=True)]
    heads = [head for head in heads if head[1]] or heads  # a file of 0 bytes has no rows
    first_path, first = heads[0]
    if mark := text_pieces.other_mark(first):
        _say_mark(first_path, first[0], mark)
    for path, names in heads:
        if columns is not None:
            formats.chosen(_text_schema(names), columns, caller, path)
        elif names != first:
            formats.same_names(first_path, first, path, names, caller)


@once
def _say_mark(path: str, name: str, mark: str) -> None:
    said = "read_csv: %s has a single column, %r: if %r parts its cells, take delimiter=%r"
    log.warning(said, hidden(path), name, mark, mark)


def _text_schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _given(form: TextFormat, schema: pa.Schema, columns: formats.Columns, caller: str) -> pa.Schema:
    for field in schema:
        try:
            form.parse(b"{}\n", text_pieces.Start(0, (field.name,), ","), pa.schema([field]))
        except pa.ArrowNotImplementedError as error:
            raise ConfigError(
                f"{caller}: schema= has column {field.name!r} as {field.type}, which is not read from "
                f"{form.name}: choose another type, and cast it by map_batches()",
                stage=caller,
            ) from error
        except pa.ArrowInvalid:
            pass  # to CSV these are a cell of text
    return pa.schema(list(formats.chosen(schema, columns, caller, "schema=").values()))


@dataclass(frozen=True)
class _Types:
    """The columns of some files and their types, found in their rows."""

    store: IndexStore
    layouts: Sequence[TextLayout]
    form: TextFormat
    caller: str
    infer: str

    def found(self, columns: formats.Columns) -> tuple[pa.Schema, float | None]:
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
            contents = "no row that can be read" if bad else "rows without a single field"
            raise SchemaError(
                f"{self.caller}: {paths[0]} has {contents}, so that no column is known: say the columns and "
                "their types by schema=",
                path=paths[0],
                stage=self.caller,
            )
        fields = formats.chosen(whole, columns, self.caller, paths[0])
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

        def infer(text: bytes, start: text_pieces.Start, _: int) -> tuple[pa.Schema, list[float]]:
            return self.form.infer(text, start)

        def scan(job: Scan) -> formats.Layout:
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
            if isinstance(error.__cause__, formats.OtherBytesError):
                self.store.forget()  # the cached index is wrong
            raise

    def _merged(self, paths: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
        by_path, way = zip(paths, schemas, strict=True), "or give the other columns by schema="
        return formats.united(by_path, self.caller, self.form.type_rule, way)


Unit = Literal["line", "paragraph", "document"]
#: Lines that follow each other and have something.
PARAGRAPH = re.compile(rb"(?:^[ \t\r]*[^ \t\r\n][^\n]*\n?)+", re.MULTILINE)
CUTTERS: dict[str, type[text_cutters.Cutter]] = {
    "line": text_cutters.LineCutter,
    "paragraph": text_cutters.ParagraphCutter,
    "document": text_cutters.DocumentCutter,
}


class ReadText(TextReader):
    r"""Reads text files, also compressed (.gz, .zst, .bz2, .xz): a row for each line, paragraph or file.

    Args:
        unit: "line": every line, empty ones too, without its end (``\n`` or ``\r\n``). "paragraph": lines
            between blank ones, joined by ``\n``. "document": the whole file as it is.
        output_column: the name of the column.
        block_rows, max_row_bytes, errors, on_error, index, storage_options: as in ``read_json``.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
    >>> _ = path.write_text("one\ntwo\n\nthree\n")
    >>> [row["text"] for row in tp.read_text(path)]
    ['one', 'two', '', 'three']
    >>> [row["text"] for row in tp.read_text(path, "paragraph")]
    ['one\ntwo', 'three']
    """

    unit: Unit = "line"
    _: KW_ONLY
    output_column: ColumnName = "text"
    block_rows: int | None = None
    max_row_bytes: Annotated[int | str, row_bytes] = text_pieces.MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    on_error: OnBadRow = "raise"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> TextFormat:
        return PlainText(self.options)


class PlainText(TextFormat):
    """Text files as a format: lines, paragraphs or whole files."""

    name = "text"
    reader: ClassVar[str] = "read_text"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.unit, self.column = options["unit"], options["output_column"]
        self.schema = pa.schema([(self.column, pa.string())])

    def start(self, head: bytes, whole: bool, path: str) -> text_pieces.Start:
        return text_pieces.Start(len(text_pieces.BOM) if head.startswith(text_pieces.BOM) else 0)

    def cutter(self, start: text_pieces.Start) -> text_cutters.Cutter:
        return CUTTERS[self.unit]()

    def parse(
        self, data: bytes, start: text_pieces.Start, schema: pa.Schema | None, strict: bool = False
    ) -> pa.Table:
        if self.unit == "document":
            texts = _texts(data, np.array([0, len(data)]))
        else:
            data = data.replace(b"\r\n", b"\n") if b"\r" in data else data
            texts = _lines(data) if self.unit == "line" else _paragraphs(data)
        return pa.table({self.column: texts}, schema=self.schema)


def _texts(content: bytes, offsets: IntArray) -> pa.Array:
    if len(content) > text_pieces.MOST_ROW_BYTES:  # once U+FFFD has taken the place of single bytes
        raise pa.ArrowInvalid(f"the text has {len(content):,} bytes, and Arrow holds 2 GB")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


def _lines(data: bytes) -> pa.Array:
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == text_cutters.FEED)
    offsets = np.append(0, newlines - np.arange(len(newlines)))
    if data and data[-1] != text_cutters.FEED:
        offsets = np.append(offsets, len(data) - len(newlines))
    return _texts(data.replace(b"\n", b""), offsets)


def _paragraphs(data: bytes) -> pa.Array:
    paragraphs = [part.rstrip(b"\n") for part in PARAGRAPH.findall(data)]
    return _texts(b"".join(paragraphs), np.cumsum([0, *map(len, paragraphs)]))
