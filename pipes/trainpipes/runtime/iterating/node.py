"""A chain of stages used as torchdata nodes: run as the pipeline of the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import get_worker_info
from torchdata.nodes import BaseNode

from trainpipes.runtime.iterating.one_pass import Pass
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.rows.block import Payload
from trainpipes.runtime.shards.lane import check_places
from trainpipes.runtime.source import RowStream, StreamReader
from trainpipes.runtime.stage import Stage
from trainpipes.state import Position, parse
from trainpipes.topology import Topology, data_parallel

__all__ = ["FromNode", "NodeIterator"]


class FromNode(Stage):
    """Items of a foreign torchdata node as rows.

    In: a node. Out: its items, untouched. Cursor: the node's state at the window's start, and the
    items since. Its items are drawn in small lots, ahead of use by at most one lot.
    """

    role = "source"

    def __init__(self, node: BaseNode[Any]) -> None:
        super().__init__(None)
        self.node = node

    @property
    def runs_user_code(self) -> bool:
        return True

    def open_source(self, files: Any = None) -> NodeStream:
        return NodeStream(self.node)


class NodeStream(RowStream):
    """A foreign node as a stream that can go where its own state says."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = node

    @property
    def seekable(self) -> bool:
        return True

    def open(self, epoch: int, state: dict[str, Any] | None) -> NodeReader:
        self._node.reset(state)
        return NodeReader(self._node)

    def fingerprint(self) -> dict[str, Any]:
        return {"node": type(self._node).__qualname__}


class NodeReader(StreamReader):
    """One pass over a foreign node."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = node
        self._ended = False

    def read(self, rows: int) -> Payload | None:
        found: list[Any] = []
        while len(found) < rows and not self._ended:
            try:
                found.append(next(self._node))
            except StopIteration:
                self._ended = True
        return found or None

    def state(self) -> dict[str, Any]:
        return dict(self._node.state_dict())


class NodeIterator:
    """Iteration of a chain of nodes, with torchdata's ``reset`` and state.

    Args:
        nodes: the chain, first node first; that one may be foreign.
    """

    def __init__(self, nodes: Sequence[BaseNode[Any]]) -> None:
        stages = [n if isinstance(n, Stage) else FromNode(n) for n in nodes]
        self._plan = Plan(stages)
        self._number = 0
        self._pass: Pass | None = None
        self._consumed = False
        self._threads = None if get_worker_info() is None else 0

    def reset(self, state: dict[str, Any] | None) -> None:
        plan = self._plan
        rank, world = data_parallel()
        topology = Topology(rank, world)
        topology.check(plan.num_shards, plan.shard is not None)
        if state is not None:
            position = parse(state, plan.identity_for(state), plan.num_shards)
            check_places(plan.resized(position.sizes), position)
            self._pass = Pass(
                plan, topology, position, position.m, go_on=False, threads=self._threads
            )
        else:
            if self._pass is not None and self._consumed:
                self._number = self._pass.epoch + 1
            start = Position(self._number, 0, plan.num_shards)
            self._pass = Pass(plan, topology, start, 0, threads=self._threads)
        self._number = self._pass.epoch
        # A state in mid-pass means that something of it was consumed.
        self._consumed = state is not None and position.m > 0

    def __next__(self) -> Any:
        assert self._pass is not None
        self._consumed = True
        item = next(self._pass)
        for stage in self._plan.place:
            item = stage.place(item)
        return item

    def state_dict(self) -> dict[str, Any]:
        assert self._pass is not None
        return self._pass.state()
