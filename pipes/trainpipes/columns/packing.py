"""Which documents share a row of fixed length, by their lengths alone, and how many are packed together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import Array, gathered, stretches, to_arrow
from trainpipes.columns.block import Block, Pieces

#: What torch's ``cross_entropy`` leaves out by default.
IGNORED = -100
#: Columns of token ids, and columns made for them.
PACKED = ("input_ids", "labels", "position_ids", "segment_ids")

#: Of a window of n documents, best-fit may leave up to n // SPARE to the next window.
SPARE = 16
#: Cells left empty, in rows, that are aimed at when a window's end is chosen. Where nearly none would be,
#: documents do not fit and cost a row more.
AIMED_AT = (0.08, 0.16, 0.30)
#: Numbers of documents that are tried where an epoch ends, at least, and times the documents.
FEWEST_TRIED, TRIED = 8, 1 << 12

#: Tokens and documents that the first row holds already.
Begun = tuple[int, int]
Fit = Callable[[IntArray, int, "int | None", Begun], IntArray]


@dataclass(frozen=True)
class Placing:
    """Rows of pieces of documents: document, first token and length of each, int64 ``[pieces]``;
    and where rows start, int64 ``[rows + 1]``.
    """

    document: IntArray
    start: IntArray
    length: IntArray
    bounds: IntArray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def take(self, order: IntArray) -> Placing:
        counts = np.diff(self.bounds)[order]
        piece = stretches(self.bounds[:-1][order], counts)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Placing(self.document[piece], self.start[piece], self.length[piece], bounds)

    def pieces(self, first: int, stop: int, documents: Block) -> Pieces:
        bounds = self.bounds[first : stop + 1]
        pieces = slice(int(bounds[0]), int(bounds[-1]))
        document, epoch = self.document[pieces], documents.epoch
        epochs = np.full_like(document, epoch) if isinstance(epoch, int) else epoch[document]
        return Pieces(documents.ids[document], epochs, bounds - bounds[0])


def pieces_of(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """Documents cut into pieces of ``capacity`` tokens; the last piece of each may be shorter.

    >>> [found.tolist() for found in pieces_of(np.array([2, 7, 0]), 3)]
    [[0, 1, 1, 1], [0, 0, 3, 6], [2, 3, 3, 1]]
    """
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document), dtype=np.int64) - firsts) * capacity
    return document, start, np.minimum(lengths[document] - start, capacity)


def first_fit(
    lengths: IntArray, capacity: int, max_documents: int | None = None, begun: Begun = (0, 0)
) -> IntArray:
    """The row of each piece (lengths 1 to ``capacity``): in order, each in the first with room.

    Searches a tree of room (Johnson, "Near-optimal bin packing algorithms", 1973).

    >>> first_fit(np.array([6, 5, 4, 3]), 10).tolist()
    [0, 1, 0, 1]
    """
    leaves = 1 << len(lengths).bit_length()
    room = [capacity] * (2 * leaves)
    counts = [0] * leaves
    rows = []
    for length, documents in [begun, *((length, 1) for length in lengths.tolist())]:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row = node - leaves
        rows.append(row)
        counts[row] += documents
        left = 0 if counts[row] == max_documents else room[node] - length
        room[node] = left
        while node > 1:  # tell the halves above
            node >>= 1
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return np.array(rows[1:], dtype=np.int64)


def best_fit(
    lengths: IntArray, capacity: int, max_documents: int | None = None, begun: Begun = (0, 0)
) -> IntArray:
    """The row of each piece: longest first, each in the row it fills best, the first of equals.

    Best-fit decreasing (Johnson, Demers, Ullman, Garey and Graham, SIAM J. Comput. 3, 1974): at
    most 11/9 of the fewest rows possible + 4.

    >>> best_fit(np.array([3, 4, 5, 6]), 10).tolist()
    [1, 0, 1, 0]
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    count = len(sizes) + 1
    rows = [0] * len(sizes)
    held = [begun[1]] + [0] * len(sizes)
    rooms: list[int] = []  # of each open row, ascending: what is left in it * count + its number
    used = int(begun[0] > 0)
    if used and begun[0] < capacity and begun[1] != max_documents:
        rooms.append((capacity - begun[0]) * count)
    for piece in order:
        size = sizes[piece]
        place = bisect_left(rooms, size * count)
        if place < len(rooms):
            left, row = divmod(rooms.pop(place), count)
        else:
            left, row, used = capacity, used, used + 1
        rows[piece] = row
        if max_documents is not None:
            held[row] += 1
            if held[row] == max_documents:
                continue
        if left > size:
            insort(rooms, (left - size) * count + row)
    return np.array(rows, dtype=np.int64)


def placed(
    lengths: IntArray, capacity: int, max_documents: int | None, fit: Fit, begun: int = 0
) -> Placing:
    """Documents in rows as ``fit`` says, longer ones cut; a row keeps their order. The first
    ``begun`` documents share a row.
    """
    document, start, length = pieces_of(lengths, capacity)
    row = np.zeros(len(length), dtype=np.int64)
    full = length == capacity
    first = int(np.searchsorted(document, begun))
    full[:first] = False
    free = ~full
    free[:first] = False
    row[free] = fit(length[free], capacity, max_documents, (int(length[:first].sum()), first))
    fitted = int(row[~full].max(initial=-1)) + 1
    row[full] = fitted + np.arange(np.count_nonzero(full))
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Placing(document[order], start[order], length[order], bounds)


def concat(
    lengths: IntArray, skip: int, capacity: int, max_documents: int | None, ended: bool
) -> tuple[Placing, IntArray]:
    """Documents joined from token ``skip`` on and cut into full rows (the last may be short if
    ``ended``); and the tokens before each row and at the end.

    >>> rows, edges = concat(np.array([5, 2, 4]), 1, 4, None, True)
    >>> rows.document.tolist(), rows.length.tolist(), rows.bounds.tolist(), edges.tolist()
    ([0, 1, 2, 2], [4, 2, 2, 2], [0, 1, 3, 4], [1, 5, 9, 11])
    """
    ends = np.cumsum(lengths)
    edges = _edges(ends[lengths > 0], skip, capacity, max_documents, ended)
    within = ends[(ends > skip) & (ends < edges[-1])]
    cuts = np.unique(np.concatenate([edges, within]))
    document = np.searchsorted(ends, cuts[:-1], side="right").astype(np.int64)
    start = cuts[:-1] - (ends - lengths)[document]
    bounds = np.searchsorted(cuts, edges).astype(np.int64)
    return Placing(document, start, np.diff(cuts), bounds), edges


def _edges(
    ends: IntArray, skip: int, capacity: int, max_documents: int | None, ended: bool
) -> IntArray:
    places: list[int] = ends.tolist()
    total, edges = places[-1] if places else 0, [skip]
    while edges[-1] < total:
        edge = edges[-1] + capacity
        if max_documents is not None:
            last = bisect_right(places, edges[-1]) + max_documents - 1
            edge = min([edge, *places[last : last + 1]])
        if edge > total and not ended:
            break
        edges.append(min(edge, total))
    return np.array(edges, dtype=np.int64)


@dataclass(frozen=True)
class Documents:
    """Documents as flat columns ``[tokens]``: where each starts, and how many tokens to pack, of all."""

    columns: dict[str, Array]
    starts: IntArray
    lengths: IntArray
    full_lengths: IntArray


def lists_of(values: pa.Array, placing: Placing, first: int, stop: int) -> pa.Array:
    """Of each row, the values of the documents that its pieces are of."""
    bounds = placing.bounds[first : stop + 1]
    values_of_rows = gathered(values, placing.document[bounds[0] : bounds[-1]])
    return pa.LargeListArray.from_arrays(to_arrow(bounds - bounds[0]), values_of_rows)


def rows_of(
    documents: Documents, placing: Placing, first: int, stop: int, length: int, pad_id: int,
    masked: bool = False,
) -> pa.Table:  # fmt: skip
    low, high = int(placing.bounds[first]), int(placing.bounds[stop])
    lengths = placing.length[low:high]
    from_ = documents.starts[placing.document[low:high]] + placing.start[low:high]
    places = placing.bounds[first : stop + 1] - low
    number = np.arange(1, high - low + 1) - np.repeat(places[:-1], np.diff(places))

    # What is left of a row is a piece too, numbered 0, of tokens that are painted over.
    left = length - np.add.reduceat(lengths, places[:-1])
    short = left > 0
    if short.any():
        at = places[1:][short]
        lengths = np.insert(lengths, at, left[short])
        from_ = np.insert(from_, at, 0)
        number = np.insert(number, at, 0)
    ends = np.cumsum(lengths)
    before = ends - lengths
    padding = stretches(before[number == 0], lengths[number == 0])

    total = int(ends[-1])
    kind = np.int32 if max(total, int(documents.starts[-1]) + length) < 2**31 else np.int64
    cells: Array = np.arange(total, dtype=kind)
    index: Array = np.repeat((from_ - before).astype(kind), lengths)
    index += cells
    cells -= np.repeat(before.astype(kind), lengths)
    cells[padding] = 0

    def column(values: Array, fill: int) -> Array:
        filled: Array = values.take(index, mode="clip")
        filled[padding] = fill
        return filled

    ids = column(documents.columns["input_ids"], pad_id)
    known_labels = documents.columns.get("labels")
    labels = ids.copy() if known_labels is None else column(known_labels, IGNORED)
    if not masked:
        labels[before] = IGNORED
    labels[padding] = IGNORED
    columns = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": cells.astype(np.int32, copy=False),
        "segment_ids": np.repeat(number.astype(np.int32), lengths),
    }
    for name, values in documents.columns.items():
        if name not in columns:
            columns[name] = column(values, 0)
    arrays = {name: to_arrow(values) for name, values in columns.items()}
    lists = pa.FixedSizeListArray.from_arrays
    return pa.table({name: lists(array, length) for name, array in arrays.items()})


# Windows of documents that wait


def fit_a_row(lengths: IntArray, ends: IntArray, capacity: int, max_documents: int | None) -> Array:
    """Whether a single row holds so many of the first documents, some of which have tokens."""
    tokens, documents = np.cumsum(lengths)[ends - 1], np.cumsum(lengths > 0)[ends - 1]
    fits: Array = (tokens > 0) & (tokens <= capacity) & (documents <= (max_documents or capacity))
    return fits


def best_window(
    lengths: IntArray, capacity: int, max_documents: int | None, begun: int = 0
) -> tuple[int, Placing]:
    """How many of n documents to pack, and their rows by best-fit.

    Of four numbers from n - n // 16 to n, that which leaves the smallest share empty; else the
    last row is half empty on average.
    """
    least = min(len(lengths) - len(lengths) // SPARE + 1, len(lengths))
    numbers = np.arange(max(least, begun), len(lengths) + 1)
    left = -np.cumsum(lengths)[numbers - 1] % capacity
    tried = {len(numbers) - 1}
    for aim in AIMED_AT:
        tried.add(int(np.argmin((left - int(aim * capacity)) % capacity)))
    chosen = numbers[sorted(tried)]
    return _fullest(lengths, capacity, max_documents, chosen, best_fit, begun)


def joint_window(
    lengths: IntArray, capacity: int, max_documents: int | None, fit: Fit, begun: int
) -> tuple[int, Placing]:
    """How many of an epoch's last documents to pack, so that a single row holds the others; and their
    rows. Of some numbers, that which leaves the smallest share empty.
    """
    left = lengths.sum() - np.cumsum(lengths)
    documents = np.count_nonzero(lengths) - np.cumsum(lengths > 0)
    fits = (left <= capacity) & (documents <= (max_documents or capacity))
    least = max(int(np.argmax(fits)) + 1, begun) if lengths.any() else len(lengths)
    tries = max(FEWEST_TRIED, TRIED // len(lengths))
    numbers = len(lengths) - some_of(len(lengths) - least, tries)
    return _fullest(lengths, capacity, max_documents, numbers, fit, begun)


def some_of(most: int, count: int) -> IntArray:
    """At most ``count`` numbers from 0 to ``most``, evenly spread: int64, ascending."""
    return np.unique(np.arange(count, dtype=np.int64) * most // (count - 1))


def _fullest(
    lengths: IntArray, capacity: int, max_documents: int | None, numbers: IntArray, fit: Fit,
    begun: int,
) -> tuple[int, Placing]:  # fmt: skip
    tokens = np.cumsum(lengths)[numbers - 1]
    # The share of their rows that documents fill, best case first: it may be all that is looked at.
    hoped = _shares(tokens, -(-tokens // capacity))
    best = -1.0, 0, placed(lengths[:0], capacity, max_documents, fit)
    for k in np.argsort(-hoped, kind="stable").tolist():
        if hoped[k] > best[0]:
            number = int(numbers[k])
            placing = placed(lengths[:number], capacity, max_documents, fit, begun)
            share = float(_shares(tokens[k], np.array(len(placing))))
            if share > best[0]:
                best = share, number, placing
    return best[1], best[2]


def _shares(tokens: Array, rows: Array) -> Array:
    shares: Array = tokens / np.maximum(rows, 1)
    return shares
