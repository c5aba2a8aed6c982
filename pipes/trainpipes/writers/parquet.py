"""``write_parquet``: a pipeline's rows as Parquet files."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.checks import whole_number
from trainpipes.pipeline import Pipeline
from trainpipes.writers.output_folder import OutputFile, Written
from trainpipes.writers.write import Format, check_codec, write

__all__ = ["write_parquet"]

#: A row group's rows and bytes in memory, where its rows are not counted: small enough to be shuffled and
#: dealt, and large enough to be worth a request.
GROUP_ROWS, GROUP_BYTES = 16_384, 8 << 20
CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4")


def write_parquet(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    rows_per_group: int | None = None,
    rows_per_file: int | None = None,
    files: int | None = None,
    compression: str | None = "zstd",
    overwrite: bool = False,
) -> Written:
    """Write one epoch to Parquet files; see ``Pipeline.write_parquet``."""
    if rows_per_group is not None:
        whole_number(rows_per_group, 1, "write_parquet(rows_per_group)", "rows in each row group")
    check_codec(compression, CODECS, "write_parquet")

    def begin(file: OutputFile, schema: pa.Schema) -> _Parquet:
        return _Parquet(file, schema, compression or "none")

    options: dict[str, Any] = {"rows_per_group": rows_per_group, "compression": compression}
    counted = rows_per_group is not None
    form = Format(
        "write_parquet", ".parquet", begin, options,
        rows_per_group or GROUP_ROWS, None if counted else GROUP_BYTES,
    )  # fmt: skip
    return write(pipeline, folder, form, files, rows_per_file, overwrite)


class _Parquet:
    """One file; each group of rows is a row group, whose pages have checksums."""

    def __init__(self, file: OutputFile, schema: pa.Schema, compression: str) -> None:
        self._writer = pq.ParquetWriter(
            file, schema, compression=compression, write_page_checksum=True
        )

    def write(self, group: pa.Table, first_row: int) -> None:
        self._writer.write_table(group, row_group_size=len(group))

    def close(self) -> None:
        self._writer.close()
