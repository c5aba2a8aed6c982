"""Rows that travel together, and who each of them is; and values of theirs that no tensor, array or Python
object can be made of, named by row and column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.activity import UNROLL, doing
from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import has_text, holds, list_lengths, stretches
from trainpipes.columns.payload import (
    Payload,
    first_of_consecutive,
    join_payloads,
    payload_bytes,
    payload_row_bytes,
    payload_rows,
    slice_payload,
    take_payload,
)
from trainpipes.columns.utf8 import is_utf8
from trainpipes.errors import UnreadableError

#: Bits of a row's number that are its own; those above tell the source in a mix.
SOURCE_BIT = 40


class Pieces(NamedTuple):
    """What packed rows are made of: documents' ``ids`` and ``epochs``, int64 ``[pieces]``; ``bounds`` int64
    ``[rows + 1]``.
    """

    ids: IntArray
    epochs: IntArray
    bounds: IntArray

    @staticmethod
    def whole(ids: IntArray, epoch: int | IntArray) -> Pieces:
        epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), len(ids))
        return Pieces(ids, epochs, np.arange(len(ids) + 1, dtype=np.int64))

    def at(self, rows: IntArray | slice) -> Pieces:
        if isinstance(rows, slice):
            rows = np.arange(len(self.bounds) - 1, dtype=np.int64)[rows]
        counts = np.diff(self.bounds)[rows]
        piece = stretches(self.bounds[:-1][rows], counts)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Pieces(self.ids[piece], self.epochs[piece], bounds)

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        sizes = np.concatenate([np.diff(part.bounds) for part in parts])
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        ids, epochs = (np.concatenate([part[n] for part in parts]) for n in (0, 1))
        return Pieces(ids, epochs, bounds)


#: A number that all rows share, or a number for each: int64 ``[rows]``.
Each: TypeAlias = "int | IntArray"


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a payload to be gathered, at ``index`` int64 ``[rows]``, or all if None."""

    data: Payload
    index: IntArray | None

    @property
    def rows(self) -> int:
        return len(self.data) if self.index is None else len(self.index)

    def slice(self, start: int, stop: int) -> Piece:
        if self.index is None:
            return Piece(slice_payload(self.data, start, stop), None)
        return Piece(self.data, self.index[start:stop])

    def gathered(self) -> Payload:
        return self.data if self.index is None else take_payload(self.data, self.index)

    def to_copy(self) -> Payload:
        """The same for who copies it: rows that follow each other as they are."""
        start = None if self.index is None else first_of_consecutive(self.index)
        if self.index is None or start is None:
            return self.gathered()
        return slice_payload(self.data, start, start + len(self.index))


def _one(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(join_payloads([piece.to_copy() for piece in pieces]), None)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for _, group in groupby(pieces, key=lambda piece: piece.index is not None and id(piece.data)):
        same = list(group)
        if len(same) > 1 and same[0].index is not None:
            same = [Piece(same[0].data, np.concatenate([piece.index for piece in same]))]
        merged += same
    return merged


@dataclass(frozen=True, slots=True)
class Part:
    """Batches that lie in a payload: its rows at ``index``, cut at ``bounds``."""

    data: Payload
    index: IntArray | None
    bounds: IntArray

    @property
    def cut(self) -> tuple[Any, list[int]]:
        return Piece(self.data, self.index).gathered(), self.bounds.tolist()


class Block:
    """Rows that travel together, gathered when somebody asks for them as a whole.

    Args:
        ids: number of each row in file order over all files, int64 ``[rows]``.
        index: places of the rows in ``data``, int64 ``[rows]``; None where ``data`` is just them.
        part: numbers rows of the same id and epoch: a sampler may draw a row twice, and ``pack``
            may split a document.

    Attributes:
        made_of: the pieces of packed rows.
    """

    __slots__ = ("_pieces", "epoch", "ids", "made_of", "part")

    def __init__(
        self, data: Payload, ids: IntArray, index: IntArray | None = None, *,
        epoch: Each = 0, part: Each = 0,
    ) -> None:  # fmt: skip
        self._pieces = [Piece(data, index)]
        self.ids, self.epoch, self.part = ids, epoch, part
        self.made_of: Pieces | None = None

    def _of(self, pieces: list[Piece], rows: IntArray | slice | None = None) -> Block:
        block = object.__new__(Block)
        block._pieces = pieces
        if rows is None:
            block.ids, block.epoch, block.part = self.ids, self.epoch, self.part
            block.made_of = self.made_of
        else:
            block.ids = self.ids[rows]
            block.epoch, block.part = _at(self.epoch, rows), _at(self.part, rows)
            block.made_of = None if self.made_of is None else self.made_of.at(rows)
        return block

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        if len(blocks) == 1:
            return blocks[0]
        sizes = [len(block) for block in blocks]
        epoch = _joined([block.epoch for block in blocks], sizes)
        part = _joined([block.part for block in blocks], sizes)
        joined = Block([], np.concatenate([block.ids for block in blocks]), epoch=epoch, part=part)
        joined._pieces = _merged([piece for block in blocks for piece in block._pieces])
        if any(block.made_of is not None for block in blocks):
            made_of = [b.made_of or Pieces.whole(b.ids, b.epoch) for b in blocks]
            joined.made_of = Pieces.join(made_of)
        return joined

    def __len__(self) -> int:
        return len(self.ids)

    def _piece(self) -> Piece:
        if len(self._pieces) > 1:
            self._pieces = [_one(self._pieces)]
        return self._pieces[0]

    @property
    def data(self) -> Payload:
        piece = self._piece()
        if piece.index is not None:
            self._pieces = [piece := Piece(piece.gathered(), None)]
        return piece.data

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, gathered; 0 for Python objects, whose size is unknown."""
        return payload_bytes(self.data)

    def list_lengths(self, name: str) -> IntArray | None:
        """How long each row's list in a column is, int64 ``[rows]``, without gathering rows; None where that
        needs a look at the values.
        """
        parts: list[IntArray] = []
        for piece in self._pieces:
            table: Any = piece.data
            if not isinstance(table, pa.Table) or name not in table.column_names:
                return None
            lengths = list_lengths(table.column(name), piece.index)
            if lengths is None:
                return None
            parts.append(lengths)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, about, of the payload that rows are picked from."""
        return payload_row_bytes(self.within)

    @property
    def within(self) -> Payload:
        """What the rows, or the first of them, are picked from."""
        return self._pieces[0].data

    def of_kind(self, kind: type[Any]) -> bool:
        """Whether all rows are in payloads of a kind, without gathering them."""
        return all(isinstance(piece.data, kind) for piece in self._pieces)

    @property
    def has_columns(self) -> bool:
        return self.of_kind(pa.Table)

    def parts(self, bounds: IntArray) -> list[Part]:
        """The batches cut at ``bounds`` int64 ``[batches + 1]``; only those in several payloads are
        gathered.
        """
        if len(self._pieces) == 1:
            return [Part(self._pieces[0].data, self._pieces[0].index, bounds)]
        ends = np.cumsum([piece.rows for piece in self._pieces])
        # The piece in which each batch begins, and that in which it ends.
        begins_in = np.searchsorted(ends, bounds[:-1], side="right")
        ends_in = np.searchsorted(ends, bounds[1:])
        parts: list[Part] = []
        k = 0
        while k < len(ends_in):
            is_whole = begins_in[k] >= ends_in[k]
            stop = int(np.searchsorted(ends_in, ends_in[k], side="right")) if is_whole else k + 1
            piece = _one(self._between(int(bounds[k]), int(bounds[stop])))
            parts.append(Part(piece.data, piece.index, bounds[k : stop + 1] - bounds[k]))
            k = stop
        return parts

    def _between(self, start: int, stop: int) -> list[Piece]:
        pieces: list[Piece] = []
        first = 0
        for piece in self._pieces:
            low, high = max(0, start - first), min(piece.rows, stop - first)
            if low < high:
                pieces.append(piece if high - low == piece.rows else piece.slice(low, high))
            first += piece.rows
        return pieces

    def take(self, index: IntArray) -> Block:
        piece = self._piece()
        below = index if piece.index is None else piece.index[index]
        return self._of([Piece(piece.data, below)], index)

    def slice(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop``, without a copy where the payload allows it."""
        if len(self._pieces) == 1:
            pieces = [self._pieces[0].slice(start, stop)]
        else:
            pieces = self._between(start, stop) or [self._pieces[0].slice(0, 0)]
        return self._of(pieces, slice(start, stop))

    def rows(self) -> list[Any]:
        return payload_rows(self.data)

    def with_data(self, data: Payload) -> Block:
        return self._of([Piece(data, None)])

    def with_columns(self, change: Callable[[pa.Table], pa.Table]) -> Block:
        return self._of([Piece(change(piece.data), piece.index) for piece in self._pieces])

    def of_epoch(self, epoch: Each) -> Block:
        block = self._of(self._pieces)
        block.epoch = epoch
        return block


def _at(values: Each, rows: IntArray | slice) -> Each:
    return values if isinstance(values, int) else values[rows]


def _joined(values: Sequence[Each], sizes: Sequence[int]) -> Each:
    first = values[0]
    if isinstance(first, int) and all(isinstance(v, int) and v == first for v in values):
        return first
    return np.concatenate(
        [np.broadcast_to(v, size) for v, size in zip(values, sizes, strict=True)]
    ).astype(np.int64, copy=False)


#: Bytes of a text that a message shows.
SHOWN = 40
#: How the text of a time begins that Python has no value for.
_NANOSECONDS = "a time in nanoseconds"


class naming_bad_values(doing):
    """Around a stage's work, or where Python objects are made of Arrow values: errors name the row and
    column of a bad value, text that is not UTF-8, or a number or time that Python has none for. Nothing is
    looked at before something is raised.
    """

    __slots__ = ("_block", "_caller")

    def __init__(self, block: Block, caller: object = None) -> None:
        self._block, self._caller = block, caller
        self._what = caller or UNROLL

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._slot is not None:
            self._slot.to(self._before)
        if isinstance(error, UnreadableError):  # which was raised here, by stages within a stage
            return
        bad = _first_bad_value(self._block.data) if _is_about_values(error) else None
        if bad is None or (bad[2].startswith(_NANOSECONDS) and not _is_about_nanoseconds(error)):
            return
        caller, (number, name, said) = self._caller, bad
        problem = UnreadableError(
            f"{'' if caller is None else f'{caller}: '}column {name!r} holds {said}",
            stage=None if caller is None else str(caller),
        )
        problem._trainpipes = caller and str(caller), int(self._block.ids[number])
        raise problem from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_about_values(error: BaseException | None) -> bool:
    kinds = ValueError | ArithmeticError | pa.ArrowException
    return any(isinstance(raised, kinds) for raised in _chain(error))


def _is_about_nanoseconds(error: BaseException | None) -> bool:
    """Whether a time was to become Python's: as a number it is none that is bad."""
    return any(str(raised).startswith("Nanosecond") for raised in _chain(error))


def _first_bad_value(data: Any) -> tuple[int, str, str] | None:
    """The first row with a value that Python lacks, its column, and the value in words."""
    places: list[tuple[int, str, str]] = []
    for name in data.column_names if isinstance(data, pa.Table) else ():
        first = 0
        for chunk in data.column(name).chunks:
            bad = _bad_in(chunk)
            if bad is not None:
                places.append((first + bad[0], name, bad[1]))
                break
            first += len(chunk)
    return min(places, key=lambda place: place[0], default=None)


def _bad_in(array: Any) -> tuple[int, str] | None:
    text = has_text(array.type) and not is_utf8(array)
    if not text and not holds(array.type, pa.types.is_temporal, pa.types.is_decimal):
        return None
    for row in range(len(array)):  # of nested columns, Arrow has looked at others, too
        try:
            array[row].as_py()
        except UnicodeDecodeError as error:
            content = bytes(error.object)
            part = content[max(0, error.start - SHOWN // 2) :][:SHOWN]
            return row, (
                f"text that is not UTF-8: {part!r}{' …' * (len(content) > SHOWN)}; write the file as UTF-8, "
                'or if it is Parquet, take read_parquet(errors="replace")'
            )
        except (ValueError, ArithmeticError) as error:
            if str(error).startswith("Nanosecond"):
                return row, (
                    f"{_NANOSECONDS}, as {array.type}, and Python has microseconds only: cast it to "
                    '"us" by with_columns() and .cast(..., safe=False), leave the column out by '
                    "columns=[...], or pip install pandas"
                )
            return row, (
                f"a value that Python has none for, as {array.type}: {str(error)[:SHOWN]}; fix the file, or "
                "leave the column out by columns=[...]"
            )
    return None


def first_bad(rows: int, fails: Callable[[int, int], bool]) -> int:
    """The first row with which ``fails``, a function of start and stop, is true.

    >>> first_bad(100, lambda start, stop: start <= 42 < stop)
    42
    """
    low, high = 0, rows  # rows up to low are good, those up to high are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(low, middle) else (middle, high)
    return low


class BadCell(Exception):
    """A value that cannot become a tensor, an array or JSON, by its row in the block (None: the column).
    Whoever knows the stage catches it, and raises it with the stage's name.
    """

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row
