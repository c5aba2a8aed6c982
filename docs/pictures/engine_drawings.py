"""Draws the path of a row for docs/how-it-works.md. Each box names what does it in the code."""

from __future__ import annotations

from itertools import pairwise

from drawing import flow

__all__ = ["OPTIONAL", "ROW", "ROW_ARROWS", "row_path"]

#: From a file to the loop that trains.
ROW = (
    (("read", "a row group is decoded", "BlockReader.read"),),
    (("join", "joined with the others of its window", "Joining.add"),),
    (("window", "a window: rows, and their order", "Window.content"),),
    (("rows", "rows of a few batches", "Window.take"),),
    (("worker", "with workers: functions are called by one", "HandedOut.submit_run"),),
    (("run", "through the stages, one shard's", "Lane.next_run"),),
    (("lazy", "a batch, padded when it is taken", "LazyBatches.__getitem__"),),
    (("shard", "the next one of its shard", "ShardItems.take"),),
    (("consumer", "batch m of this rank", "Consumer.__next__"),),
    (("ahead", "taken ahead: for a device, for other ranks", "Lookahead.__next__"),),
    (("loop", "your loop", "EpochIterator.__next__"),),
)  # fmt: skip
ROW_ARROWS = tuple((one[0][0], two[0][0]) for one, two in pairwise(ROW))
#: Boxes that are not on every row's path.
OPTIONAL = ("worker", "ahead")


def row_path() -> str:
    title = "The path of a row: " + ", ".join(
        f"{what} ({where})" for row in ROW for _, what, where in row
    )
    return flow(title, ROW, ROW_ARROWS, OPTIONAL)
