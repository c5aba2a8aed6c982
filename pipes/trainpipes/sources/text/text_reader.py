"""What ``read_json``, ``read_csv`` and ``read_text`` share: what they open."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from trainpipes._internal.checks import byte_count, require
from trainpipes._internal.progress import Progress
from trainpipes.engine.pool import default_threads
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.format import OtherBytesError
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.text.block_scan import PIECE_BYTES
from trainpipes.sources.text.block_schema import schema_of
from trainpipes.sources.text.blocks import TextBlocks, TextLayout
from trainpipes.sources.text.format import MOST_ROW_BYTES, TextFormat

#: Threads that index files of a server, at most.
MAX_THREADS = 16


class TextReader(FileReader):
    """A stage that reads rows of text.

    A class below this one has the options ``block_rows``, ``max_row_bytes``, ``errors``, ``index`` and
    ``storage_options``; and ``columns``, ``schema`` and ``infer`` if the rows of its format say which columns
    they have.
    """

    has_blocks = True
    free = FileReader.free | {"max_row_bytes"}

    def check(self) -> None:
        super().check()
        option = f"{self.name}(max_row_bytes)"
        rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
        require(self.most_row_bytes <= MOST_ROW_BYTES, option, rule, self.options["max_row_bytes"])

    @property
    def most_row_bytes(self) -> int:
        """Bytes of a row at most."""
        return byte_count(self.options["max_row_bytes"], f"{self.name}(max_row_bytes)")

    @property
    @abstractmethod
    def form(self) -> TextFormat:
        """The format of the files."""

    def open_files(self, files: Sequence[Stage]) -> FileSource:
        """The rows of the files that the stages below list and let through."""
        form, given, asker = self.form, self.options, str(self)
        columns, schema = given.get("columns"), given.get("schema")
        infer, block_rows = given.get("infer", "first"), given["block_rows"]
        blocks = TextBlocks(form, replace=given["errors"] == "replace", block_rows=block_rows)
        listed = self.listed(files)
        key = json.dumps([form.settings, block_rows, PIECE_BYTES, infer], sort_keys=True)
        for attempt in range(2):
            store = IndexStore(listed, self.name, form.name, key, given["index"], PIECE_BYTES)
            store.complete(blocks.look, asker, **_progress(listed, form.name))
            layouts = [TextLayout.of(layout) for layout in store.layouts()]
            try:
                found, row_bytes = schema_of(store, layouts, blocks, asker, columns, schema, infer)
            except OtherBytesError:
                store.forget()  # what was kept is wrong
                if attempt:
                    raise
            else:
                break
        blocks.schema, blocks.strict = found, columns is None and schema is None
        edges = [layout.edges(block_rows) for layout in layouts]
        return FileSource(
            store, blocks, layouts=layouts, edges=edges, schema=found, row_bytes=row_bytes
        )


def _progress(files: FileList, name: str) -> dict[str, Any]:
    """How files are scanned: their bytes are counted, and those here by one thread a core."""

    def progress(missing: list[int]) -> Progress:
        sizes = files.sizes[missing]
        total = int(sizes.sum()) if (sizes >= 0).all() else None
        return Progress(f"indexing {name}", total, "bytes")

    local = all(map(is_local, files.systems))
    return {"progress": progress, "most": max(1, default_threads()) if local else MAX_THREADS}
