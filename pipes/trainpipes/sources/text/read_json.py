"""``read_json``: rows of JSON files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import pyarrow as pa

from trainpipes.sources.text.json_rows import Json
from trainpipes.sources.text.text_reader import TextReader

__all__ = ["ReadJson"]


class ReadJson(TextReader):
    r"""Reads JSON files: an object on each line, or one array of objects.

    In: files, from ``list_files``. Out: rows with the chosen columns, as Arrow; objects within objects are
    structs, arrays are lists. Cursor: which block, and how many rows of it.

    Files are cut into blocks of about 4 MB by an index, which is made by reading them once and kept. They may
    be compressed: .gz, .zst, .bz2, .xz, told by what they begin with. See docs/formats.md.

    Columns and types are those of the first block of 16 files at most, and held to: a row that does not fit
    is an error that names the file and the line. What a row lacks is null.

    Args:
        columns: names of columns; ``"a.b"`` for field ``b`` of the objects ``a``. None for all, and then a
            field that the first blocks do not have is an error; else others are left out.
        schema: columns and their types, in place of what is found. Fields that it lacks are left out.
        infer: "first" looks for types in the first blocks, "all" in all rows, once: it makes types wider
            where they differ (integers and floats, null and anything), and takes fields from anywhere.
        block_rows: rows in a block, of each file; by bytes if left out.
        errors: what to do about text that is not UTF-8: "strict" raises, and names the line and the byte;
            "replace" has U+FFFD in its place.
        index: where to keep the index: a file that ends in ".arrow", or a folder. By default in the cache's
            folder (see ``trainpipes.cache``), for remote files, for 64 local ones or more, and for 4 MiB or
            more; True: there in any case; False: not at all.
        storage_options: options for the fsspec file system, in addition to those of ``list_files``.
            They are neither shown nor part of a state.

    Raises:
        ConfigError: an option is something else, or ``schema`` has a type that JSON is not read as.
        UnreadableError: a line is broken or not UTF-8, and is named; a file is no JSON, or is cut off.
        SchemaError: there is no such column; later, a row does not fit the schema.
        DataChangedError: a file is no longer what it was when it was listed.

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
    errors: Literal["strict", "replace"] = "strict"
    index: str | os.PathLike[str] | bool | None = None
    storage_options: Mapping[str, Any] | None = None

    @property
    def form(self) -> Json:
        return Json()
