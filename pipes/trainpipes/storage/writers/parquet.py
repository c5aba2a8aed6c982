"""``write_parquet``: a pipeline's rows as Parquet files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import whole_number
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.manifest import Written
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.one_file import Format
from trainpipes.storage.writers.write import check_codec, write

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


#: A row group's rows and bytes in memory, where its rows are not counted: small enough to be shuffled and
#: dealt, and large enough to be worth a request.
GROUP_ROWS, GROUP_BYTES = 16_384, 8 << 20
CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4")


def write_parquet(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    row_group_size: int | None = None,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: str | None = "zstd",
    overwrite: bool = False,
    engine: Literal["ray"] | None = None,
    address: str | None = None,
    shared_filesystem: bool = False,
) -> Written:
    """Write the rows of one epoch to Parquet files, in the order of this pipeline without its
    ``sharding_filter``: to prepare data once for many runs. See docs/prepare.md.

    Memory stays at that of the pipeline plus one row group. A file appears once it is whole. If the process
    is killed, the same call continues after the last whole file, and the files come out the same; once all
    are there, it does nothing.

    Args:
        folder: for the files, named "part-00000.parquet" and so on, and "_manifest.json", which appears last,
            with counts, columns and checksums. On this machine, and new or empty.
        row_group_size: rows in each row group; if left out, 8 MiB of rows as they are in memory, and
            16,384 rows at most.
        rows_per_file: rows in each file; or
        num_files: how many files of about as many rows, where rows are counted. If both are left out, a file
            ends after 512 MiB of rows as they are in memory.
        compression: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        overwrite: whether to remove what was written there before, and write everything anew.
        engine: "ray" for tasks on a Ray cluster, one for each file, where rows are counted and ``num_files``
            or ``rows_per_file`` is given; None for this process. The bytes are the same.
        address: of the cluster. If left out, the one that this process is connected to, that of
            ``RAY_ADDRESS``, or a new one on this machine.
        shared_filesystem: whether every node of the cluster sees this machine's paths. Else ``folder`` is the
            URL of shared storage, such as "s3://bucket/prepared", where the cluster has several nodes.

    Raises:
        ConfigError: the pipeline batches, repeats or has no rows; the folder holds other files, or those
            of another pipeline; another process writes to it; or it cannot be written.
        SchemaError: rows have no columns, or not all the same.

    >>> import tempfile, pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)})).filter(lambda row: row["x"] % 2)
    >>> written = rows.write_parquet(tempfile.mkdtemp(), rows_per_file=2)
    >>> written.rows, len(written.files)
    (5, 3)
    >>> list(tp.list_files(written.files).read_parquet())[-1]
    {'x': 9}
    """
    if row_group_size is not None:
        whole_number(row_group_size, 1, "write_parquet(row_group_size)", "rows in each row group")
    check_codec(compression, CODECS, "write_parquet")

    def begin(file: OutputFile, schema: pa.Schema) -> _Parquet:
        return _Parquet(file, schema, compression or "none")

    options: dict[str, Any] = {"row_group_size": row_group_size, "compression": compression}
    counted = row_group_size is not None
    form = Format(
        "write_parquet", ".parquet", begin, options,
        row_group_size or GROUP_ROWS, None if counted else GROUP_BYTES,
    )  # fmt: skip
    cluster = Cluster(engine, address, shared_filesystem)
    return write(pipeline, folder, form, num_files, rows_per_file, overwrite, cluster)


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
