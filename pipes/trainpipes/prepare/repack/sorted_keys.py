"""Where each row goes in the order of its values in some columns: a merge sort on disk.

Of each part of the input, the columns and the numbers of its rows are sorted and kept in pieces. The first
row of each piece is a fence, and kept in a file beside them. Fences cut all rows into stretches that fit into
memory, whatever the values are, since equal ones differ in their number; each stretch is then sorted by
itself. Arrow compares: null after all values, NaN after all other numbers, both also where the order is
descending; text by its UTF-8 bytes; False before True.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.prepare.repack.row_bytes import ROW_COST
from trainpipes.prepare.repack.sorted_runs import read_pieces, save_pieces
from trainpipes.prepare.repack.temporary import TemporaryFiles

#: Rows of a piece, at most.
PIECE_ROWS = 8192
#: Columns beside a fence: bytes of its piece in memory, and where that begins and ends in its file.
ABOUT = ("bytes", "start", "stop")


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


def save_keys(
    files: TemporaryFiles, stem: str, keys: pa.Table, order: SortOrder, size: int
) -> None:
    """Sort the keys of one part, and keep them in pieces of so many bytes, about: ``stem.arrow``. The first
    row of each piece, its bytes in memory, and where it begins and ends go to ``stem-fences.arrow``."""
    keys = order.sorted(keys)
    rows = min(PIECE_ROWS, max(1, int(len(keys) * size // max(1, keys.nbytes))))
    firsts: list[pa.Table] = []
    sizes: list[int] = []

    def pieces() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(keys), rows):
            own = keys.slice(start, rows).combine_chunks()
            firsts.append(own.slice(0, 1))
            sizes.append(own.nbytes + ROW_COST * len(own))
            yield own.to_batches()[0]

    lies = save_pieces(files, f"{stem}.arrow", pieces(), keys.schema)
    fences = pa.concat_tables(firsts).combine_chunks()
    numbers = np.concatenate([np.array(sizes, dtype=np.int64)[:, None], lies], axis=1)
    for name, column in zip(ABOUT, numbers.T, strict=True):
        fences = fences.append_column(name, to_arrow(np.ascontiguousarray(column)))
    save_pieces(files, f"{stem}-fences.arrow", fences.to_batches(), fences.schema)


class KeyRuns:
    """The sorted keys of all parts, cut into stretches that follow each other. Pickles.

    Args:
        files: temporary files.
        stems: names of the parts' files, without their ends.
        order: by which they were sorted.
        most: bytes of a stretch, about.
    """

    def __init__(
        self, files: TemporaryFiles, stems: Sequence[str], order: SortOrder, most: int
    ) -> None:
        self._files, self._stems, self._order = files, list(stems), order
        found = []
        for stem in stems:
            with files.opened(f"{stem}-fences.arrow") as file:
                found.append(pa.ipc.open_stream(file).read_all())
        about = pa.concat_tables(found).combine_chunks()
        fences = about.select(about.column_names[: -len(ABOUT)])
        self._run = np.repeat(np.arange(len(found)), [len(own) for own in found])
        self._schema = fences.schema
        sizes, *self._lies = (to_numpy(about.column(name)) for name in ABOUT)
        count = len(fences)
        by_rank = to_numpy(order.index(fences)).astype(np.int64)
        self._rank = np.empty(count, dtype=np.int64)
        self._rank[by_rank] = np.arange(count)
        #: Numbers of the fences' rows, by rank.
        self._rows = to_numpy(fences.column("row"))[by_rank]
        same = np.append(self._run[1:] == self._run[:-1], False)
        #: The fence after each piece; their number where it is the last of its run.
        self._next = np.where(same, np.roll(self._rank, -1), count)
        stretch = np.cumsum(sizes[by_rank]) // max(1, most)
        self._cuts = np.append(np.flatnonzero(np.diff(stretch, prepend=-1)), count)
        self._cuts[0] = 0

    def __len__(self) -> int:
        """How many stretches there are."""
        return max(0, len(self._cuts) - 1)

    def rows(self, number: int) -> IntArray:
        """The numbers of a stretch's rows, in their order."""
        low, high = int(self._cuts[number]), int(self._cuts[number + 1])
        taken = np.flatnonzero((self._rank <= high) & (self._next > low))
        names = [f"{self._stems[run]}.arrow" for run in self._run[taken].tolist()]
        starts, stops = (edge[taken].tolist() for edge in self._lies)
        pieces = read_pieces(self._files, names, starts, stops, self._schema)
        keys = pa.concat_tables([pa.Table.from_batches([own]) for own in pieces])
        found: IntArray = to_numpy(self._order.sorted(keys).column("row"))
        start = int(np.flatnonzero(found == self._rows[low])[0])
        if high == len(self._rows):
            return found[start:]
        return found[start : int(np.flatnonzero(found == self._rows[high])[0])]
