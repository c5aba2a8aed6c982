"""``write_arrow``: a pipeline's rows as Arrow IPC files, which are mapped into memory when they are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.manifest import Written
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.one_file import Format
from trainpipes.storage.writers.write import check_codec, write

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


#: A record batch's rows and bytes, where its rows are not counted.
BATCH_ROWS, BATCH_BYTES = 16_384, 4 << 20
CODECS = ("zstd", "lz4")


def write_arrow(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    engine: Literal["ray"] | None = None,
    address: str | None = None,
    shared_filesystem: bool = False,
) -> Written:
    """Write the rows of one epoch to Arrow IPC files (Feather): as ``write_parquet`` does.

    Args:
        folder: for the files, named "part-00000.arrow" and so on, and "_manifest.json".
        row_group_size: rows in each record batch; if left out, 4 MiB of rows, and 16,384 rows at most.
        rows_per_file: rows in each file; or
        num_files: how many files; see ``write_parquet``.
        compression: "zstd", "lz4" or None, with which files can be mapped into memory.
        overwrite: whether to remove what was written there before.
        engine, address, shared_filesystem: as in ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
    """
    if row_group_size is not None:
        whole_number(row_group_size, 1, "write_arrow(row_group_size)", "rows in each record batch")
    check_codec(compression, CODECS, "write_arrow")

    def begin(file: OutputFile, schema: pa.Schema) -> _Arrow:
        return _Arrow(file, schema, compression)

    form = Format(
        "write_arrow", ".arrow", begin,
        {"row_group_size": row_group_size, "compression": compression},
        row_group_size or BATCH_ROWS, None if row_group_size else BATCH_BYTES,
    )  # fmt: skip
    cluster = Cluster(engine, address, shared_filesystem)
    return write(pipeline, folder, form, num_files, rows_per_file, overwrite, cluster)


class _Arrow:
    """One file; each group of rows is a record batch."""

    def __init__(self, file: OutputFile, schema: pa.Schema, compression: str | None) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_file(file, schema, options=options)

    def write(self, group: pa.Table, first_row: int) -> None:
        self._writer.write_table(group, max_chunksize=len(group))

    def close(self) -> None:
        self._writer.close()
