"""``read_bytes``: a row for each file.

The stage; what it opens is made by the thread that plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.whole_files.rows import BLOCK_ROWS, WholeFiles, no_columns


class ReadBytes(FileReader):
    """Reads whole files: each file is a row.

    In: files, from ``list_files``; a folder stands for all of its files. Out: rows with ``path`` and
    ``bytes``, as Arrow. Cursor: a row number. A file is read when its batch is made, so that a shuffle's
    buffer costs 8 bytes a file; rows can be chosen by number. Many small files on a server are slow, with a
    request for each (16 at a time): put them in tar archives, and use ``read_webdataset``.

    Args:
        block_rows: files in a block (a shuffle permutes blocks first).
        storage_options: more options for the fsspec file system, besides those of ``list_files``. They are
            neither shown nor part of a state.

    Raises:
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.bin", "b.bin"):
    ...     _ = (folder / name).write_bytes(name.encode() * 2)
    >>> [row["bytes"] for row in tp.list_files(folder).read_bytes()]
    [b'a.bina.bin', b'b.binb.bin']
    """

    has_blocks = True
    random_access = True

    _: KW_ONLY
    block_rows: int = BLOCK_ROWS
    storage_options: Mapping[str, Any] | None = None

    def open_files(self, files: Sequence[Stage]) -> WholeFiles:
        """The files that the stages below list and let through."""
        listed = self.listed(files, ("",))
        return WholeFiles(listed, no_columns(len(listed)), self.block_rows, str(self))
