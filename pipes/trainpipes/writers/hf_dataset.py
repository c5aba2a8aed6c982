"""``pipe.to_hf()``: a pipeline as an ``IterableDataset`` of Hugging Face's ``datasets``.

``datasets`` has no public class for sources with a state: this uses the private ``_BaseExamplesIterable``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

from trainpipes._internal.checks import need, require, wrong
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, SchemaError, StateError, TopologyError, shown
from trainpipes.order.layout import Topology, divisors
from trainpipes.state.format import Position

need("datasets", "pipe.to_hf()", oldest="4.8")  # in 4.5 filters fail

import datasets  # noqa: E402
from datasets.iterable_dataset import IterableDataset, _BaseExamplesIterable  # noqa: E402
from torch.utils.data import get_worker_info  # noqa: E402

if TYPE_CHECKING:
    import numpy as np


class _LateState:
    """Where a pass stands, in a state of ``datasets``; written only when the state is asked for."""

    def __init__(self, consumer: Consumer) -> None:
        self._one = consumer

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (json.dumps(self._one.state(turn=True)),)


class PipelineExamples(_BaseExamplesIterable):  # type: ignore[misc]  # datasets has no types here
    """The rows of a part of a pipeline's shards, as ``datasets`` asks for them."""

    #: datasets asks; no thread of ours outlives an iterator.
    _sleep_on_threads_shutdown = False

    def __init__(self, pipeline: Record, features: Any) -> None:
        super().__init__()
        self.pipeline = pipeline
        self._features = features
        self._part, self._parts = 0, 1
        self._epoch = 0
        self._is_workers = False  # whether it was dealt to a DataLoader's worker

    @property
    def is_typed(self) -> bool:
        return self._features is not None

    @property
    def features(self) -> Any:
        return self._features

    @property
    def num_shards(self) -> int:
        return int(plan_of(self.pipeline).chain.num_shards) // self._parts

    def shard_data_sources(
        self, num_shards: int, index: int, contiguous: bool = True
    ) -> PipelineExamples:
        """Every n-th shard, in the order of the whole. With more parts than shards, the last are empty."""
        shards = self.num_shards
        parts = min(num_shards, shards)
        if index >= parts or shards % parts:
            shared = plan_of(self.pipeline).chain.shard
            way = f"{divisors(shards)} can" if shared else "add .sharding_filter() to the pipeline"
            raise TopologyError(
                f"{num_shards} ranks or workers cannot share the {shards} shard{'s' * (shards > 1)} of "
                f"pipe.to_hf() evenly: {way}"
            )
        part = copy(self)
        part._part = self._part + self._parts * index
        part._parts = self._parts * parts
        part._is_workers = get_worker_info() is not None
        return part

    def reshard_data_sources(self) -> PipelineExamples:
        return self

    def shuffle_data_sources(self, generator: np.random.Generator) -> PipelineExamples:
        return self  # the pipeline's own shuffle does that, by the epoch

    def shift_rngs(self, value: int) -> PipelineExamples:
        """Called with the epoch, unless that is 0; and then, in a worker, with the worker's number."""
        if self._is_workers:
            return self
        shifted = copy(self)
        shifted._epoch = value
        return shifted

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict: dict[str, Any] = {"trainpipes": "", "type": type(self).__name__}
        return self._state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        _check_keys(state_dict)
        return super().load_state_dict(state_dict)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self._state_dict  # another iteration of the dataset makes another one
        plan = plan_of(self.pipeline)
        topology = plan.counts.topology(0, 1, self._part, self._parts)
        position = Position(self._epoch, 0, plan.chain.num_shards)
        if state is not None and state != {"trainpipes": "", "type": type(self).__name__}:
            position = self._loaded(state, topology)
        turn = json.loads(position.extra.get("turn", "{}"))
        consumer = Consumer(plan, topology, position, origin=turn.get("origin", 0))
        if state is not None:
            state["trainpipes"] = _LateState(consumer)
        number = 0
        try:
            for row in consumer:
                if not isinstance(row, dict):
                    raise wrong("a row of pipe.to_hf()", "a dict", row, "make dicts with .map(...)")
                yield f"{self._part}_{number}", row
                number += 1
            consumer.finish()
        finally:
            consumer.close()

    def _loaded(self, state: dict[str, Any], topology: Topology) -> Position:
        _check_keys(state)
        text = deepcopy(state["trainpipes"])  # which may be where another iteration is
        try:
            saved = json.loads(text)
        except (TypeError, ValueError):
            way = "load the state as it was saved"
            raise StateError(f"trainpipes: damaged, got {shown(text)}; {way}") from None
        iteration = iteration_of(self.pipeline)
        position = iteration.loaded(iteration.parse(saved))
        turn = json.loads(position.extra.get("turn", '{"worker":0,"num_workers":1}'))
        if (turn["worker"], turn["num_workers"]) != (topology.worker, topology.num_workers):
            raise StateError(
                f"the state must be of part {topology.worker} of {topology.num_workers}, got one of part "
                f"{turn['worker']} of {turn['num_workers']}; resume on as many ranks x workers"
            )
        return position


def _check_keys(state: dict[str, Any]) -> None:
    if state.keys() != {"trainpipes", "type"}:
        keys, way = shown(sorted(map(str, state))), "load what state_dict() of this dataset gave"
        raise StateError(f"the state must be one of pipe.to_hf(), got one with keys {keys}; {way}")


def to_hf(pipeline: Record) -> IterableDataset:
    """The rows of a pipeline as a ``datasets.IterableDataset``. See ``Pipeline.to_hf``."""
    plan = plan_of(pipeline)
    plan.require_fixed("to_hf()")
    batching = pipeline._batching()
    if batching is not None or plan.chain.device_stages:
        got = batching or plan.chain.device_stages[0]
        way = "leave that and what follows it out; batches are for trainpipes.Loader(pipe)"
        raise ConfigError(f"pipe.to_hf() must be of rows, got {got}; {way}")
    way = "leave .distributed() out: datasets.distributed.split_dataset_by_node() shares rows out"
    require(pipeline._ranks is None, "pipe.to_hf()", "of all ranks", pipeline._ranks, way)
    features = _features(pipeline)
    info = datasets.DatasetInfo(features=features)
    return IterableDataset(PipelineExamples(pipeline, features), info=info)


def _features(pipeline: Record) -> Any:
    """Features of the rows; None where rows are Python objects, or have types that datasets lacks."""
    try:
        schema = plan_of(pipeline).types.of_rows("to_hf()")
        known = None if schema is None else schema.remove_metadata()
        return None if known is None else datasets.Features.from_arrow_schema(known)
    except (SchemaError, ValueError):  # they can be read only once, or have such types
        return None


def pipeline_of(dataset: Any) -> Record | None:
    """The pipeline whose rows a dataset has, through any stages; None where there is no pipeline."""
    source = getattr(dataset, "_ex_iterable", None)
    while source is not None and not isinstance(source, PipelineExamples):
        source = getattr(source, "ex_iterable", None)
    return None if source is None else source.pipeline
