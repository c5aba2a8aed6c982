"""``read_json``: rows of JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes.sources.text.format import MAX_ROW_BYTES
from trainpipes.sources.text.json_rows import Json
from trainpipes.sources.text.text_reader import TextReader


class ReadJson(TextReader):
    r"""Reads JSON files: an object on each line, or one array of objects.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow; objects within objects are
    structs, arrays are lists. Cursor: which block, and how many rows of it.

    Files are cut into blocks of about 4 MB, which an index lists: it is made by reading the files once, and
    kept. Files may be compressed (.gz, .zst, .bz2, .xz); their first bytes tell. See docs/formats.md.

    Columns and types are inferred from the first block of up to 16 files, and fixed from then on: a row that
    does not fit is an error that names the file and the line. A field that a row lacks is null.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the objects ``a``. Other fields are left out.
            None for all; then a field that the first blocks do not have is an error.
        schema: columns and types to read, instead of inferring them; other fields are left out.
        infer: "first" infers columns and types from the first blocks; "all" from all rows, read once, and
            widens types that differ (integers and floats, null and anything).
        block_rows: rows in a block; if left out, as many as make about 4 MB.
        max_row_bytes: bytes of a row at most, decompressed; a file with a longer one is refused, by its line,
            before much of it is in memory. About 4 times as much are needed to read such a row.
        errors: "strict" raises where text is not UTF-8, and names the line and the byte; "replace" puts
            U+FFFD in its place.
        index: where to keep the index: a file that ends in ".arrow", or a folder. True: in the cache folder
            (see ``tp.cache``). False: nowhere. If left out: in the cache folder, if the files are
            remote, 64 or more, or 4 MiB or more in all.
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.

    Raises:
        ConfigError: an option is invalid, or ``schema`` has a type that cannot be read from JSON.
        UnreadableError: a line is broken or not UTF-8 (names it), or a file is not JSON, or cut off.
        SchemaError: there is no such column; later, a row does not fit the schema.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
    >>> _ = path.write_text('{"id": 1, "messages": [{"role": "user", "content": "Hi"}]}\n{"id": 2}\n')
    >>> list(tp.list_files(path).read_json())
    [{'id': 1, 'messages': [{'role': 'user', 'content': 'Hi'}]}, {'id': 2, 'messages': None}]
    """

    columns: Sequence[str] | None = None
    _: KW_ONLY
    schema: pa.Schema | None = None
    infer: Literal["first", "all"] = "first"
    block_rows: int | None = None
    max_row_bytes: int | str = MAX_ROW_BYTES
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> Json:
        return Json(exact=self.schema is None, max_row_bytes=self.most_row_bytes)
