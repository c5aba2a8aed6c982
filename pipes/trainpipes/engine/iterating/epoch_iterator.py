"""The iterator of a pass, and how a worker of a plain ``DataLoader`` that iterates ends: with the process
that started it.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import connection
from time import perf_counter
from typing import Any

from trainpipes._internal.activity import begin_report, end_report
from trainpipes._internal.callers import reading_worker
from trainpipes._internal.locks import start
from trainpipes._internal.messages import warn_once
from trainpipes.engine.iterating.consumer import SERIAL, Consumer, RunOptions
from trainpipes.engine.iterating.epoch_counter import Shared, shared_by_workers
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.iterating.lookahead import Lookahead, items_to_give
from trainpipes.errors import StateError, TopologyError
from trainpipes.state.format import Position

#: Seconds that a worker's end waits for its sending thread.
SENDING = 0.2
#: The name that ``multiprocessing.Queue`` gives that thread.
SENDER = "QueueFeederThread"


def end_in_peace() -> None:
    """In a worker: end with the process that started it, but not before the thread that sends
    batches.

    torch's own worker, when its parent is gone, waits forever until its batches are sent. And where a
    loader is left in mid-epoch, a spawned worker ends before its sending thread, and the C++ runtime
    aborts ("terminate called without an active exception").

    A worker leaves the group of processes it was started in: torchrun sends SIGTERM to the whole group of
    a rank, which may want to finish its step.
    """
    if reading_worker() is not None:
        _register()


@cache
def _register() -> None:
    with suppress(PermissionError):  # it leads a session, and so a group
        os.setpgid(0, 0)
    atexit.register(_leave)
    start(threading.Thread(target=_end_with_parent, name="trainpipes-parent", daemon=True))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:  # not started by multiprocessing
        return
    # The sentinel is a pipe, which other children of the parent may hold open.
    watched: list[Any] = [parent.sentinel]
    with suppress(AttributeError, OSError):  # not on Linux, or not allowed
        watched.append(os.pidfd_open(parent.pid))
    connection.wait(watched)
    os._exit(0)


def _leave() -> None:
    for thread in threading.enumerate():
        if thread.name == SENDER:
            thread.join(SENDING)
            if thread.is_alive():
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # closed, or nobody reads it
                        stream.flush()
                os._exit(0)


class IteratorLock:
    """Held while an iterator makes an item, or gives a state. A second thread that asks for an item
    meanwhile is refused; Ctrl-C does not leave it held.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        #: ``acquire()`` returns at once. These are no methods, which would make each row 5 % slower.
        self.acquire, self.release = partial(lock.acquire, False), lock.release
        self._wait = lock.acquire
        #: Those that take a state, or wait to.
        self._giving: set[object] = set()

    def wait(self, gives_state: bool | None = None) -> bool:
        """Acquire it after a state; raises RuntimeError if an item is being made."""
        if not (self._giving if gives_state is None else gives_state):
            raise RuntimeError(
                "iterator already executing: another thread, or a function of the pipeline's own, takes an "
                "item from it; take items and states in the thread that iterates, and hand them on"
            )
        return self._wait()

    @contextmanager
    def between_items(self) -> Iterator[None]:
        """Held while a state is taken; raises RuntimeError if an item is being made."""
        held, gives_state, who = True, bool(self._giving), object()
        self._giving.add(who)
        try:
            if not self.acquire():
                held = False
                held = self.wait(gives_state)
            yield
        finally:
            if held:
                self.release()
            self._giving.discard(who)


class EpochIterator:
    """One pass over a pipeline, in a training process or in a DataLoader's worker.

    It starts at the first ``next`` or ``state_dict``. Use it from a single thread at a time.
    """

    def __init__(self, iteration: IterationState, options: RunOptions) -> None:
        #: The pass; until it is claimed, as it would be if it was claimed now.
        self._current: Consumer | None = None
        self._iteration = iteration
        iteration.iterators.add(self)
        self._iterator_lock = IteratorLock()
        #: This iterator's own load, and where its state says to start.
        self._own: tuple[int, Position] | None = None
        self._is_claimed = False  # whether the pass is
        self._start = Position(0, 0, 1)  # where it was to start
        self._goes_on = True  # to the next pass, where a state says to start and nothing is left
        #: What gives its items; the same once the first item was given.
        self._items: Iterator[Any] = iter(())
        self._rest: Iterator[Any] | None = None
        self._info = reading_worker()
        self._shared: Shared | None = None  # state that the workers of a pass share
        if self._info is not None and iteration.plan.growing:
            alike = "list_files(refresh) must be left out", "the files of an epoch"
            if not iteration.plan.grows:
                alike = "the version of a table must be named", "the newest one"
            raise TopologyError(
                f"{alike[0]} in workers of a plain DataLoader, which cannot agree on {alike[1]}, got "
                f"{self._info.num_workers} workers; use trainpipes.Loader, which takes any number of "
                "workers, or num_workers=0"
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
                self._current.finish()
            if self._info is not None:
                end_report()
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
            self._current.leave()

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
            if self._current.plan.chain.has_no_end:
                return False
            if not isinstance(self._rest, Lookahead):
                self._rest = Lookahead(self._current)
            begun = perf_counter()
            try:
                return self._rest.is_last()
            finally:  # the loop waits for the batch that this makes
                self._iteration.wait_seconds += perf_counter() - begun

    def last_item(self) -> tuple[int, int]:
        """The pass of the item given last, and its number in it over all ranks; before the first item, one
        less than where it starts.

        >>> import trainpipes as tp
        >>> batches = iter(tp.Loader(tp.from_dataset(range(6)).batch(2)))
        >>> [(batch, batches.last_item()) for batch in batches]
        [([0, 1], (0, 0)), ([2, 3], (0, 1)), ([4, 5], (0, 2))]
        """
        current = self._current
        if current is None:
            with self._iterator_lock.between_items():
                current = self._begin()
        return current.pass_number, current.last_number

    def _hold(self) -> None:
        """Let states stand after the item given last, until the next call or the pass's end."""
        current = self._current
        if current is not None and not current.ended:
            with self._iterator_lock.between_items():
                current.hold()

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
                if self._own[1].reweighed and not self._iteration.plan.chain.endless:
                    raise StateError(
                        "set_weights: shares of this state's mix have changed, and workers of a "
                        "StatefulDataLoader would not know of it in later epochs: load it into "
                        "trainpipes.Loader"
                    )
                self._iteration.passes.set_number(self._shared, self._own[1].pass_number)
            if self._current is not None and self._options.workers is not None:
                self._current.close()
            self._current = self._rest = None
            self._is_claimed = False

    def _go_on_from(self, position: Position) -> None:
        """Go on from a position of the pass at hand that knows of other weights of a mix; what was made ahead
        is made again.
        """
        with self._iterator_lock.between_items():
            self._current = self._consumer(position, None)
            self._items = self._rest = items_to_give(self._current)
            self._iteration.reweigh(position, self._current)

    def _gives(self, consumer: Consumer) -> bool:
        """Whether a consumer gives its items."""
        return self._current is consumer

    def _first(self) -> Any:
        iteration, current = self._iteration, self._begin(claims=True)
        moves = current.pass_number != self._start.pass_number
        try:
            item = next(self._items)
        except StopIteration:
            if not (self._goes_on and current.position.m) or current.others_have_more:
                raise
            # Nothing was left where the state says to start.
            current.finish()
            position = iteration.start_of(iteration.passes.after(current.pass_number))
            iteration.list_files(position)
            current = self._open(position)
            iteration.begin(current)
            moves = current.pass_number != self._start.pass_number
            item = next(self._items)
        if moves:
            iteration.passes.go_on(current.pass_number, self._shared)
        self._rest = self._items
        return item

    def _begin(self, claims: bool = False) -> Consumer:
        """The pass at hand, which is opened once: a pass that can't be opened is not claimed."""
        current, iteration, loaded = self._current, self._iteration, self._own
        if current is not None and self._is_claimed:
            return current
        if self._shared is not None:
            current = self._begin_worker(self._shared)
            self._is_claimed = True
            return current
        coming = iteration.passes.next_pass()
        start = iteration.upcoming() if loaded is None else iteration.loaded(loaded[1])
        if claims:
            iteration.list_files(start)
        if current is None or current.plan.growing or start != self._start:
            current = self._open(start)
        self._start = start
        if claims:
            try:
                self._start = iteration.claim(loaded, (coming, start))
                if self._start != start:  # another iterator has begun that pass meanwhile
                    current = self._open(self._start)
                iteration.begin(current)
            except BaseException:
                if self._start is start and iteration.passes.next_pass() != coming:
                    iteration.last, self._is_claimed = current, True  # Ctrl-C came after the claim
                raise
            self._is_claimed = True
        return current

    def _open(self, position: Position, origin: int | None = None) -> Consumer:
        current = self._consumer(position, origin)
        # All workers of a rank begin the next pass together, asked or not.
        if self._goes_on and current.begins_at_end:
            passes = self._iteration.passes
            current = self._consumer(self._iteration.start_of(passes.after(position.pass_number)))
        self._current, self._items = current, items_to_give(current)
        return current

    def _consumer(self, position: Position, origin: int | None = None) -> Consumer:
        iteration = self._iteration
        return Consumer(
            iteration.plan_of(position),
            iteration.topology(),
            position,
            origin=origin,
            options=self._options,
            between_items=self._iterator_lock.between_items,
            after=iteration.passes.after,
        )

    def _begin_worker(self, shared: Shared) -> Consumer:
        iteration, loaded = self._iteration, self._own
        begin_report(iteration.passes.profile)
        placing = iteration.plan.chain.device_stages
        if placing:
            warn_once(
                f"{placing[0]} runs in the process that trains, not in a worker of a plain "
                "DataLoader: pass pin_memory=True to the DataLoader, or use trainpipes.Loader"
            )
        if loaded is None:
            self._start = iteration.start(*iteration.passes.join(shared))
            return self._open(self._start)
        position, topology = iteration.loaded(loaded[1]), iteration.topology()
        turn = json.loads(position.extra.get("turn", "{}"))
        saved = turn.get("worker", topology.worker), turn.get("num_workers", topology.num_workers)
        if saved != (topology.worker, topology.num_workers):
            raise StateError(
                f"this state is of worker {saved[0]} of {saved[1]}, loaded in "
                f"worker {topology.worker} of {topology.num_workers}: a StatefulDataLoader resumes with "
                "the number of workers it was saved with; trainpipes.Loader takes any"
            )
        self._start, self._goes_on = position, False
        return self._open(position, turn.get("origin"))
