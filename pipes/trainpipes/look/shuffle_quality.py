"""How well an order is shuffled, in numbers that say what a random one would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainpipes._internal.progress import Progress
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.open_windows import open_windows
from trainpipes.engine.shards.opener import ShardOpener
from trainpipes.errors import ConfigError
from trainpipes.kinds.random_access import RandomAccessSource
from trainpipes.kinds.source import Reader, RowSource
from trainpipes.pipeline import Pipeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ShuffleQuality", "shuffle_quality"]

#: Batches that are looked at where nothing says how large they are.
BATCH_SIZE = 32
#: Rows whose places are kept, to be drawn.
MOST_PLACES = 10_000


@dataclass(frozen=True)
class ShuffleQuality:
    """What an order is like. Beside each number stands what a random order has on average.

    Attributes:
        rows: n, rows looked at.
        batch_size: rows in a batch.
        files: how many files the rows are from; blocks of rows where there are no files.
        rank_correlation: Spearman's, of where a row stands in the files and where it comes: 1 for file
            order, 0 +- 1/sqrt(n) for a random one. It says whether there is a drift over the epoch.
        displacement: how far a row is moved on average, as a part of the epoch: 0 for file order, 1/3 for
            a random one, about buffer/n where blocks stay in place.
        neighbours_kept: how often two rows that come one after the other are neighbours in a file: 1 for
            file order, 2/n for a random one. Above 0.01, batches hold stretches of files.
        files_per_batch: files that a batch has rows of, on average.
        random_files_per_batch: the same in a random order.
        file_spread: batches that have a row of a file, as a part of those that would in a random order, on
            average over files: 1 is random; 0.1 means that a file's rows come in a tenth of the places.
        places: of up to 10,000 rows, evenly taken: which one it is in the order, and its number in file
            order. int64 ``[2, rows]``.
        file_lengths: rows of each file, int64 ``[files]``.
    """

    rows: int
    batch_size: int
    files: int
    rank_correlation: float
    displacement: float
    neighbours_kept: float
    files_per_batch: float
    random_files_per_batch: float
    file_spread: float
    places: IntArray = field(repr=False, compare=False)
    file_lengths: IntArray = field(repr=False, compare=False)

    def __str__(self) -> str:
        n = max(1, self.rows)
        lines = [
            ("rows", f"{self.rows:,} of {self.files:,} files, batches of {self.batch_size}", ""),
            ("rank correlation", f"{self.rank_correlation:.3f}", f"0.000 +- {n**-0.5:.3f}"),
            ("displacement", f"{self.displacement:.3f}", "0.333"),
            ("neighbours kept", f"{self.neighbours_kept:.4f}", f"{min(1.0, 2 / n):.4f}"),
            (
                "files in a batch",
                f"{self.files_per_batch:.1f}",
                f"{self.random_files_per_batch:.1f}",
            ),
            ("spread of a file", f"{self.file_spread:.2f}", "1.00"),
        ]
        shown = [
            f"{label:<18}{value:<10}{'random: ' + r if r else ''}" for label, value, r in lines
        ]
        return "\n".join(line.rstrip() for line in shown)

    __repr__ = __str__

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw where rows come against where they stand in the files: a diagonal for file order, an even
        cloud for a random one. A Matplotlib figure, to ``savefig``.

        Args:
            ax: axes to draw on; a new figure's if left out.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        from trainpipes.look.pictures.shuffle import draw

        return draw(self, ax)


def shuffle_quality(
    order: Pipeline | Sequence[int] | npt.NDArray[Any],
    *,
    files: Sequence[int] | npt.NDArray[Any] | None = None,
    batch_size: int | None = None,
    epoch: int = 0,
) -> ShuffleQuality:
    """Measure an order: of a pipeline's rows, or any.

    Where a pipeline's stages keep all rows, nothing is read but the listing; else an epoch is.

    Args:
        order: a pipeline without ``repeat``; or the numbers of rows, in file order over all files, in the
            order in which they come.
        files: rows of each file, in file order, where ``order`` is not a pipeline; one file if left out.
        batch_size: rows in a batch; the pipeline's own if left out, else 32.
        epoch: which epoch of the pipeline.

    Raises:
        ConfigError: the pipeline has no end; or the rows are more than the files have.

    >>> print(shuffle_quality(range(1000), files=[250] * 4))
    rows              1,000 of 4 files, batches of 32
    rank correlation  1.000     random: 0.000 +- 0.032
    displacement      0.000     random: 0.333
    neighbours kept   1.0000    random: 0.0020
    files in a batch  1.1       random: 4.0
    spread of a file  0.27      random: 1.00
    """
    if isinstance(order, Pipeline):
        numbers, lengths, size = _of_pipeline(order, epoch)
    else:
        numbers = np.asarray(order, dtype=np.int64)
        size = BATCH_SIZE
        most = int(numbers.max(initial=-1)) + 1
        lengths = np.array([most] if files is None else files, dtype=np.int64)
        if numbers.ndim != 1 or most > lengths.sum() or numbers.min(initial=0) < 0:
            raise ConfigError(
                f"shuffle_quality(order) has row numbers from 0 to {int(lengths.sum()) - 1}, as the files "
                f"say; got {numbers.dtype}{list(numbers.shape)} up to {most - 1}"
            )
    return _measured(numbers, lengths, size if batch_size is None else batch_size)


def _measured(numbers: IntArray, lengths: IntArray, batch_size: int) -> ShuffleQuality:
    n = len(numbers)
    place = np.empty(n, dtype=np.float64)  # among the rows that come
    place[np.argsort(numbers, kind="stable")] = np.arange(n)
    moved = np.abs(place - np.arange(n)).mean() / n if n else 0.0
    together = (np.abs(np.diff(numbers)) == 1).mean() if n > 1 else 0.0
    correlation = float(np.corrcoef(place, np.arange(n))[0, 1]) if n > 1 else 1.0
    file = np.searchsorted(np.cumsum(lengths), numbers, side="right")
    batches = -(-n // batch_size)
    pairs = np.unique(np.arange(n) // batch_size * len(lengths) + file)
    in_file = np.bincount(file, minlength=len(lengths))
    touched = np.bincount(pairs % len(lengths), minlength=len(lengths))
    # Batches that a file's rows fall into where each row picks a place at random.
    sizes = np.diff(np.append(np.arange(0, n, batch_size), n))
    full, rest = int((sizes == batch_size).sum()), sizes[sizes < batch_size]
    expected = full * _touches(in_file, n, batch_size)
    for size in rest.tolist():
        expected = expected + _touches(in_file, n, size)
    there = in_file > 0
    taken = np.unique(np.linspace(0, max(0, n - 1), min(n, MOST_PLACES)).astype(np.int64))
    return ShuffleQuality(
        rows=n,
        batch_size=batch_size,
        files=int(there.sum()),
        rank_correlation=correlation,
        displacement=float(moved),
        neighbours_kept=float(together),
        files_per_batch=len(pairs) / max(1, batches),
        random_files_per_batch=float(expected.sum()) / max(1, batches),
        file_spread=float((touched[there] / expected[there]).mean()) if there.any() else 1.0,
        places=np.stack([taken, numbers[taken]]),
        file_lengths=lengths,
    )


def _touches(in_file: IntArray, n: int, size: int) -> npt.NDArray[np.float64]:
    """The chance that ``size`` of n rows, drawn at random, have one of each file's."""
    none = np.ones(len(in_file))
    for drawn in range(size):
        none *= np.maximum(0.0, n - in_file - drawn) / max(1, n - drawn)
    return 1.0 - none


def _of_pipeline(pipe: Pipeline, epoch: int) -> tuple[IntArray, IntArray, int]:
    """Row numbers in the order of the global sequence, rows of each file, and the batch size."""
    plan = Plan.of(pipe.stages)
    if plan.chain.repeat is not None:
        raise ConfigError(
            f"shuffle_quality(pipeline) looks at one epoch: leave out {plan.chain.repeat}"
        )
    source = plan.inputs.source
    if plan.counts.known and isinstance(source, RowSource):
        after = tuple(s for s in plan.chain.after if s.role not in ("rows", "finish"))
        chain = replace(plan.chain, before=(), after=after)
        plan = Plan(Inputs(chain, _Numbers(source)))
    numbers = _numbers(plan, epoch)
    if isinstance(source, RowSource):
        files, lengths = source.file_of_block, source.lengths
        if files is not None:
            lengths = np.bincount(files, weights=lengths).astype(np.int64)
    else:
        lengths = np.array([int(numbers.max(initial=-1)) + 1])
    return numbers, lengths, plan.chain.batch_size if plan.chain.batch_size > 1 else BATCH_SIZE


def _numbers(plan: Plan, epoch: int) -> IntArray:
    """The row numbers of an epoch, in the order of the global sequence."""
    opener = ShardOpener(plan, open_windows(plan))
    ids, keys = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    with Progress("measuring the shuffle", plan.inputs.epoch_rows, "rows") as progress:
        for shard in range(plan.chain.num_shards):
            slot = plan.counts.slot(shard, epoch, epoch)
            first, stop = plan.counts.chunks(slot, epoch)
            opened = opener.open(shard, plan.counts.start(slot, epoch, 0), epoch)
            k = 0
            while stop is None or k < stop:
                try:
                    run = opened.next_run()
                except StopIteration:
                    break
                items = np.arange(k, k + len(run))
                k += len(run)
                if run.bounds is not None:
                    items = np.repeat(items, np.diff(run.bounds))
                given = (items >= first) & (items < (k if stop is None else stop))
                ids.append(run.block.ids[given])
                keys.append((items[given] - first) * plan.chain.num_shards + shard)
                progress.advance(len(run.block))
    order = np.argsort(np.concatenate(keys), kind="stable")
    found: IntArray = np.concatenate(ids)[order]
    return found


class _Numbers(RandomAccessSource):
    """A source of which nothing is read: its rows are their numbers."""

    by_number = True

    def __init__(self, source: RowSource) -> None:
        self.holds_numbers = isinstance(source, RandomAccessSource) and source.holds_numbers
        self.lengths = source.lengths
        self.row_bytes, self.block_bytes = source.row_bytes, source.block_bytes
        self._firsts = np.concatenate([[0], np.cumsum(source.lengths)])
        self.file_of_block = source.file_of_block

    def reader(self) -> Reader:
        return self

    def read(self, block: int, start: int, stop: int) -> list[Any]:
        return [None] * (stop - start)

    def take(self, index: IntArray) -> list[Any]:
        return [None] * len(index)

    def close(self) -> None:
        """Nothing is open."""

    def fingerprint(self) -> dict[str, Any]:
        return {}
