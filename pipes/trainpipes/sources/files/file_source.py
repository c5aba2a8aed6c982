"""The rows of files of any format. Made by the thread that plans; several threads read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.sources.files.block_reader import BlockReader
from trainpipes.sources.files.file_rows import FileRows
from trainpipes.sources.files.format import Format
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.schema import chosen, different_schemas, one_schema


class FileSource(FileRows):
    """Rows of files; a block is one of the format's. Can be pickled, as the format can.

    Args:
        files: which.
        format: what reads one of them.
        asker: the stage, for messages.
        reader: its name.
        columns: names of columns; None for all.
        schema: columns and types of all rows; None for those that the files have.
        index: where layouts are kept; see ``IndexStore``.
        known: names the format in keys of a cache, and in the index.
        scanning: options of ``IndexStore.complete``.

    Attributes:
        format: see above.
        layouts: of each file.
        columns: see above.
        schema: Arrow schema of every table that a reader gives; None if there are no rows to tell.
        kept_in: the file in which the layouts are kept, if they are.
    """

    def __init__(
        self,
        files: FileList,
        format: Format,
        asker: str,
        reader: str,
        *,
        columns: Sequence[str] | None = None,
        schema: pa.Schema | None = None,
        index: str | bool | None = None,
        known: Any = None,
        **scanning: Any,
    ) -> None:
        self.format, self.columns, self._known = format, columns, known
        store = IndexStore(files, reader, format.name, json.dumps(known, sort_keys=True), index)

        store.complete(lambda job: format.scan(job.data), asker, **scanning)
        self.layouts, self.kept_in = store.layouts(), store.kept_in
        super().__init__(files, [np.append(0, np.cumsum(each.rows)) for each in self.layouts])
        self.sizes = store.sizes
        sizes = np.concatenate([each.stop - each.start for each in self.layouts])
        if sizes.any():
            self.block_bytes = sizes.astype(np.float64)
        self.schema = schema
        self.said_of_schema = "schema= has" if schema is not None else "the others have"
        different = different_schemas(files.names, [each.schema for each in self.layouts])
        if schema is None and any(len(one) for _, one in different):
            self.schema = one_schema(different, columns, asker)
        filled = np.flatnonzero(self.lengths)
        if len(filled):
            with_rows = BlockReader(self)
            try:
                first = with_rows.first(int(filled[0]))
            finally:
                with_rows.close()
            self.row_bytes = first.nbytes / len(first)
            if self.schema is None:
                self.schema = first.schema.remove_metadata()
                self.said_of_schema = "the first rows have"
                if columns is not None:
                    path = files.names[int(self.file_of_block[filled[0]])]
                    self.schema = pa.schema(
                        list(chosen(self.schema, columns, asker, path).values())
                    )

    @property
    def decoder(self) -> str:
        """What messages call that which decodes."""
        return getattr(self.format, "decoder", f"{type(self.format).__name__}.decode")

    @property
    def versioned_by(self) -> str:
        """What the user changes to say that other rows come."""
        return "version=" if hasattr(self.format, "decoder") else "key"

    def reader(self) -> BlockReader:
        return BlockReader(self)

    def ranges(self, block: int) -> list[tuple[int, int]]:
        """The bytes of its file that are read for a block; none if they are not known."""
        file = int(self.file_of_block[block])
        own = block - int(self.first_block[file])
        found = self.format.ranges(self.layouts[file], own, self.columns)
        return [(start, stop) for start, stop in found if start < stop]

    def fetched_bytes(self, block: int) -> float:
        """Bytes that are fetched for a block."""
        return float(sum(stop - start for start, stop in self.ranges(block)))

    def block_key(self, block: int) -> Any:
        """As of any file; and what names the format."""
        return [*super().block_key(block), self._known]
