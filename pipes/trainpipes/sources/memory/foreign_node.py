"""Rows from a torchdata node that is not ours, below a chain of nodes that are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torchdata.nodes import BaseNode

from trainpipes.errors import StateError
from trainpipes.interfaces.source import RowStream
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources.memory.from_torchdata import (
    BEFORE,
    EPOCHS,
    NodeReader,
    go_to,
    next_epoch,
    plain,
)

#: Epochs of which is known where they start and were left; shards lag behind others by fewer.
_REMEMBERED = 64


class FromNode(Source, gives="objects", read_once=True):
    """Items of a foreign torchdata node as rows."""

    free = frozenset({"node"})

    node: BaseNode[Any]

    _runs_user_code = True

    def open(self) -> NodeStream:
        return NodeStream(self.node)


class NodeStream(RowStream):
    """A foreign node as a stream that can go where its own state says.

    A node has one place, and begins its next epoch by ``reset()`` after something was read of the one before.
    So its place is changed when another reader's turn comes.
    """

    read_once = True
    lock = nullcontext()  # one thread reads it

    def __init__(self, node: BaseNode[Any]) -> None:
        self.node = node
        self._reader: NodeReader | None = None  # whose turn it is
        self._left: dict[int, dict[str, Any]] = {}  # by epoch: where it was left
        self._starts: dict[int, dict[str, Any]] = {}  # by epoch

    @property
    def seekable(self) -> bool:
        return True

    def resume(self, places: dict[int, dict[str, Any]], begun: bool) -> None:
        """Say where a run that goes on from a state stands, even if nothing more is read."""
        self._reader = None
        self._left = dict(places)
        self._starts = dict(places) if begun else {}

    def open(self, epoch: int, state: dict[str, Any] | None) -> NodeReader:
        before = self._leave()
        state = self._starts.get(epoch) if state is None else state
        if state is None:
            self._starts[epoch] = state = self._begin(epoch, before)
        else:
            go_to(self.node, state)
        self._left[epoch] = state
        for known in (self._left, self._starts):
            while len(known) > _REMEMBERED:
                del known[min(known)]
        self._reader = NodeReader(self, state, epoch)
        return self._reader

    def turn(self, reader: NodeReader) -> None:
        if self._reader is not reader:
            self._leave()
            go_to(self.node, reader.state())
            self._reader = reader

    def _leave(self) -> NodeReader | None:
        """Note where the reader is whose turn it was."""
        if self._reader is not None:
            self._left[self._reader.epoch] = self._reader.leave()
        left, self._reader = self._reader, None
        return left

    def state(self) -> dict[str, Any]:
        return dict(plain(self.node.state_dict()))

    def _begin(self, epoch: int, last: NodeReader | None) -> dict[str, Any]:
        """Have the node begin an epoch; where that starts."""
        if not self._left:
            self.node.reset(None)
            return self.state()
        lower = max((known for known in self._left if known < epoch), default=None)
        if lower is None:
            raise StateError(
                f"the state has no position of {type(self.node).__name__} before epoch {epoch}, "
                f"only in epochs {sorted(self._left)}: load the state as it was saved, with the "
                "positions of all shards"
            )
        if last is None or last.epoch != lower:
            go_to(self.node, self._left[lower])
        before = self.state()
        if last is None or last.epoch != lower or not last.has_read:
            next_epoch(self.node)
        else:
            self.node.reset(None)
        return {BEFORE: before, EPOCHS: 1}

    def fingerprint(self) -> dict[str, Any]:
        return {"node": type(self.node).__qualname__}
