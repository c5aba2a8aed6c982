"""Where each row goes in the order of its values in some columns: a merge sort on disk.

Of each part of the input, the columns and the numbers of its rows are sorted and kept in pieces. The first
row of each piece is a fence. Fences cut all rows into stretches that fit into memory, whatever the values
are, since equal ones differ in their number; each stretch is then sorted by itself. Arrow compares: null
after all values, NaN after all other numbers, both also where the order is descending; text by its UTF-8
bytes; False before True.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.arrays import to_arrow, to_numpy
from trainpipes.errors import SchemaError
from trainpipes.order import IntArray
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.sorted_runs import damaged, write_batches

__all__ = ["KeyRuns", "SortOrder", "save_keys"]

#: Rows of a piece, at most.
PIECE_ROWS = 8192


class SortOrder:
    """By what rows are sorted.

    Args:
        columns: names, the first one first.
        descending: whether the largest comes first.
        asker: for messages.
    """

    def __init__(self, columns: Sequence[str], descending: bool, asker: str) -> None:
        self.columns = list(columns)
        self._direction = "descending" if descending else "ascending"
        self._asker = asker

    def check(self, schema: pa.Schema) -> None:
        """Raise SchemaError unless columns of these types can be sorted."""
        row = to_arrow(np.zeros(1, np.int64))
        for name in self.columns:
            kind = schema.field(name).type
            try:
                pc.sort_indices(pa.nulls(1, kind))
                self.index(pa.Table.from_arrays([pa.nulls(1, kind), row], ["0", "row"]))
            except pa.ArrowException as error:
                raise SchemaError(
                    f"{self._asker}(sort): column {name!r} holds {kind}, which has no order: sort by columns "
                    "of numbers, text, bytes, bools or times",
                    stage=self._asker,
                ) from error

    def keys(self, table: pa.Table, first: int) -> pa.Table:
        """The columns under names of their places, and the number of each row."""
        columns = [table.column(name).combine_chunks() for name in self.columns]
        numbers = to_arrow(np.arange(first, first + len(table), dtype=np.int64))
        return pa.Table.from_arrays([*columns, numbers], [*map(str, range(len(columns))), "row"])

    def index(self, keys: pa.Table) -> Any:
        """The rows of keys in their order, as indices."""
        by = [(name, self._direction) for name in keys.column_names[:-1]]
        return pc.sort_indices(keys, sort_keys=[*by, ("row", "ascending")])

    def sorted(self, keys: pa.Table) -> pa.Table:
        """Keys in their order."""
        return keys.combine_chunks().take(self.index(keys))


def save_keys(path: Path, keys: pa.Table, order: SortOrder, piece: int, asker: str) -> None:
    """Sort the keys of one part, and keep them in pieces of so many bytes, about."""
    keys = order.sorted(keys)
    rows = min(PIECE_ROWS, max(1, int(len(keys) * piece // max(1, keys.nbytes))))

    def pieces() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(keys), rows):
            yield keys.slice(start, rows).combine_chunks().to_batches()[0]

    write_batches(path, pieces(), asker)


class KeyRuns:
    """The sorted keys of all parts, cut into stretches that follow each other.

    Args:
        paths: of the parts' files.
        order: by which they were sorted.
        most: bytes of a stretch, about.
        asker: for messages.
    """

    def __init__(self, paths: Sequence[Path], order: SortOrder, most: int, asker: str) -> None:
        self._paths, self._order, self._asker = paths, order, asker
        fences: list[pa.Table] = []
        pieces: list[tuple[int, int, int]] = []  # run, number in the run, bytes
        for run, path in enumerate(paths):
            with _Opened(path, asker) as file:
                for number in range(file.num_record_batches):
                    batch = file.get_batch(number)
                    fences.append(pa.Table.from_batches([batch.slice(0, 1)]).combine_chunks())
                    pieces.append((run, number, batch.nbytes + ROW_COST * len(batch)))
        count = len(pieces)
        self._pieces = pieces
        rank = np.empty(count, dtype=np.int64)
        by_rank = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=np.int64)  # numbers of the fences' rows, by rank
        if count:
            all_fences = pa.concat_tables(fences).combine_chunks()
            by_rank = to_numpy(order.index(all_fences)).astype(np.int64)
            rank[by_rank] = np.arange(count)
            self._rows = to_numpy(all_fences.column("row"))[by_rank]
        self._rank = rank
        last = np.array([run for run, _, _ in pieces], dtype=np.int64)
        same = np.append(last[1:] == last[:-1], False) if count else np.empty(0, dtype=np.bool_)
        #: The fence after each piece; their number where it is the last of its run.
        self._next = np.where(same, np.roll(rank, -1), count)
        sizes = np.cumsum(np.array([size for *_, size in pieces], dtype=np.int64)[by_rank])
        stretch = sizes // max(1, most)
        self._cuts = np.append(np.flatnonzero(np.diff(stretch, prepend=-1)), count)
        if count:
            self._cuts[0] = 0

    def __len__(self) -> int:
        """How many stretches there are."""
        return max(0, len(self._cuts) - 1)

    def rows(self, number: int) -> IntArray:
        """The numbers of a stretch's rows, in their order."""
        low, high = int(self._cuts[number]), int(self._cuts[number + 1])
        taken = np.flatnonzero((self._rank <= high) & (self._next > low))
        tables = []
        for run in sorted({self._pieces[k][0] for k in taken.tolist()}):
            with _Opened(self._paths[run], self._asker) as file:
                own = [self._pieces[k][1] for k in taken.tolist() if self._pieces[k][0] == run]
                tables += [pa.Table.from_batches([file.get_batch(n)]) for n in own]
        keys = pa.concat_tables(tables)
        found: IntArray = to_numpy(self._order.sorted(keys).column("row"))
        start = int(np.flatnonzero(found == self._rows[low])[0])
        if high == len(self._rows):
            return found[start:]
        return found[start : int(np.flatnonzero(found == self._rows[high])[0])]


class _Opened:
    """A file of record batches, whose errors say what is damaged."""

    def __init__(self, path: Path, asker: str) -> None:
        self._path, self._asker = path, asker

    def __enter__(self) -> Any:
        try:
            self._file = pa.OSFile(str(self._path), "rb")
            return pa.ipc.open_file(self._file)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self._asker, f"{self._path} cannot be read ({error})") from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        if isinstance(error, OSError | pa.ArrowException):
            raise damaged(self._asker, f"{self._path} cannot be read ({error})") from error
