from __future__ import annotations

from trainpipes.columns.run import Cursors, Run, round_of
from trainpipes.errors import DataError
from trainpipes.order.layout import Layout, StreamLayout

#: Epochs in a row that may give nothing, of small data. Where a shard has one row in an epoch and a
#: condition that half of the rows meet, that many are empty once in 65,536.
MOST_EMPTY_EPOCHS = 16

#: Rows that are looked at for nothing, unless a single epoch has more.
MOST_EMPTY_ROWS = 2**20


def most_empty(layout: Layout | StreamLayout) -> int:
    """Epochs in a row that may give nothing, where each is cut as ``layout`` says."""
    rows = layout.rows if isinstance(layout, Layout) else 0
    return max(1, min(MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS // max(1, rows)))


class EmptyRounds:
    """The epochs, and those of a mix's sources, that rows came from since one was let through."""

    def __init__(self) -> None:
        #: Whose rounds are not in ``_seen`` yet: most are never asked for.
        self._taken: list[Cursors] = []
        self._seen: set[tuple[int, int]] = set()

    def saw(self, run: Run) -> None:
        self._taken.append(run.cursors)

    def gave(self) -> None:
        self._taken.clear()
        self._seen.clear()

    def check(self, stage: object) -> None:
        """Raise DataError if there are so many that nothing ever may come out. They are counted: of a mix
        whose epoch ends, those of its sources go on a million later.
        """
        self._seen.update(round_of(cursors.place(0)) for cursors in self._taken)
        self._taken.clear()
        if len(self._seen) > MOST_EMPTY_EPOCHS + 1:
            raise DataError(
                f"{stage} kept no row of a shard in {MOST_EMPTY_EPOCHS} epochs, so that repeat() or mix() "
                "would wait forever: check its options, and whether the rows that it keeps stand together in "
                'the files: then sharding_filter(split="stride") deals them to all shards',
                stage=str(stage),
            )


def check_shard(layout: Layout | StreamLayout, shard: int, epoch: int, given: int) -> None:
    """Raise DataError if a shard of a pass without an end has got nothing since epoch ``given``."""
    if epoch - given >= most_empty(layout):
        shards = layout.num_shards
        way = "check the stages that leave out rows, such as filter(), take() and skip()"
        way = f"lower num_shards in sharding_filter(), or {way}" if shards > 1 else way
        raise DataError(
            f"repeat() or mix() would wait forever: shard {shard} of {shards} got no rows up to epoch "
            f"{epoch}; {way}"
        )
