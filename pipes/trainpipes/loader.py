"""``Loader``: a pipeline run for training, in this process or in worker processes."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainpipes.errors import ConfigError, StateError
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.iterator import PipelineIterator, Runner
from trainpipes.runtime.lane import Lane
from trainpipes.runtime.rounds import Message, Rounds, unpack
from trainpipes.stages.pin import Pin
from trainpipes.state import Position, render
from trainpipes.topology import Topology

__all__ = ["Loader"]


class Loader:
    """Runs a pipeline for training, and knows where it stands.

    Iterating starts the next epoch, in another order; after ``load_state_dict`` it goes on with the
    batch that would have come next. The state counts what was delivered, not what was fetched ahead,
    and can be loaded with another ``num_workers``. Any number of workers will do.

    Holds a ``DataLoader`` for its workers, and takes the options of one that make sense here.

    Args:
        pipeline: what to run.
        num_workers: worker processes; 0 to work in this one. Worth their cost where Python functions
            of rows take the time.
        prefetch_factor: rounds of up to 8 batches a worker that are made ahead.
        persistent_workers: keep the processes from one epoch to the next.
        worker_init_fn: called with the worker's id in each worker.
        timeout: seconds to wait for a worker before an error; 0 for ever.
        multiprocessing_context: "fork", "spawn", "forkserver", or a context.
        pin_memory: as ``.pin()`` at the end of the pipeline.

    >>> import trainpipes as tp
    >>> loader = tp.Loader(tp.from_iterable(lambda: range(10)).batch(4))
    >>> for batch in loader:
    ...     state = loader.state_dict()
    ...     break
    >>> resumed = tp.Loader(tp.from_iterable(lambda: range(10), version="x").batch(4))
    >>> loader.load_state_dict(state)
    >>> list(loader)
    [[4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(
                f"Loader(pipeline) takes a trainpipes Pipeline, got {type(pipeline).__name__}; for a "
                "torch Dataset start with trainpipes.from_dataset(dataset)"
            )
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigError(
                f"Loader(num_workers) is an integer of 0 or more, got {num_workers!r}"
            )
        if prefetch_factor < 1:
            raise ConfigError(f"Loader(prefetch_factor) is 1 or more, got {prefetch_factor!r}")
        if pin_memory and not any(isinstance(s, Pin) for s in pipeline.stages):
            pipeline = pipeline.pin()
        self.pipeline = pipeline
        self.num_workers = num_workers
        self._options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "worker_init_fn": worker_init_fn,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
        }
        self._persistent = persistent_workers
        self._held: tuple[Any, DataLoader[Message]] | None = None
        self._current: _Rounded | None = None

    @property
    def _runner(self) -> Runner:
        return self.pipeline._runner

    def __len__(self) -> int:
        return len(self.pipeline)

    def estimate_len(self) -> int:
        """About ``len()``, where a filter makes that unknown. See ``Pipeline.estimate_len``."""
        return self.pipeline.estimate_len()

    def peek(self) -> Any:
        """The first batch of the next iteration, without starting one."""
        return self.pipeline.peek()

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers == 0:
            return PipelineIterator(self._runner)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        runner = self._runner
        plan = runner.plan
        topology = Topology(*runner.ranks())
        topology.check(plan.num_shards, plan.shard is not None)
        previous, self._current = self._current, None
        position = runner.take_pending()
        if position is None and plan.endless and previous is not None:
            position = runner.parse(previous.state())
        if position is None:
            position = Position(runner.passes.upcoming, 0, plan.num_shards)
        for start in (position, Position(position.epoch + 1, 0, plan.num_shards)):
            current = _Rounded(self, topology, start)
            self._current = current
            given = False
            runner.passes.rewind(start.epoch + 1)
            for item in current:
                given = True
                for stage in plan.place:
                    item = stage.place(item)
                yield item
            if given or position.m == 0:  # a state at an epoch's end goes on with the next epoch
                return

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch delivered: integers and strings in a flat dict."""
        if self.num_workers and self._current is not None:
            return self._current.state()
        state = self._runner.state()
        if state is None:
            raise StateError(
                "a Loader runs in the process that trains, not in a DataLoader's worker"
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken.

        Raises:
            StateError: it does not fit the pipeline.
        """
        self._runner.load(state)
        self._current = None

    def _messages(
        self, position: Position, ranks: tuple[int, int], workers: int
    ) -> Iterator[Message]:
        """The workers' messages for a pass, from live workers if they can be used again."""
        if self._held is not None and position.m == 0:
            self._held[0][0] = position.epoch
            return iter(self._held[1])
        self._held = None
        epoch = sharedctypes.RawArray("q", 1)
        epoch[0] = position.epoch
        plan = self._runner.plan
        rounds = Rounds(self.pipeline._steps, plan.source, ranks, workers, epoch, position)
        generator = torch.Generator()  # a DataLoader would draw from the global one
        generator.manual_seed(position.epoch)
        options = {k: v for k, v in self._options.items() if v is not None}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital.*")
            held: DataLoader[Message] = DataLoader(
                rounds, batch_size=None, num_workers=workers, generator=generator, **options
            )
        self._check_pickles(held)
        if self._persistent:
            self._held = (epoch, held)
        return iter(held)

    def _check_pickles(self, loader: DataLoader[Message]) -> None:
        method = getattr(loader.multiprocessing_context, "get_start_method", lambda: None)()
        if method is None:
            method = torch.multiprocessing.get_start_method()
        if method == "fork":
            return
        for stage in self.pipeline.stages:
            for name, value in stage.options.items():
                if callable(value):
                    check_pickles(stage, name, value)


def check_pickles(stage: Any, name: str, value: Any) -> None:
    """Raise unless an option can be sent to a spawned process."""
    try:
        ForkingPickler.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{stage}: {name} must pickle to reach a spawned worker, and does not ({error}); use a "
            'function defined at the top of a module, or multiprocessing_context="fork"',
            stage=str(stage),
        ) from error


class _Rounded:
    """One pass made by workers, dealt in order, with the cursors of what was delivered.

    Args:
        loader: whose workers.
        topology: this rank.
        position: where to start.
    """

    def __init__(self, loader: Loader, topology: Topology, position: Position) -> None:
        self._loader = loader
        self._plan = loader._runner.plan
        self._rank, self._world = topology.rank, topology.world_size
        self._position = position
        self._m = position.m
        plan = self._plan
        self._shards = [s for s in range(plan.num_shards) if s % self._world == self._rank]
        windows = plan.windows()
        self._texts = {
            s: Lane(plan, windows, s, position.epoch, position.cursors.get(s)).cursor_text()
            for s in self._shards
        }

    def __iter__(self) -> Iterator[Any]:
        plan, world = self._plan, self._world
        end = plan.last_slot(world)
        m = self._position.m + (self._rank - self._position.m) % world
        if m >= end:
            return
        workers = min(self._loader.num_workers, len(self._shards))
        running = {s for s in self._shards if not json.loads(self._texts[s]).get("ended")}
        messages = self._loader._messages(self._position, (self._rank, world), workers)
        ready: dict[int, tuple[Any, str]] = {}
        ended: dict[int, str] = {}
        while running and m < end:
            shard = m % plan.num_shards
            while shard in running and m not in ready and shard not in ended:
                message = next(messages, None)
                if message is None:
                    return
                items = unpack(message.items)
                ready.update(
                    zip(message.slots, zip(items, message.cursors, strict=True), strict=True)
                )
                ended.update(message.ended)
            if m in ready:
                item, self._texts[shard] = ready.pop(m)
                self._m = self._position.m + ((m - self._position.m) // world + 1) * world
                yield item
            elif shard in running:
                running.discard(shard)
                self._texts[shard] = ended[shard]
            m += world

    def state(self) -> dict[str, Any]:
        position = Position(self._position.epoch, self._m, self._plan.num_shards)
        return render(position, self._plan.identity, self._texts)
