"""``WorkQueue``: the items of a loader, handed out and done in any order, each exactly once an epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any
from weakref import finalize

from trainpipes._internal.checks import is_finite, require, whole_number
from trainpipes._internal.locks import TICK, Bell, InterruptibleLock
from trainpipes._internal.pool import Future, Pool
from trainpipes.loader import Loader
from trainpipes.loader.work_items import InFlight, Work, WorkItems
from trainpipes.state.work import WorkKey, read_work, render_work

log = logging.getLogger("trainpipes")

__all__ = ["Work", "WorkQueue"]


#: Items that may be read after the oldest that is in flight: so many, or 4 for each that may be in flight.
#: With 100,000 in flight, anywhere among 500,000, a state takes less than 64 KB.
REACH = 500_000
#: Seconds after which a thread that waits says what for; and where all was handed out, which the thread that
#: waits may hold itself.
PATIENCE, AT_THE_END = 60.0, 5.0
#: Seconds until a thread that waits looks whether it was forgotten.
LOOK = 1.0


@dataclass(slots=True)
class Patience:
    """Of a wait for an item: since when, and when a warning of it is due.

    Args:
        begun: None until there was something to wait for.
    """

    begun: float | None = None
    ends: float = inf


class WorkQueue:
    """Hands out the items of a loader to any number of threads, which finish them in any order.

    Iterate over it, or call ``get``; mark each item by ``done``, ``again`` or ``retire``. The state knows
    what is done and what is not: after ``load_state_dict`` items that were not done come first, in their
    order, and no item that was done comes again in its epoch. An iteration ends when all is done.

    Args:
        loader: a ``Loader`` of rows or batches, which the queue alone iterates. On several ranks its
            pipeline needs ``.sharding_filter(tail="uneven")``, so that no rank leaves items out.
        max_in_flight: items that are handed out and not done, at most. The queue also waits for an item
            after which 500,000 were read, or 4 times ``max_in_flight``.
        epochs: after which it ends; None for no end. It ends before where all rows are retired, for which it
            takes 16 epochs that have none.
        by: a column that names a row in all epochs, for ``retire``. Without it all values of the
            item do, whose arrays must not be changed in place then.

    Raises:
        ConfigError: an option is out of range, or the pipeline does not fit.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"x": 10}, {"x": 20}, {"x": 30}])
    >>> queue = tp.WorkQueue(tp.Loader(rows))
    >>> first, second = queue.get(), queue.get()
    >>> queue.done(second.key)
    >>> resumed = tp.WorkQueue(tp.Loader(rows))
    >>> resumed.load_state_dict(queue.state_dict())
    >>> for work in resumed:
    ...     print(work.key, work.item)
    ...     resumed.done(work.key)
    WorkKey(epoch=0, place=0) {'x': 10}
    WorkKey(epoch=0, place=2) {'x': 30}
    """

    def __init__(
        self,
        loader: Loader,
        *,
        max_in_flight: int = 1024,
        epochs: int | None = 1,
        by: str | None = None,
    ) -> None:
        way = "write WorkQueue(tp.Loader(pipe))"
        require(isinstance(loader, Loader), "WorkQueue(loader)", "a trainpipes Loader", loader, way)
        most = whole_number(max_in_flight, 1, "WorkQueue(max_in_flight)", "items")
        if epochs is not None:
            whole_number(epochs, 1, "WorkQueue(epochs)", "passes over the data")
        require(by is None or isinstance(by, str), "WorkQueue(by)", "the name of a column", by)
        self.loader = loader
        self._items = WorkItems(loader, epochs, by)
        self._flight = InFlight(most, max(REACH, 4 * most))
        #: Guards all else; waiting threads are woken when any of it changes.
        self._lock = InterruptibleLock()
        self._changed = Bell()
        self._reading = self._closed = False
        self._thread: Pool | None = None  # in which async iterations wait

    # Work

    def get(self, timeout: float | None = None) -> Work | None:
        """The next item; None if all is done, or the queue is closed.

        Waits where as many are in flight as may be, and at the end until those are done that others
        have: they may come again.

        Args:
            timeout: seconds to wait for others; None waits as long as it takes, and warns of what it waits
                for, each minute, and at the end after 5 seconds.

        Raises:
            TimeoutError: nothing came in time.
            ConfigError: ``timeout`` is no number from 0 on.
            TrainpipesError: the loader's error. Nothing is lost: the next call reads on at the same
                item.
        """
        good = timeout in (None, inf) or (is_finite(timeout) and timeout >= 0)
        require(good, "WorkQueue.get(timeout)", "seconds, from 0 on, or None", timeout)
        taken: list[Work] = []
        try:
            work = self._get(timeout, taken, Patience())
        except BaseException:
            with self._lock:
                for lost in taken:
                    self._flight.not_handed_out(lost)
                    self._wake()
            raise
        return work

    def _get(self, timeout: float | None, taken: list[Work], patience: Patience) -> Work | None:
        """What ``get`` returns, which ``taken`` has from the moment that it counts as handed out."""
        end: float | None = None
        items, flight = self._items, self._flight
        while True:
            with self._lock:
                while not self._closed:
                    if self._take_again(taken):
                        return taken[0]._handed_out()
                    if self._reading or items.ended or not flight.has_room(items.count):
                        break
                    if self._read(taken):
                        return taken[0]._handed_out()
                if self._closed or (items.ended and not flight):
                    self._changed.ring()
                    return None
                now = monotonic()
                if patience.begun is None:
                    patience.begun = now
                    patience.ends = now + (AT_THE_END if items.ended else PATIENCE)
                if end is None:
                    end = inf if timeout is None else now + timeout
                if now >= end:
                    raise TimeoutError(f"WorkQueue.get(timeout={timeout:g}): {self._waits_for()}")
                if now >= patience.ends:
                    waited = now - patience.begun
                    log.warning("WorkQueue.get() waits for %.0f s: %s", waited, self._waits_for())
                    patience.ends = now + PATIENCE
                sleeper = self._changed.sleeper()
            if not sleeper.acquire(timeout=min(end, patience.ends, now + LOOK) - now):
                with self._lock:
                    self._changed.forget(sleeper)

    def __iter__(self) -> Iterator[Work]:
        while (work := self.get()) is not None:
            yield work

    async def __aiter__(self) -> AsyncIterator[Work]:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = Pool(1, shares=False, name="trainpipes-work-queue", pauses=False)
            finalize(self, self._thread.close)
        patience = Patience()
        while True:
            waiting = loop.create_future()
            tell = partial(self._tell, loop, waiting)
            got = Future(partial(self._get_or_wait, patience), tell)
            self._thread.begin(got)
            try:
                work = await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():  # it came, and nobody has seen it
                    self._take_back(got)
                raise
            if work is None:
                return
            if isinstance(work, Work):
                patience = Patience()
                yield work

    def _get_or_wait(self, patience: Patience) -> Work | str | None:
        try:
            return self._get(LOOK, [], patience)  # a thread ends soon after the loop
        except TimeoutError:
            return "waits"

    def _tell(
        self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any], got: Future
    ) -> None:
        def tell() -> None:
            if waiting.cancelled():
                self._take_back(got)
            elif got.error is not None:
                waiting.set_exception(got.error)
            else:
                waiting.set_result(got.result())

        try:
            loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop was closed
            self._take_back(got)

    def _take_back(self, got: Future) -> None:
        work = None if got.error is not None else got.result()
        if isinstance(work, Work):
            self.again(work.key)

    def done(self, key: WorkKey) -> None:
        """An item is trained on, or written: it does not come again in its epoch.

        Raises:
            ConfigError: no such item is in flight.
        """
        with self._lock:
            self._finish(self._flight.known("done", key, self._items.newest))

    def again(self, key: WorkKey) -> None:
        """An item failed, or is stale: it is handed out again, next.

        Raises:
            ConfigError: no such item is in flight, or it waits for that already.
        """
        with self._lock:
            self._flight.give_back(self._flight.known("again", key, self._items.newest))
            self._wake()

    def retire(self, key: WorkKey) -> None:
        """An item is done, and its row is not handed out in later epochs, either.

        A queue for each rank retires for itself, until states are merged by ``merge_states`` and loaded.

        Raises:
            ConfigError: no such item is in flight, or it is a batch.
            SchemaError: the item has no column ``by``, or it holds values that name no row.
        """
        with self._lock:
            key = self._flight.known("retire", key, self._items.newest)
            self._items.retire(self._flight.item(key))
            self._finish(key)

    def close(self) -> None:
        """End all iterations, also those that wait. The state stays; items in flight can be marked."""
        with self._lock:
            self._closed = True
            self._changed.ring()

    @property
    def in_flight(self) -> int:
        """Items that are handed out and not done, those included that wait to come again."""
        return len(self._flight)

    def __repr__(self) -> str:
        return f"WorkQueue({self.in_flight} of {self._flight.most} in flight) over\n{self.loader!r}"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a WorkQueue can be neither copied nor pickled: begin one in each process that reads, "
            "WorkQueue(loader), and hand other processes the items"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is done, and where the loader begins for what is not: a flat dict of integers and strings.
        Can be called at any time, from any thread.
        """
        with self._lock:
            rests = not self._flight and not self._reading
            work = self._items.state(self._flight, rests)
        return render_work(work)

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Go on where a state was taken, on any number of ranks. What is in flight is forgotten.

        Args:
            state: of this queue's pipeline; on another number of ranks, that of all ranks merged.
            allow_changes: as for ``Loader.load_state_dict``, for a state in which nothing was in flight.

        Raises:
            StateError: it does not fit.
        """
        loaded = read_work(state)
        while True:
            with self._lock:
                if not self._reading:
                    self._items.load(loaded, allow_changes)
                    self._flight.clear()
                    self._changed.ring()
                    return
            sleep(TICK)

    # Within: the lock is held

    def _take_again(self, taken: list[Work]) -> bool:
        while (work := self._flight.next_again) is not None:
            if not self._items.is_retired(work.item):
                taken.append(work)
                self._flight.take_again(work)
                return True
            self._finish(work.key)
        return False

    def _read(self, taken: list[Work]) -> bool:
        """Read the next item; whether it is to be handed out. Others may mark items while it is read."""
        before, work = self._items.standing(), None
        self._reading = True
        try:
            try:
                self._lock.release()
                key, item, state = self._items.read()
            finally:
                raised = None  # Ctrl-C comes after the lock is held, which get() releases
                while True:
                    try:
                        self._lock.acquire()
                        break
                    except BaseException as error:
                        raised = error
                        with suppress(RuntimeError):  # it was not acquired
                            self._lock.release()
                if raised is not None:
                    raise raised
            if not self._items.take(key, item, state):
                return False
            work = Work(key, item)
            taken.append(work)
            self._flight.add(work, self._items.count)
            return True
        except BaseException:
            if work is None or work.key not in self._flight:
                self._items.open_again(before)
            raise
        finally:
            self._reading = False
            self._wake()

    def _finish(self, key: WorkKey) -> None:
        self._flight.remove(key)
        self._items.forget(self._flight.oldest)
        self._wake()

    def _waits_for(self) -> str:
        if not self._flight:
            return "another thread reads"
        state = "all was handed out" if self._items.ended else "no more may be handed out"
        return (
            f"{state} until items are marked by done() or again(): {self._flight.waits_for()}; a thread that "
            "holds some itself marks them first, or asks by get(timeout=...)"
        )

    def _wake(self) -> None:
        every = self._items.ended and not self._flight
        self._changed.ring(None if every else 1)
