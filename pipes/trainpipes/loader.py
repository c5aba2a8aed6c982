"""``Loader``: a pipeline run for training, in this process or in worker processes."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing import sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from trainpipes.errors import ConfigError, StateError
from trainpipes.merge import merge_states
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.iterating.agreement import InStep, agreement_over
from trainpipes.runtime.iterating.ahead import Ahead, ahead_of, placed
from trainpipes.runtime.iterating.consumer import Consumer
from trainpipes.runtime.iterating.iterator import PipelineIterator, Runner
from trainpipes.runtime.iterating.parcels import Slots
from trainpipes.runtime.iterating.rounds import Message, Rounds, unpacked
from trainpipes.runtime.stage import Stage
from trainpipes.sources.packed_list import packed
from trainpipes.stages.pin import Pin
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["Loader"]

_END: Any = object()


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
        threads: without workers, threads of this process that read and work ahead. Left out, one for each
            core (at most 8, shared with the other ranks of the machine; the environment's
            ``TRAINPIPES_THREADS`` says another number), and functions of yours are called in the thread
            that trains. A number: all is done in so many threads; in one, if there are functions of
            yours. 0 for none, as for a debugger. The order of batches is always the same.

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
        threads: int | None = None,
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
        if threads is not None and (
            isinstance(threads, bool) or not isinstance(threads, int) or threads < 0
        ):
            raise ConfigError(f"Loader(threads) is an integer of 0 or more, got {threads!r}")
        if threads and num_workers:
            raise ConfigError(
                f"Loader works in threads or in worker processes, got threads={threads} and "
                f"num_workers={num_workers}; leave one out"
            )
        if prefetch_factor < 1:
            raise ConfigError(f"Loader(prefetch_factor) is 1 or more, got {prefetch_factor!r}")
        if pin_memory and not any(isinstance(s, Pin) for s in pipeline.stages):
            pipeline = pipeline.pin()
        self.pipeline = pipeline
        self.num_workers = num_workers
        self.threads = threads
        self._options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "worker_init_fn": partial(_begin_worker, worker_init_fn),
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
        }
        self._persistent = persistent_workers
        self._steps: list[tuple[Any, dict[str, Any]]] | None = None  # as workers get them
        self._held: tuple[Any, DataLoader[Message], Slots] | None = None
        self._current: _Rounded | InStep | Ahead | None = None

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
        if self._current is not None and self._runner.plan.endless:
            return self._runner.peek(self._current.state())
        return self._runner.peek()

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers == 0:
            return PipelineIterator(self._runner, self.threads)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        runner = self._runner
        plan = runner.plan
        topology = runner.topology()
        previous, self._current = self._current, None
        position = runner.take_pending()
        if position is None and plan.endless and previous is not None:
            position = runner.parse(previous.state())
        if position is None:
            position = Position(runner.passes.upcoming, 0, plan.num_shards)
        for start in (position, Position(position.epoch + 1, 0, plan.num_shards)):
            current = self._current = self._open(topology, start)
            given = False
            runner.passes.rewind(start.epoch + 1)
            try:
                for item in iter(partial(next, current, _END), _END):
                    given = True
                    yield placed(plan, item)
            finally:
                current.close()
            if given or position.m == 0:  # a state at an epoch's end goes on with the next epoch
                return

    def _open(self, topology: Topology, start: Position) -> _Rounded | InStep | Ahead:
        return ahead_of(self._runner.plan, self._opened(topology, start))

    def _opened(self, topology: Topology, start: Position) -> _Rounded | InStep:
        plan, world = self._runner.plan, topology.world_size
        if not plan.ends_unevenly or plan.ragged or world == 1:
            return _Rounded(self, topology, start, stops_at_holes=False)
        rounded = _Rounded(self, topology, start, stops_at_holes=True)
        return InStep(rounded, agreement_over(topology), start.m, world)

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

    def gather_state(self, group: Any = None) -> dict[str, Any]:
        """The state of all ranks as one, which any number of ranks can load. A collective: all ranks
        call it after the same step.

        Args:
            group: a process group; the default one if left out.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return merge_states([self.state_dict()])
        states: list[Any] = [None] * dist.get_world_size(group)
        rank, _ = self._runner.ranks()
        dist.all_gather_object(states, (rank, self.state_dict()), group=group)
        return merge_states(dict(states).values())  # processes of one rank have the same

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next iteration go on where ``state`` was taken, on any number of ranks and workers.

        Args:
            state: of this pipeline; of all ranks merged, or of this rank where their number is the same.
            allow_changes: what may differ from the pipeline that saved it. "batch_size": micro-batches
                have the new size from here on; each row still comes at most once in this epoch, and a
                few rows at its end may be left out. "pack_length": packed rows have the new length from
                the start of an epoch on; a state from within one is refused. "mix": sources of ``mix`` may
                come and go, their weights, schedule and repetitions change; the others go on where they
                stand.

        Raises:
            StateError: it does not fit the pipeline.
        """
        self._runner.load(state, allow_changes)
        self._current = None

    def _messages(
        self, position: Position, ranks: tuple[int, int], workers: int
    ) -> Iterator[Message]:
        """The workers' messages for a pass, from live workers if they can be used again."""
        if self._held is not None and position.m == 0:
            epoch, held, slots = self._held
            epoch[0] = position.epoch
            return unpacked(iter(held), slots)
        self._held = None
        epoch = sharedctypes.RawArray("q", 1)
        epoch[0] = position.epoch
        plan = self._runner.plan
        if self._steps is None:
            self._steps = [(cls, packed(options)) for cls, options in self.pipeline._steps]
        slots = Slots(workers, self._options["prefetch_factor"])
        rounds = Rounds(self._steps, plan.source, ranks, workers, epoch, position, slots)
        generator = torch.Generator()  # a DataLoader would draw from the global one
        generator.manual_seed(position.epoch)
        options = {k: v for k, v in self._options.items() if v is not None}
        held = DataLoader(
            rounds, batch_size=None, num_workers=workers, generator=generator, **options
        )
        self._check_pickles(held)
        if self._persistent:
            self._held = (epoch, held, slots)
        return unpacked(iter(held), slots)

    def _check_pickles(self, loader: DataLoader[Message]) -> None:
        method = getattr(loader.multiprocessing_context, "get_start_method", lambda: None)()
        if method is None:
            method = torch.multiprocessing.get_start_method()
        if method == "fork":
            return
        for stage in stages_within(self.pipeline):
            for name, value in stage.options.items():
                if callable(value):
                    check_pickles(stage, name, value)


def stages_within(pipeline: Pipeline) -> Iterator[Stage]:
    """A pipeline's stages, and those of the pipelines that it is made of."""
    for stage in pipeline.stages:
        yield stage
        for value in stage.options.values():
            several = value.values() if isinstance(value, dict) else value
            for inner in several if isinstance(value, dict | tuple) else ():
                if isinstance(inner, Pipeline):
                    yield from stages_within(inner)


def _begin_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """What a worker does first."""
    gc.freeze()  # what it shares with its parent is not looked through for garbage, which copies it
    if own is not None:
        own(worker)


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

    Looks to the ranks' agreement like a consumer.

    Args:
        loader: whose workers.
        topology: this rank.
        position: where to start.
        stops_at_holes: whether it ends before the first micro-batch that is missing.
    """

    def __init__(
        self, loader: Loader, topology: Topology, position: Position, stops_at_holes: bool
    ) -> None:
        # Not the loader itself: in a cycle, worker processes would outlive their last reference.
        self._start_workers = WeakMethod(loader._messages)
        self._num_workers = loader.num_workers
        self._plan = loader._runner.plan.resized(position.sizes)
        self._topology = topology
        self._position = position
        self._stops_at_holes = stops_at_holes
        self._start = Consumer(self._plan, topology, position, position.m, stops_at_holes)
        self._texts = self._start.texts()
        self._m = position.m
        self._last = -1
        self._passed: list[int] = []  # shards found to have ended on the way to the last batch
        self._next = topology.first(position.m)
        self._end = self._last_slot = self._plan.last_slot(topology.world_size, position.m)
        self._running = {s for s, text in self._texts.items() if not json.loads(text).get("ended")}
        self._messages: Iterator[Message] | None = None
        self._ready: dict[int, tuple[Any, str]] = {}
        self._ended: dict[int, str] = {}

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def m(self) -> int:
        return self._m

    @property
    def upcoming(self) -> int:
        return self._next

    def texts(self) -> dict[int, str]:
        return dict(self._texts)

    def moved(self) -> dict[int, str]:
        return {shard: self._texts[shard] for shard in (*self._passed, self._last)}

    def __next__(self) -> Any:
        world = self._topology.world_size
        self._passed.clear()
        while self._running and self._next < self._end:
            m = self._next
            shard = m % self._plan.num_shards
            while shard in self._running and m not in self._ready and shard not in self._ended:
                self._receive()
            if m not in self._ready:
                if shard in self._running:
                    self._running.discard(shard)
                    self._texts[shard] = self._ended[shard]
                    self._passed.append(shard)
                if self._stops_at_holes:
                    self._end = m
                    break
                self._next += world
                continue
            item, self._texts[shard] = self._ready.pop(m)
            self._m = self._position.m + ((m - self._position.m) // world + 1) * world
            self._last = shard
            self._next += world
            return item
        raise StopIteration

    def _receive(self) -> None:
        """Take in one message: a worker's part of a round."""
        if self._messages is None:
            workers = min(self._num_workers, len(self._texts))
            ranks = (self._topology.rank, self._topology.world_size)
            start = self._start_workers()
            assert start is not None
            self._messages = start(self._position, ranks, workers)
        message = next(self._messages, None)
        if message is None:
            raise RuntimeError("all workers have ended, and not all of their batches have come")
        parts = zip(message.items, message.cursors, strict=True)
        self._ready.update(zip(message.slots, parts, strict=True))
        self._ended.update(message.ended)

    def close(self) -> None:
        """Let the workers go."""
        self._messages = None
        self._ready.clear()
        self._end = min(self._end, self._next)

    def state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._plan.known and self._m >= self._last_slot:
            return self._start.next_pass_state(extra)
        return self.render(self._m, self._texts, extra)

    def render(self, m: int, texts: dict[int, str], extra: dict[str, Any] | None) -> dict[str, Any]:
        return self._start.render(m, texts, extra)

    def next_pass_state(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._start.next_pass_state(extra)
