"""Draws docs/engine.md: the paths of a row and of a state. Each box names what does it in the code."""

from __future__ import annotations

from itertools import pairwise

from drawing import flow

__all__ = ["OPTIONAL", "ROW", "ROW_ARROWS", "STATE", "STATE_ARROWS", "row_path", "state_path"]

#: From a file to the loop that trains.
ROW = (
    (("read", "a row group is decoded", "BlockReader.read"),),
    (("join", "joined with the others of its window", "Joining.add"),),
    (("window", "a window: rows, and their order", "Window.content"),),
    (("rows", "rows of a few micro-batches", "Window.take"),),
    (("run", "through the stages, one shard's", "ShardRuns.next"),),
    (("lazy", "a batch, padded when it is taken", "LazyBatches.__getitem__"),),
    (("shard", "the next one of its shard", "ShardItems.take"),),
    (("sent", "made by a worker: sent in a message", "WorkerReceiver.take"),),
    (("consumer", "micro-batch m of this rank", "WorkerIterator.__next__"),),
    (("ahead", "pinned or copied to a device, if asked for", "Lookahead.__next__"),),
    (("loop", "your loop", "EpochIterator.__next__"),),
)  # fmt: skip
ROW_ARROWS = tuple((one[0][0], two[0][0]) for one, two in pairwise(ROW))
#: Boxes that are not on every row's path, or every state's.
OPTIONAL = ("sent", "cursors", "changed")

_SAVE = (
    ("ask", "save: your loop asks", "Loader.state_dict"),
    ("where", "which pass gave the last batch", "Session.state"),
    ("pass", "its epoch, and where it stands", "OnePass.state"),
    ("m", "how many batches were delivered", "WorkerIterator.state"),
    ("cursors", "not counted: a cursor for each shard", "ShardItems.cursor_text"),
    ("dict", "a flat dict, with checksums", "render"),
)
_LOAD = (
    ("give", "load: your script has a state", "Loader.load_state_dict"),
    ("changed", "with allow_changes: made to fit", "migrate"),
    ("check", "compared with this pipeline", "position_of"),
    ("noted", "the next pass starts there", "EpochCounter.load"),
    ("claim", "the first next(): it does", "Session.claim"),
    ("begin", "rows are read from there on", "WorkerIterator.__next__"),
)
#: Saving to the left, loading to the right.
STATE = tuple(zip(_SAVE, _LOAD, strict=True))
STATE_ARROWS = tuple((one[0], two[0]) for way in (_SAVE, _LOAD) for one, two in pairwise(way))


def row_path() -> str:
    title = "The path of a row: " + ", ".join(
        f"{what} ({where})" for row in ROW for _, what, where in row
    )
    return flow(title, ROW, ROW_ARROWS, OPTIONAL)


def state_path() -> str:
    ways = [", ".join(f"{what} ({where})" for _, what, where in way) for way in (_SAVE, _LOAD)]
    return flow("The path of a state: " + "; ".join(ways), STATE, STATE_ARROWS, OPTIONAL)
