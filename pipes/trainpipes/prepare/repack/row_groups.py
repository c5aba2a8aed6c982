"""One Parquet file: its rows cut into row groups, and what its content adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.columns.content_hash import checksum, row_hashes
from trainpipes.errors import DataChangedError, SchemaError
from trainpipes.prepare.repack.row_bytes import row_bytes
from trainpipes.storage.output_file import OutputFile

#: Rows that are read back together.
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Form:
    """How rows are laid out.

    Args:
        rows: of a row group, at most.
        size: bytes of a row group, at most, but for a single row; None for no limit.
        compression: as pyarrow names it.
        level: of the compression; None for its own.
        metadata: of the schema.
    """

    rows: int
    size: int | None
    compression: str
    level: int | None
    metadata: Mapping[bytes, bytes] | None = None

    def writer(self, file: Any, schema: pa.Schema) -> Any:
        """Begins a file."""
        return pq.ParquetWriter(
            file,
            schema.with_metadata(self.metadata),
            compression=self.compression,
            compression_level=self.level,
            write_page_checksum=True,
        )


def check_schema(schema: pa.Schema, form: Form, asker: str) -> None:
    """Raise SchemaError where Parquet has no form for a column."""
    for field in schema:
        try:
            form.writer(pa.BufferOutputStream(), pa.schema([field])).close()
        except (pa.ArrowException, TypeError) as error:
            raise SchemaError(
                f"{asker}(): column {field.name!r} holds {field.type}, which Parquet cannot hold ({error}): "
                "leave it out by columns=[...], or make another column of it",
                stage=asker,
            ) from error


def row_groups(tables: Iterable[pa.Table], form: Form) -> Iterator[pa.Table]:
    """Rows as row groups, whose cuts follow from the rows alone, and not from how they come."""
    held: list[pa.Table] = []
    rows = held_bytes = 0
    for table in tables:
        start, sizes = 0, np.cumsum(row_bytes(table))
        while start < len(table):
            used = int(sizes[start - 1]) if start else 0
            room = len(table) - start
            stop = start + min(room, form.rows - rows)
            if form.size is not None:
                fits = int(np.searchsorted(sizes, used + form.size - held_bytes, side="right"))
                stop = min(stop, max(fits, start + (0 if rows else 1)))
            if stop > start:
                held.append(table.slice(start, stop - start))
                rows += stop - start
                held_bytes += int(sizes[stop - 1]) - used
            if rows == form.rows or stop < len(table):
                yield _whole(held)
                held, rows, held_bytes = [], 0, 0
            start = stop
        del table  # before the next rows are read
    if rows:
        yield _whole(held)


def _whole(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


def write_file(file: OutputFile, tables: Iterable[pa.Table], form: Form) -> dict[str, Any]:
    """Write a file's rows.

    Returns:
        "rows", "row_groups", "columns", and "checksum" of the content.
    """
    writer = None
    rows = groups = total = 0
    columns: dict[str, str] = {}
    try:
        for group in row_groups(tables, form):
            if writer is None:
                writer = form.writer(file, group.schema)
                columns = {field.name: str(field.type) for field in group.schema}
            total += checksum(row_hashes(group))
            writer.write_table(group, row_group_size=len(group))
            rows, groups = rows + len(group), groups + 1
        assert writer is not None, "a file has a row at least"
        writer.close()
    except BaseException:
        if writer is not None:
            with suppress(Exception):
                writer.close()
        raise
    return {"rows": rows, "row_groups": groups, "columns": columns, "checksum": total % 2**64}


def check_file(file: Path, entry: dict[str, Any], path: str, asker: str) -> None:
    """Read a file back, and compare its content with what was to be written.

    Args:
        file: where it was made.
        entry: what is in it.
        path: where it is to be, for messages.
        asker: for messages.

    Raises:
        DataChangedError: they differ.
    """
    total = rows = 0
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            for batch in opened.iter_batches(BATCH_ROWS):
                total += checksum(row_hashes(pa.Table.from_batches([batch])))
                rows += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise DataChangedError(
            f"{asker}(): {path} cannot be read back ({error}): the disk, or another process, has changed it; "
            "remove it and call again",
            path=path,
        ) from error
    if rows != entry["rows"] or total % 2**64 != entry["checksum"]:
        raise DataChangedError(
            f"{asker}(): {path} holds other rows than were written to it: the disk, or another process, has "
            "changed it; remove it and call again",
            path=path,
        )
