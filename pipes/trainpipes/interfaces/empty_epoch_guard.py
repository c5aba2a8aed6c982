from __future__ import annotations

from collections.abc import Iterator

from trainpipes.columns.run import Cursors, Run, round_of
from trainpipes.errors import DataError
from trainpipes.order.layout import Layout, StreamLayout

#: Epochs in a row that may give nothing, of small data. Where a shard has one row in an epoch and a
#: condition that half of the rows meet, that many are empty once in 65,536.
MOST_EMPTY_EPOCHS = 16

#: Rows that are looked at for nothing, unless a single epoch has more.
MOST_EMPTY_ROWS = 2**20


def most_empty(layout: Layout | StreamLayout | None = None) -> int:
    """Epochs in a row that may give nothing, where each is cut as ``layout`` says."""
    rows = layout.rows if isinstance(layout, Layout) else 0
    return max(1, min(MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS // max(1, rows)))


class EmptyRounds:
    """The epochs, and those of a mix's sources, that rows came from since one was let through."""

    def __init__(self) -> None:
        self._first: Cursors | None = None
        self._last: Cursors | None = None

    def saw(self, run: Run) -> None:
        self._first, self._last = self._first or run.cursors, run.cursors

    def gave(self) -> None:
        self._first = self._last = None

    def check(self, stage: object) -> None:
        """Raise DataError if there are so many that nothing ever may come out."""
        first, last = (
            0 if c is None else sum(round_of(c.place(0))) for c in (self._first, self._last)
        )
        if last - first > MOST_EMPTY_EPOCHS:
            raise kept_nothing(stage)


def not_empty(runs: Iterator[Run], stage: object) -> Iterator[Run]:
    """The runs of a stage that have an item; raises after many epochs without. No run that was given is
    held: its memory is free for the next one.
    """
    rounds = EmptyRounds()

    def has_items(run: Run) -> bool:
        if len(run):
            rounds.gave()
            return True
        rounds.saw(run)
        rounds.check(stage)
        return False

    return filter(has_items, runs)


def kept_nothing(stage: object) -> DataError:
    return DataError(
        f"{stage} kept no row of a shard in {MOST_EMPTY_EPOCHS} epochs, so that repeat() or mix() would wait "
        "forever: check its options, and whether the rows that it keeps stand together in the files: then "
        'sharding_filter(split="stride") deals them to all shards',
        stage=str(stage),
    )
