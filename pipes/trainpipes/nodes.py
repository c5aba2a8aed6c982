"""All stages by their classes, to be put together as torchdata nodes.

Each is a ``torchdata.nodes.BaseNode`` built as ``Stage(source, ...)``: a chain of them gives what the
pipeline of the same stages gives, and can come before or after torchdata's own nodes.

The state of a node that is not ours is kept in that of the chain after it. It may hold what JSON can, tuples,
bytes, NumPy arrays and tensors.

>>> import pyarrow as pa
>>> from torchdata.nodes import Loader
>>> from trainpipes.nodes import Batch, FromArrow, Shuffle
>>> rows = FromArrow(table=pa.table({"x": [1, 2, 3, 4]}))
>>> loader = Loader(Batch(Shuffle(rows, 4, seed=1), 2))
>>> for batch in loader:
...     print(batch)
[{'x': 3}, {'x': 2}]
[{'x': 1}, {'x': 4}]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import get_worker_info
from torchdata.nodes import BaseNode

from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import require
from trainpipes.columns.run import innermost
from trainpipes.engine.iterating.consumer import Consumer, RunOptions
from trainpipes.engine.iterating.lookahead import items_to_give
from trainpipes.engine.planning.migrate import position_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.interfaces.stage import Stage, stage_classes
from trainpipes.interfaces.stage_kinds import ReadingSource, Source
from trainpipes.pipeline import starts as starts  # enters the classes of all stages
from trainpipes.sources.from_torchdata import FromNode, NodeStream
from trainpipes.state.format import Position, carried


class StageNode(BaseNode[Any]):
    """A stage as a torchdata node, above another node, ours or not.

    The state after an epoch's last item is of that epoch, as torchdata counts on: loaded, it gives no more
    items, and the next ``reset()`` begins the next epoch.

    Args:
        source: the node below; None for a stage that rows come from.
        options: of the stage.
    """

    kind: ClassVar[type[Stage]]

    def __init__(self, source: BaseNode[Any] | None = None, *args: Any, **options: Any) -> None:
        super().__init__()
        name = type(self).__name__
        good = source is None or isinstance(source, BaseNode)
        require(good, f"{name}(source)", "the node that it reads from", source)
        self.source = source
        self.stage: Stage = self.kind(*args, **options)
        self._plan: Plan | None = None
        self._pass: Consumer | None = None
        self._items: Iterator[Any] = iter(())  # of it
        self._consumed = False  # whether anything was, of the pass at hand

    def stages(self) -> list[Stage]:
        below = self.source
        if below is None:
            return [self.stage]
        foreign = not isinstance(below, StageNode)
        return [*([FromNode(below)] if foreign else below.stages()), self.stage]

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if self._plan is None:
            self._plan = Plan.of(self.stages())
            self._plan.require_fixed("nodes")
        plan = self._plan
        rank, world = data_parallel()
        topology = plan.counts.topology(rank, world)
        topology.check(plan.chain.num_shards, plan.chain.shard is not None)
        if initial_state is None:
            epoch = 0 if self._pass is None else self._pass.pass_number + self._consumed
            reweighed = () if self._pass is None else carried(self._pass.position.reweighed)
            position = Position(epoch, 0, plan.chain.num_shards, reweighed=reweighed)
        else:
            position = position_of(initial_state, plan)
            position.require_all_workers()
            if isinstance(plan.inputs.source, NodeStream):
                plan.inputs.source.resume(farthest(position), begun=position.m == 0)
        threads = None if get_worker_info() is None else 0
        options = RunOptions(threads, places=True)
        self._pass = Consumer(plan, topology, position, options=options)
        self._items = items_to_give(self._pass)
        self._consumed = position.m > 0

    def next(self) -> Any:
        assert self._pass is not None
        self._consumed = True
        try:
            return next(self._items)
        except StopIteration:
            self._pass.finish()
            raise

    def get_state(self) -> dict[str, Any]:
        assert self._pass is not None
        return self._pass.state(ends=True)


def farthest(position: Position) -> dict[int, dict[str, Any]]:
    """By epoch, the state of a foreign node of the shard that has read the most."""
    places = [innermost(cursor) for cursor in position.cursors.values()]
    places.sort(key=lambda place: place["window"])
    return {place["epoch"]: place["stream"] for place in places if place.get("stream")}


def node_of(kind: Any) -> type[StageNode]:
    """The class of nodes for a class of stages: its options come after the node below."""

    def start(self: StageNode, *args: Any, **options: Any) -> None:
        StageNode.__init__(self, None, *args, **options)

    names = {"kind": kind, "__doc__": kind.__doc__, "__module__": __name__}
    source = inspect.Parameter("source", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    parameters = [source, *inspect.signature(kind).parameters.values()]
    if issubclass(kind, Source) and not issubclass(kind, ReadingSource):
        names["__init__"] = start
        del parameters[0]
    node: Any = type(kind.__name__, (StageNode,), names)
    # Options without a default may come after one with a default: only to be shown.
    node.__signature__ = inspect.Signature(parameters, __validate_parameters__=False)
    return node  # type: ignore[no-any-return]


globals().update({kind.__name__: node_of(kind) for kind in stage_classes().values()})
__all__ = sorted([*(kind.__name__ for kind in stage_classes().values()), "StageNode"])  # noqa: PLE0605

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[StageNode]:
        """A node class of each stage."""
