"""What a pipeline must give, said once more: slowly, with plain loops, from the laws alone.

Nothing of the library is called but the Philox primitive ``order.permutation``. Rows are numbers
in file order; a batch is a list of them.

    rows in file order
      -> row groups in the epoch's order
      -> G spans, G | S
      -> windows of each span, filtered, each permuted
      -> the rows of each of the S shards
      -> its batches
      -> one sequence: batch m is the next one of shard m mod S
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise

from trainpipes.order.permutation import permutation

#: Rows that a pipeline without a shuffle reads at a time.
READ_ROWS = 8192
#: Most rows that a shard gets at a time where counts are unknown.
MAX_CHUNK = 256
#: Epochs between the starts of two passes of an endless pipeline.
PASS_EPOCHS = 1 << 20


@dataclass(frozen=True)
class Spec:
    """A pipeline as the laws see it.

    Args:
        groups: rows of each row group, in file order.
        num_shards: S; None without ``sharding_filter``.
        stride: ``split="stride"``.
        buffer_size: of the shuffle; None where nothing is shuffled.
        seed: of the shuffle.
        batch_size: B; None where rows are not batched.
        drop_last: of the batch.
        keep: predicate on a row; None for all.
        keep_before: whether the predicate stands before the shuffle.
        keep_batch: predicate on a batch; None for all.
        repeat: "before" or "after" the batch; None for one epoch a pass.
        times: epochs in a pass; None for no end.
        skip_rows, take_rows: directly after the source, in file order.
        skip_batches, take_batches: on what the pipeline delivers, over all shards.
        skip_passed, take_passed: on the rows that come to the batch, in each epoch; one shard only.
        stream: the rows cannot be listed: they come one after the other.
    """

    groups: tuple[int, ...]
    num_shards: int | None = 24
    stride: bool = False
    buffer_size: int | None = None
    seed: int = 0
    batch_size: int | None = 8
    drop_last: bool = False
    keep: Callable[[int], bool] | None = None
    keep_before: bool = False
    keep_batch: Callable[[list[int]], bool] | None = None
    repeat: str | None = None
    times: int | None = None
    skip_rows: int = 0
    take_rows: int | None = None
    skip_batches: int = 0
    take_batches: int | None = None
    skip_passed: int = 0
    take_passed: int | None = None
    stream: bool = False

    @property
    def shards(self) -> int:
        return 1 if self.num_shards is None else self.num_shards

    @property
    def rows_a_batch(self) -> int:
        return 1 if self.batch_size is None else self.batch_size

    @property
    def rolling(self) -> bool:
        """Batches go on over the joints of epochs."""
        return self.repeat == "before" and self.batch_size is not None

    @property
    def whole(self) -> bool:
        """Rows are dealt in whole batches."""
        if self.stream and self.rolling and self.shards > 1:
            return False
        return self.keep is None and not self.counts_passed

    @property
    def counts_passed(self) -> bool:
        """Rows are counted on their way to the batch."""
        return bool(self.skip_passed) or self.take_passed is not None

    @property
    def known(self) -> bool:
        """The number of batches follows from the number of rows."""
        ragged = self.rolling and self.times is not None and num_spans(self) > 1
        counted = not self.stream and self.whole
        return counted and self.keep_batch is None and not ragged


class Starved(Exception):
    """Under an endless ``repeat``, a shard got nothing in too many epochs: there is no sequence."""


class EmptyEpochGuard:
    """Epochs in a row that gave nothing."""

    def __init__(self, spec: Spec) -> None:
        self.endless = spec.repeat is not None and spec.times is None
        self.epochs = 0

    def after(self, gave: bool) -> None:
        """An epoch has ended."""
        self.epochs = 0 if gave else self.epochs + 1
        if self.endless and self.epochs == 16:
            raise Starved


@dataclass(frozen=True)
class Group:
    """What is left of a row group after ``skip`` and ``take``."""

    first: int
    rows: int


def used_groups(spec: Spec) -> list[Group]:
    """The row groups, each with the rows that the epoch uses of it; those may be none."""
    groups, row = [], 0
    low = spec.skip_rows
    high = float("inf") if spec.take_rows is None else low + spec.take_rows
    for size in spec.groups:
        kept = [r for r in range(row, row + size) if low <= r < high]
        groups.append(Group(kept[0] if kept else row, len(kept)))
        row += size
    return groups


def used_rows(spec: Spec) -> int:
    """Rows of an epoch."""
    return sum(group.rows for group in used_groups(spec))


def epoch_rows(spec: Spec, epoch: int) -> list[int]:
    """All rows of an epoch, in the order in which spans are cut from them."""
    groups = used_groups(spec)
    if spec.buffer_size is not None and not spec.stream:
        order = permutation(len(groups), spec.seed, "blocks", epoch).tolist()
        groups = [groups[i] for i in order]
    return [group.first + i for group in groups for i in range(group.rows)]


def span_sizes(spec: Spec, spans: int) -> list[int]:
    """Rows of each span if there were that many."""
    rows = used_rows(spec)
    sizes = [0] * spans
    if spec.whole and not spec.rolling:  # whole batches, dealt to the spans in turn
        number = 0
        while rows > 0:
            batch = min(rows, spec.rows_a_batch)
            sizes[number % spans] += batch
            rows -= batch
            number += 1
    else:
        for row in range(rows):
            sizes[row % spans] += 1
    return sizes


def num_spans(spec: Spec) -> int:
    """G."""
    if spec.stride or spec.stream:
        return 1
    least = 1 if spec.buffer_size is None else spec.buffer_size
    fitting = [1]
    for spans in range(1, spec.shards + 1):
        if spec.shards % spans == 0 and min(span_sizes(spec, spans)) >= least:
            fitting.append(spans)
    return max(fitting)


def windows_of(spec: Spec, rows: list[int], place: Fraction) -> list[list[int]]:
    """A span's rows, cut into windows. ``place``: the middle of the span among all, from 0 to 1."""
    if not rows:
        return []
    if spec.stream:
        size = spec.rows_a_batch if spec.buffer_size is None else spec.buffer_size
        half = size if spec.buffer_size is None else size // 2 + 1
        starts = [0, half, *range(2 * half, len(rows) + 1, size)]
        edges = [*(start for start in starts if start < len(rows)), len(rows)]
        last = half if len(edges) < 4 else size
        if spec.buffer_size is not None and len(edges) > 2 and edges[-1] - edges[-2] < last:
            del edges[-2]
        return [rows[first:stop] for first, stop in pairwise(edges)]
    size = READ_ROWS if spec.buffer_size is None else spec.buffer_size
    count = max(1, len(rows) // size)
    edges = [w * len(rows) // count for w in range(count + 1)]
    if spec.buffer_size is not None and not spec.stride and count > 2 and size > 1:
        edges = growing(len(rows), size, place)
    return [rows[first:stop] for first, stop in pairwise(edges)]


def growing(rows: int, size: int, place: Fraction) -> list[int]:
    """The edges of windows: points of one curve, a step apart from each other, from ``place`` on."""
    grown = min(
        2 * size, rows - 2 * size
    )  # what the curve comes to at 1, having doubled with each step
    end = 2 + Fraction(rows - 2 * size - grown, size)  # size rows a step, up to a step before this

    def double(v: Fraction) -> Fraction:
        octave = v.numerator // v.denominator
        return Fraction(2) ** octave * (1 + (2 * (v - octave) + (v - octave) ** 2) / 3)

    v, edges = place, [0]
    while v > -3 and Fraction(grown, 2) * Fraction(2) ** int(v - 1 - place) >= 1:
        v -= 1
    while v < end:
        if v < 1:
            edge = Fraction(grown, 2) * double(v)
        elif v < end - 1:
            edge = grown + size * (v - 1)
        else:
            edge = rows - size * double(end - v)
        edges.append(edge.numerator // edge.denominator)
        v += 1
    return [*edges, rows]


def epoch_windows(spec: Spec, epoch: int) -> list[list[list[int]]]:
    """For each span its windows, each with its rows as they come out of it."""
    rows = epoch_rows(spec, epoch)
    found = []
    first = 0
    spans = num_spans(spec)
    for span, size in enumerate(span_sizes(spec, spans)):
        windows, place = [], Fraction(2 * span + 1, 2 * spans)
        for number, held in enumerate(windows_of(spec, rows[first : first + size], place)):
            if spec.keep is not None and spec.keep_before:
                held = [row for row in held if spec.keep(row)]
            if spec.buffer_size is not None:
                order = permutation(len(held), spec.seed, "window", epoch, span, number).tolist()
                held = [held[i] for i in order]
            windows.append(held)
        found.append(windows)
        first += size
    return found


def shard_rows(spec: Spec, epoch: int, past: int) -> list[list[int]]:
    """The rows that each shard gets in an epoch.

    Args:
        past: epochs of this pass before this one, over whose joints batches go on.
    """
    spans = num_spans(spec)
    sharers = spec.shards // spans
    dealt: list[list[int]] = [[] for _ in range(spec.shards)]
    sizes = span_sizes(spec, spans)
    for span, windows in enumerate(epoch_windows(spec, epoch)):
        position = past * sizes[span] if spec.rolling else 0
        for number, held in enumerate(windows):
            for place, row in enumerate(held):
                if spec.whole:
                    chunk = position // spec.rows_a_batch
                else:
                    chunk = place // chunk_rows(spec, sizes[span], sharers) + number
                dealt[span + spans * (chunk % sharers)].append(row)
                position += 1
    return dealt


def chunk_rows(spec: Spec, rows: int, sharers: int) -> int:
    """Rows that a shard gets at a time where counts are unknown."""
    if spec.stream:
        size = spec.rows_a_batch if spec.buffer_size is None else spec.buffer_size
        return max(1, min(MAX_CHUNK, size // 16))
    return max(1, min(MAX_CHUNK, rows // (16 * sharers)))


def passed(spec: Spec, rows: list[int]) -> list[int]:
    """Those of a shard's rows in an epoch that come to the batch."""
    kept = [row for row in rows if spec.keep is None or spec.keep(row)]
    kept = kept[spec.skip_passed :]
    return kept if spec.take_passed is None else kept[: spec.take_passed]


def cut(spec: Spec, rows: Iterator[int]) -> Iterator[list[int]]:
    """Rows of one shard as batches."""
    batch: list[int] = []
    for row in rows:
        batch.append(row)
        if len(batch) == spec.rows_a_batch:
            yield batch
            batch = []
    if batch and not spec.drop_last:
        yield batch


def _kept(spec: Spec, batches: Iterator[list[int]]) -> Iterator[list[int]]:
    for batch in batches:
        if spec.keep_batch is None or spec.keep_batch(batch):
            yield batch


def epoch_batches(spec: Spec, epoch: int) -> list[list[list[int]]]:
    """For each shard its batches in one epoch, those that ``keep_batch`` drops left out."""
    every = [cut(spec, iter(passed(spec, rows))) for rows in shard_rows(spec, epoch, 0)]
    return [list(_kept(spec, batches)) for batches in every]


def interleave(sequences: list[Iterator[list[int]]]) -> Iterator[tuple[int, list[int]]]:
    """Batches with their numbers m, shards taking turns; an ended shard is passed over."""
    running = set(range(len(sequences)))
    m = 0
    while running:
        shard = m % len(sequences)
        if shard in running:
            batch = next(sequences[shard], None)
            if batch is None:
                running.discard(shard)
            else:
                yield m, batch
        m += 1


def pass_epochs(spec: Spec, number: int) -> Iterator[int]:
    """The epochs of a pass."""
    if spec.repeat is None:
        yield number
        return
    first = number * (PASS_EPOCHS if spec.times is None else spec.times)
    epoch = first
    while spec.times is None or epoch < first + spec.times:
        yield epoch
        epoch += 1


def numbered(spec: Spec, number: int = 0) -> Iterator[tuple[int, list[int]]]:
    """The batches of a pass with their numbers m, holes left out."""
    if spec.rolling:
        rows = [_rolled(spec, number, shard) for shard in range(spec.shards)]
        yield from interleave([_kept(spec, cut(spec, own)) for own in rows])
        return
    if spec.known:  # epoch after epoch, each complete
        m = 0
        drought = EmptyEpochGuard(spec)
        for epoch in pass_epochs(spec, number):
            every = [b for _, b in interleave([iter(own) for own in epoch_batches(spec, epoch)])]
            for batch in every[spec.skip_batches :][: spec.take_batches]:
                yield m, batch
                m += 1
            drought.after(m > 0)
        return
    if spec.repeat is None:  # those that there are are counted
        every = interleave(
            [iter(epoch_batches(spec, number)[shard]) for shard in range(spec.shards)]
        )
        stop = None if spec.take_batches is None else spec.skip_batches + spec.take_batches
        yield from islice(every, spec.skip_batches, stop)
        return
    yield from interleave([_shard_items(spec, number, shard) for shard in range(spec.shards)])


def _rolled(spec: Spec, number: int, shard: int) -> Iterator[int]:
    drought = EmptyEpochGuard(spec)
    for past, epoch in enumerate(pass_epochs(spec, number)):
        rows = passed(spec, shard_rows(spec, epoch, past)[shard])
        yield from rows
        drought.after(bool(rows) or (spec.known and used_rows(spec) > 0))


def _shard_items(spec: Spec, number: int, shard: int) -> Iterator[list[int]]:
    """Batches of one shard where counts are unknown, each of its epochs after the other.

    Each has its share of those that ``skip`` and ``take`` count, or there is an error.
    """
    slot = (shard + spec.skip_batches) % spec.shards
    low = spec.skip_batches
    high = float("inf") if spec.take_batches is None else low + spec.take_batches
    drought = EmptyEpochGuard(spec)
    for epoch in pass_epochs(spec, number):
        own = enumerate(epoch_batches(spec, epoch)[slot])
        batches = [batch for at, batch in own if low <= slot + at * spec.shards < high]
        share = low if spec.take_batches is None else low + spec.take_batches
        if spec.shards > 1 and len(epoch_batches(spec, epoch)[slot]) < len(
            range(slot, share, spec.shards)
        ):
            raise Starved
        yield from batches
        drought.after(bool(batches))


def sequence(spec: Spec, number: int = 0, limit: int | None = None) -> list[list[int]]:
    """The batches of pass ``number`` in order, at most ``limit`` of them."""
    return [batch for _, batch in islice(numbered(spec, number), limit)]
