"""A sample of the rows of files, from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from trainpipes._internal.progress import counted
from trainpipes._internal.secrets import hidden
from trainpipes.columns.columns import table_of
from trainpipes.errors import MissingExtraError, UnreachableError
from trainpipes.look.inspect_reading import DataFile, Found, reason_of

#: Columns of names, of the samples of archives and of images: their lengths say nothing, and all differ.
NAMES = ("__key__", "path")
#: Pieces of consecutive rows that a sample has: of files on this machine, and of others, which cost requests.
LOCAL_PIECES, REMOTE_PIECES = 64, 16
#: Rows of such a piece at least, so that their order can be seen.
PIECE_ROWS = 16
#: Bytes of a sample: of files on this machine, and of others.
LOCAL_BYTES, REMOTE_BYTES = 256 << 20, 32 << 20
#: How far into a row group a piece may begin: all before it is decoded, too.
DEPTH_BYTES = 16 << 20
#: Images of a sample, where each is a request.
REMOTE_IMAGES = 64


@dataclass
class Sample:
    """Rows of all files.

    Args:
        tables: pieces of consecutive rows, in the order of the files.
    """

    tables: list[pa.Table] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.tables))

    @property
    def bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @cached_property
    def columns(self) -> dict[str, list[pa.Array]]:
        """The rows of each column, without views and types of Python packages."""
        found: dict[str, list[pa.Array]] = {}
        for table in self.tables:
            for name, column in zip(table.column_names, table.columns, strict=True):
                found.setdefault(name, []).extend(map(plain_array, column.chunks))
        return found

    def having(self, names: Sequence[str]) -> Sample:
        """The rows that have all of these columns."""
        return Sample([table for table in self.tables if set(names) <= set(table.column_names)])


def plain_array(array: pa.Array) -> pa.Array:
    """An array without views and types of Python packages. Readers decode dictionaries."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return array.cast(kind[array.type]) if array.type in kind else array


def read_sample(found: Found, rows: int, small: bool) -> Sample:
    """About ``rows`` rows of all files, in pieces of consecutive rows. Files that cannot be decoded are added
    to ``found.unreadable``.

    Args:
        found: the files.
        rows: how many, at most.
        small: whether work on them takes long, so that they should be few bytes.

    Raises:
        UnreachableError: a server does not answer, or denies access.
    """
    most = REMOTE_BYTES if found.remote or small else LOCAL_BYTES
    total = int(found.lengths.sum())
    if size := float(found.block_bytes.sum()):
        rows = min(rows, max(1, int(most * total / size)))
    if found.remote and found.reader == "read_images":
        rows = min(rows, REMOTE_IMAGES)
    sample = Sample()
    places = _places(found.files, rows, REMOTE_PIECES if found.remote else LOCAL_PIECES)
    for file, wanted in counted(
        places.items(), "reading some rows of files", len(places), "files", 1
    ):
        one, reader = found.files[file], None
        try:
            for block, start, stop in wanted:
                reader = reader or one.open().reader()
                table = table_of(reader.read(block, start, stop), "inspect_files()")
                one.schema = one.schema or table.schema
                sample.tables.append(table)
                most -= table.nbytes
                if most < 0:
                    return sample
        except (UnreachableError, MemoryError, MissingExtraError):
            raise
        except Exception as error:
            name = hidden(getattr(error, "path", None) or one.name)
            found.unreadable[name] = reason_of(name, error)
        finally:
            if reader is not None:
                reader.close()
    return sample


def _places(
    files: Sequence[DataFile], rows: int, pieces: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Which rows to read, by file, as block, start and stop: all, or pieces at even distances."""
    blocks = [(n, block) for n, file in enumerate(files) for block in range(len(file.lengths))]
    lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths for file in files)])
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: dict[int, list[tuple[int, int, int]]] = {}
    if total <= rows:
        for number in np.flatnonzero(lengths).tolist():
            file, block = blocks[number]
            found.setdefault(file, []).append((block, 0, int(lengths[number])))
        return found
    pieces = max(1, min(pieces, rows // PIECE_ROWS))
    each = rows // pieces
    edges = np.linspace(0, total, pieces + 1)[:-1].astype(np.int64)
    owners = np.searchsorted(ends, edges, side="right")
    for number in np.unique(owners).tolist():
        file, block = blocks[number]
        length = int(lengths[number])
        starts = edges[owners == number] - (ends[number] - length)
        row_bytes = float(files[file].block_bytes[block]) / length
        # Only the beginning of a large row group is read: its pieces are spread over that.
        reach = max((len(starts) + 1) * each, int(DEPTH_BYTES / max(1.0, row_bytes)))
        if reach < length:
            starts = starts * reach // length
        for start in starts.tolist():
            found.setdefault(file, []).append((block, start, min(length, start + each)))
    return found
