"""A chain of stages used as torchdata nodes: run as the pipeline of the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import get_worker_info
from torchdata.nodes import BaseNode

from trainpipes.runtime.iterating.ahead import placed
from trainpipes.runtime.iterating.foreign import FromNode, NodeStream
from trainpipes.runtime.iterating.one_pass import Pass
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.run import innermost
from trainpipes.runtime.shards.places import position_of
from trainpipes.runtime.stage import Stage
from trainpipes.state import Position
from trainpipes.topology import Topology, data_parallel

__all__ = ["NodeIterator"]


class NodeIterator:
    """Iteration of a chain of nodes, with torchdata's ``reset`` and state.

    The state after an epoch's last item is of that epoch, as that of torchdata's nodes is: loaded, it
    gives no more items, and the next ``reset()`` begins the next epoch. ``Unbatcher`` and
    ``Loader(restart_on_stop_iteration=False)`` count on it.

    Args:
        nodes: the chain, first node first; that one may be foreign.
    """

    def __init__(self, nodes: Sequence[BaseNode[Any]]) -> None:
        stages = [n if isinstance(n, Stage) else FromNode(node=n) for n in nodes]
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
            position = position_of(state, plan)
            position.require_all_workers()
            if isinstance(plan.source, NodeStream):
                plan.source.resume(farthest(position), begun=position.m == 0)
            self._pass = Pass(
                plan,
                topology,
                position,
                position.m,
                go_on=False,
                threads=self._threads,
                places=True,
            )
        else:
            if self._pass is not None and self._consumed:
                self._number = self._pass.epoch + 1
            start = Position(self._number, 0, plan.num_shards)
            self._pass = Pass(plan, topology, start, 0, threads=self._threads, places=True)
        self._number = self._pass.epoch
        # A state in mid-pass means that something of it was consumed.
        self._consumed = state is not None and position.m > 0

    def __next__(self) -> Any:
        assert self._pass is not None
        self._consumed = True
        return placed(self._plan, next(self._pass))

    def state_dict(self) -> dict[str, Any]:
        assert self._pass is not None
        return self._pass.state({})  # without more keys: see ``Consumer.state``


def farthest(position: Position) -> dict[int, dict[str, Any]]:
    """By epoch, the state of a foreign node where the shard stands that has read the most of it."""
    places = [innermost(cursor) for cursor in position.cursors.values()]
    places.sort(key=lambda place: place["window"])
    return {place["epoch"]: place["stream"] for place in places if place.get("stream")}
