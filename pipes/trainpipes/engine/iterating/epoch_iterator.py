from __future__ import annotations

import json
from time import perf_counter
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes._internal.messages import warn_once
from trainpipes.engine.iterating.epoch_counter import Shared, shared_by_workers
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.iterating.lookahead import Lookahead
from trainpipes.engine.iterating.one_pass import IteratorLock, OnePass
from trainpipes.engine.iterating.worker_end import end_in_peace
from trainpipes.engine.iterating.worker_iterator import SERIAL, RunOptions
from trainpipes.errors import StateError, TopologyError
from trainpipes.state.format import Position


class EpochIterator:
    """One pass over a pipeline, in a training process or in a DataLoader's worker.

    It starts at the first ``next`` or ``state_dict``. Use it from one thread at a time.
    """

    def __init__(self, iteration: IterationState, options: RunOptions) -> None:
        #: The pass; until it is claimed, as it would be if it was claimed now.
        self._current: OnePass | None = None
        self._iteration = iteration
        self._iterator_lock = IteratorLock()
        #: This iterator's own load, and where its state says to start.
        self._own: tuple[int, Position] | None = None
        self._is_taken = False  # whether the pass is claimed
        #: What gives its items after the first one.
        self._rest: Lookahead | None = None
        self._info = get_worker_info()
        self._shared: Shared | None = None  # what the workers of a pass have in common
        if self._info is not None and iteration.plan.grows:
            raise TopologyError(
                "list_files(refresh) must be left out in workers of a plain DataLoader, which cannot agree "
                f"on the files of an epoch, got {self._info.num_workers} workers; use trainpipes.Loader, "
                "which takes any number of workers, or num_workers=0"
            )
        end_in_peace()
        #: How items are made.
        self._options = options if self._info is None else SERIAL
        if self._info is None:
            iteration.passes.begin_here()
        else:
            self._shared = shared_by_workers(self._info, iteration.iterated)
            iteration.iterated += 1

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        lock, held = self._iterator_lock, True
        try:
            if not lock.acquire():
                held = False
                held = lock.wait()
            rest, begun = self._rest, perf_counter()
            item = self._first() if rest is None else next(rest)
            if self._info is None:
                iteration = self._iteration
                iteration.last = self._current
                iteration.wait_seconds += perf_counter() - begun
        except StopIteration:
            if self._current is not None:
                self._current.end()
            raise
        finally:
            if held:
                lock.release()
        return item

    def __reduce__(self) -> Any:
        raise TypeError(
            "an iterator of a pipeline can be neither copied nor pickled: begin another one with "
            "iter(pipe), and give it the state_dict() of this one by load_state_dict()"
        )

    def __del__(self) -> None:
        if self._current is not None:
            self._current.left = True
            if self._options.workers is not None:
                self._current.close()  # its workers go with it

    def is_last(self) -> bool:
        """Whether the last item given ends this pass, for loops that accumulate gradients. May make
        and keep the next item; the state does not move. Never true under an endless ``repeat``.

        >>> import trainpipes as tp
        >>> batches = iter(tp.Loader(tp.from_dataset(range(5)).filter(lambda x: x < 3).batch(2)))
        >>> [(batch, batches.is_last()) for batch in batches]
        [([0, 1], False), ([2], True)]
        """
        if self._rest is None or self._current is None:  # none was given
            return False
        with self._iterator_lock.between_items():
            return self._current.is_last()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item given: a flat dict of integers and strings."""
        with self._iterator_lock.between_items():
            current = self._begin()
        return current.state(turn=self._info is not None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            StateError: it does not fit the pipeline.
        """
        with self._iterator_lock.between_items():
            if self._shared is None:
                self._own = self._iteration.place(state)
            else:
                self._own = 0, self._iteration.parse(state)
                self._iteration.passes.set_number(self._shared, self._own[1].epoch)
            if self._current is not None and self._options.workers is not None:
                self._current.close()
            self._current = self._rest = None
            self._is_taken = False

    def _first(self) -> Any:
        iteration = self._iteration
        current = self._begin()
        if not self._is_taken:  # what can't be begun was not claimed
            self._current = current = self._begun(iteration.claim(self._own))
        self._is_taken = True
        try:
            item = next(current)
        except StopIteration:
            if not (current.position.m and iteration.plan.grows):
                raise
            # There was nothing left of it, and the next epoch has its own files.
            number = iteration.passes.after(current.epoch)
            iteration.passes.go_on(number, None)
            self._current = current = self._begun(iteration.start_of(number))
            item = next(current)
        if current.epoch != current.position.epoch:  # there was nothing left of it
            iteration.passes.go_on(current.epoch, self._shared)
        self._rest = current.items
        return item

    def _begun(self, position: Position) -> OnePass:
        iteration = self._iteration
        iteration.list_files(position)
        current = self._open(position)
        iteration.begun.add(current)
        iteration.last = current
        return current

    def _begin(self) -> OnePass:
        if self._is_taken and self._current is not None:
            return self._current
        iteration, own = self._iteration, self._own
        if self._shared is not None:
            self._current = self._begin_worker(self._shared)
            self._is_taken = True
        else:
            start = iteration.upcoming() if own is None else iteration.loaded(own[1])
            self._current = self._open(start)
        return self._current

    def _open(self, position: Position, origin: int | None = None, go_on: bool = True) -> OnePass:
        iteration = self._iteration
        plan = iteration.plan_of(position)
        return OnePass(
            plan,
            iteration.topology(),
            position,
            origin=origin,
            go_on=go_on and not plan.grows,
            options=self._options,
            iterator_lock=self._iterator_lock,
            after=iteration.passes.after,
        )

    def _begin_worker(self, shared: Shared) -> OnePass:
        iteration, own = self._iteration, self._own
        placing = iteration.plan.chain.device_stages
        if placing:
            warn_once(
                f"{placing[0]} runs in the process that trains, not in a worker of a plain "
                "DataLoader: pass pin_memory=True to the DataLoader, or use trainpipes.Loader"
            )
        if own is None:
            return self._open(iteration.start(*iteration.passes.join(shared)))
        position, topology = iteration.loaded(own[1]), iteration.topology()
        turn = json.loads(position.extra.get("turn", "{}"))
        saved = turn.get("worker", topology.worker), turn.get("num_workers", topology.num_workers)
        if saved != (topology.worker, topology.num_workers):
            raise StateError(
                f"this state is of worker {saved[0]} of {saved[1]}, loaded in "
                f"worker {topology.worker} of {topology.num_workers}: a StatefulDataLoader resumes with "
                "the number of workers it was saved with; trainpipes.Loader takes any"
            )
        return self._open(position, turn.get("origin"), go_on=False)
