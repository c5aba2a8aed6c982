from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import column_names
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import cut_by_bytes, cut_evenly
from trainpipes.sources.files.file_source import NumberedFiles
from trainpipes.sources.files.index_store import IndexStore
from trainpipes.sources.tar.samples import (
    BLOCK_BYTES,
    KEY,
    MOST_MEMBER,
    Members,
    TarSamples,
    beside,
    members_in,
)

#: Bytes of local archives from which on an index of them is kept.
LARGE = 64 << 20


class ReadWebdataset(FileReader):
    """Reads the samples of tar archives in WebDataset's layout: consecutive members with one name up to the
    first dot, such as ``0001.jpg`` and ``0001.cls``.

    Rows are Arrow, with the key as ``__key__`` and a column of bytes for each extension. Members without an
    extension, hidden ones, folders and links are skipped. A compressed or remote archive is read once for its
    headers, unless an index of ``wds2idx`` lies beside it. Samples of plain local archives can be chosen by
    number (``shuffle(scope="global")``).

    Args:
        columns: extensions, and ``"__key__"``; None for those of the first sample.
        missing: where a sample lacks a member, "raise" raises; "null" gives null, and ``columns`` are by
            default all extensions of all archives.
        text: extensions whose members come as text, such as ``["txt"]``.
        block_rows: samples in a block (a shuffle permutes blocks first); if left out, about 4 MB.
        storage_options: more options of fsspec; never shown or saved.
        index: where to keep the headers; see ``read_parquet``. If left out, also from 64 MB on.

    Raises:
        UnreadableError: names all files that are no archives.
        SchemaError: a sample lacks a member that others have; names it.
        DataChangedError: a file has changed since it was listed.

    >>> import io, pathlib, tarfile, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "digits.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name, content in [("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one"), ("1.cls", b"1")]:
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(content)
    ...         archive.addfile(member, io.BytesIO(content))
    >>> list(tp.list_files(path).read_webdataset(text=["txt"]))[1]
    {'__key__': '1', 'txt': 'one', 'cls': b'1'}
    """

    has_blocks = True
    random_access = True

    columns: Sequence[str] | None = None
    _: KW_ONLY
    missing: Literal["raise", "null"] = "raise"
    text: Sequence[str] = ()
    block_rows: int | None = None
    storage_options: Mapping[str, Any] | None = None
    index: str | os.PathLike[str] | bool | None = None

    def check(self) -> None:
        super().check()
        self._set(text=tuple(column_names(self.text, "read_webdataset(text)", least=0)))

    def open_files(self, files: Sequence[Stage]) -> NumberedFiles:
        caller, listed = str(self), self.listed(files)
        store = IndexStore(listed, self.name, TarSamples.name, "", self.options["index"], LARGE)
        store.complete(
            lambda job: TarSamples().scan(job.data, beside(listed, job)),
            caller,
            job="reading headers of tar archives",
        )
        found = members_in(store, self.columns, self.missing == "null", caller)
        edges, layouts = [], []
        for each in found:
            own = each.row_bytes(np.arange(len(each.keys)))
            pieces = blocks = cut_by_bytes(own, BLOCK_BYTES)
            if self.block_rows is not None:
                blocks = cut_evenly(len(own), self.block_rows)
            elif each.compression:
                blocks = pieces[[0, -1]] if len(own) else pieces
            pieces, ends = np.union1d(pieces, blocks), np.append(0, np.cumsum(own))
            places = {"start": ends[pieces[:-1]], "stop": ends[pieces[1:]]}  # in all members' bytes
            edges.append(blocks)
            layouts.append(replace(each, rows=np.diff(pieces), **places))
        names = [KEY, *found[0].sizes] if self.columns is None else self.columns
        schema = pa.schema([(name, self._type(name, found)) for name in names])
        rows = sum(int(layout.rows.sum()) for layout in layouts)
        total = sum(int((layout.stop - layout.start).sum()) for layout in layouts)
        row_bytes = total / rows if rows else None
        how: Any = {"layouts": layouts, "edges": edges, "schema": schema, "row_bytes": row_bytes}
        return NumberedFiles(store, TarSamples(schema), **how)

    def _type(self, name: str, found: Sequence[Members]) -> pa.DataType:
        is_text = name in (*self.text, KEY)
        if name != KEY and any(each.sizes[name].max(initial=0) > MOST_MEMBER for each in found):
            return pa.large_string() if is_text else pa.large_binary()
        return pa.string() if is_text else pa.binary()
