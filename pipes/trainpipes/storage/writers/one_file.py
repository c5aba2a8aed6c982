"""One output file: how its rows are written, how many it has, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.epoch_rows import EpochRows

#: Bytes of rows in memory after which a file ends, where neither rows nor files are counted.
FILE_BYTES = 512 << 20
#: An open file's next rows, and their bytes.
Group = tuple[pa.Table, int]


class GroupWriter(Protocol):
    """Writes one file."""

    def write(self, group: pa.Table, first_row: int) -> None:
        """Write some rows; the first one's number in the epoch is for messages."""
        ...

    def close(self) -> None:
        """Write what comes after the last rows."""
        ...


@dataclass(frozen=True)
class Format:
    """How rows are written.

    Args:
        asker: the method, for messages.
        suffix: of the files' names.
        open: begins a file with rows of a schema.
        options: of the method, of JSON types, which shape the files.
        rows: in a group, at most.
        bytes: in a group, about; None where the user counts its rows.
    """

    asker: str
    suffix: str
    open: Callable[[OutputFile, pa.Schema], GroupWriter]
    options: dict[str, Any]
    rows: int
    bytes: int | None

    def name_of(self, number: int) -> str:
        """The name of a file."""
        return f"part-{number:05d}{self.suffix}"


class Lengths:
    """How many rows each file has.

    Args:
        count: of the rows, where that is known.
        files: how many files; or
        rows_per_file: how many rows in each.
        asker: who writes, for messages.

    Attributes:
        given: whether one of the two is.
    """

    def __init__(
        self, count: int | None, files: int | None, rows_per_file: int | None, asker: str
    ) -> None:
        if files is not None:
            whole_number(files, 1, f"{asker}(num_files)", "how many to write")
        if rows_per_file is not None:
            whole_number(rows_per_file, 1, f"{asker}(rows_per_file)", "rows in each file")
        if files is not None and rows_per_file is not None:
            raise ConfigError(
                f"{asker}() takes num_files or rows_per_file, got num_files={files} and "
                f"rows_per_file={rows_per_file}: give one of the two"
            )
        if files is not None and count is None:
            raise ConfigError(
                f"{asker}(num_files={files}) needs to know how many rows there are, and that is known only "
                "when all are read: give rows_per_file=... instead"
            )
        if files is not None and count is not None and files > count:
            raise ConfigError(
                f"{asker}(num_files={files}): each file has a row at least, and there are {count:,} rows: "
                "give fewer files"
            )
        self.given = files is not None or rows_per_file is not None
        self._count, self._files, self._rows = count or 0, files, rows_per_file

    def of(self, number: int) -> int | None:
        """Rows of file ``number``; None where it ends by its bytes."""
        if self._files is None:
            return self._rows
        return self._count // self._files + (number < self._count % self._files)


def write_file(
    rows: EpochRows,
    form: Format,
    file: OutputFile,
    group: Group | None,
    length: int | None,
    first_row: int,
    tell: Callable[[int], None],
) -> int:
    """Write the rows of one file; gives how many.

    Args:
        rows: stand after the first group.
        form: how rows are written.
        file: empty.
        group: the first rows.
        length: how many rows there are to be; None to end after ``FILE_BYTES``.
        first_row: number of the first one in the epoch.
        tell: is called with rows done.
    """
    writer = form.open(file, rows.schema)
    try:
        count = size = 0
        while group is not None:
            writer.write(group[0], first_row + count)
            count, size = count + len(group[0]), size + group[1]
            tell(len(group[0]))
            left = form.rows if length is None else min(form.rows, length - count)
            if not left or (length is None and size >= FILE_BYTES):
                break
            group = rows.group(left, form.bytes)
        writer.close()
    except BaseException:
        with suppress(Exception):
            writer.close()
        raise
    return count


def columns_of(schema: pa.Schema) -> dict[str, str]:
    """Names and types, as the manifest has them."""
    return {field.name: str(field.type) for field in schema}


def same_columns(asker: str, before: dict[str, str] | None, now: dict[str, str]) -> dict[str, str]:
    """The columns of the next file.

    Raises:
        SchemaError: they are not those of the files before it.
    """
    if before is not None and now != before:
        raise SchemaError(
            f"{asker}(): the files written so far have columns {before}, and the next rows have {now}; write "
            "all anew with overwrite=True",
            stage=asker,
        )
    return now


def entry_of(name: str, rows: int, file: OutputFile) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"file": name, "rows": rows, "bytes": file.size, "crc32": f"{file.check:08x}"}


def numbered(files: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Files of a manifest, by the numbers in their names."""
    return {int(str(entry["file"]).split(".")[0][5:]): dict(entry) for entry in files}


def in_order(known: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Files for a manifest."""
    return [known[number] for number in sorted(known)]


def first_missing(known: Mapping[int, Any]) -> int:
    """The number of the first file that is not whole."""
    return next(number for number in range(len(known) + 1) if number not in known)
