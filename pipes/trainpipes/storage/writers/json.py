"""``write_json``: a pipeline's rows as JSON lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from trainpipes.errors import DataError
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.json_text import NoJson, lines_of
from trainpipes.storage.writers.manifest import Written
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.one_file import Format
from trainpipes.storage.writers.write import check_codec, write

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline


#: Rows and bytes of rows that are written together, and compressed by themselves.
GROUP_ROWS, GROUP_BYTES = 16_384, 4 << 20
SUFFIXES = {"gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}
#: What the programs of these names take; Arrow's gzip is at 9, up to 3 times as slow for 1 % less.
LEVELS = {"gzip": 6, "zstd": 3}


def write_json(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    compression: Literal["gzip", "zstd"] | None = None,
    overwrite: bool = False,
    engine: Literal["ray"] | None = None,
    address: str | None = None,
    shared_filesystem: bool = False,
) -> Written:
    """Write the rows of one epoch to files of JSON lines, UTF-8: as ``write_parquet`` does. Dates, times
    and decimals become text. Compressed files have a gzip member or zstd frame every 4 MiB, so that
    reading can begin within them.

    Args:
        folder: for the files, named "part-00000.jsonl" and so on, and "_manifest.json".
        rows_per_file: rows in each file; or
        num_files: how many files; see ``write_parquet``.
        compression: "gzip", "zstd" or None.
        overwrite: whether to remove what was written there before.
        engine, address, shared_filesystem: as in ``write_parquet``.

    Raises:
        ConfigError, SchemaError: as ``write_parquet``.
        DataError: bytes, NaN or infinity, for which JSON has no form.
    """
    check_codec(compression, SUFFIXES, "write_json")

    def begin(file: OutputFile, _: pa.Schema) -> _Lines:
        return _Lines(file, compression)

    form = Format(
        "write_json", SUFFIXES.get(compression or "", ".jsonl"), begin, {"compression": compression},
        GROUP_ROWS, GROUP_BYTES,
    )  # fmt: skip
    cluster = Cluster(engine, address, shared_filesystem)
    return write(pipeline, folder, form, num_files, rows_per_file, overwrite, cluster)


class _Lines:
    """One file. Compressed, each group is a gzip member or zstd frame of its own, so that a reader can begin
    at any of them."""

    def __init__(self, file: OutputFile, compression: str | None) -> None:
        self._file = file
        self._codec = None if compression is None else pa.Codec(compression, LEVELS[compression])

    def write(self, group: pa.Table, first_row: int) -> None:
        try:
            lines = lines_of(group)
        except NoJson as error:
            row = None if error.row is None else first_row + error.row
            where = "" if row is None else f" (row {row:,} of those written)"
            raise DataError(f"write_json(): column {error}{where}", stage="write_json()") from None
        self._file.write(lines if self._codec is None else self._codec.compress(lines))

    def close(self) -> None:
        """Nothing to do: nothing follows the last line."""
