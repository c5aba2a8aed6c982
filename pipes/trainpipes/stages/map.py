from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY
from functools import partial
from multiprocessing import get_all_start_methods
from typing import Any, ClassVar, Literal, Self
from weakref import finalize

from trainpipes._internal.checks import Function, Natural, Schema, Seed
from trainpipes._internal.messages import warn_once
from trainpipes.columns.run import Run
from trainpipes.engine.calling.process_map import ProcessMap
from trainpipes.engine.calling.row_call import Answer, RowCall, RowKey, ThreadMap, Words, words_of
from trainpipes.engine.layout import random_key
from trainpipes.kinds.blame import blame
from trainpipes.kinds.global_draws import DrawWatch
from trainpipes.kinds.stage import Stage, made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.storage.caching.contents import digest_of

COLUMNS = (
    "map() calls the function for one row; map_batches(fn) calls it with the columns of many and replaces "
    "them, with_columns(fn) adds columns to those that are there, as the map of Hugging Face's datasets does"
)

Kind = Literal["thread", "process"]
StartMethod = Literal["forkserver", "spawn", "fork"]

#: Rows that a worker is given at a time, at most. Fewer cost more messages; more wait longer for the last.
CHUNK_ROWS = 64
#: Chunks of a run for each worker, about. More even out rows of unequal cost.
CHUNKS = 2


class Map(RunStage):
    """Apply a function to each row; after ``batch`` to each batch.

    With ``rng=True`` the function gets a ``numpy.random.Generator`` too: the same for the same row
    in the same epoch, on any number of ranks and workers. A batch has that of its rows, a packed
    row that of its first token. For torch:
    ``torch.Generator().manual_seed(int(rng.integers(2**63)))``.

    With ``num_workers`` several threads or processes call the function ahead of use; rows, order
    and draws stay the same. ``map_batches`` is faster for what Arrow or NumPy can do.

    Args:
        fn: function of one item; with ``rng=True`` of an item and a generator. It must not return
            None.
        rng: give the function a generator.
        seed: for the generators.
        version: names the function in checkpoints instead of its module and name; change it when
            the function changes.
        num_workers: threads or processes that call it; 0 for the thread that iterates.
        thread_safe: whether several threads may call the function at once. Otherwise only the
            thread that iterates calls it.
        method: "thread", for a thread-safe function; or "process": function, items and results must
            pickle.
        schema: Arrow types of the columns that it returns, as a ``pyarrow.Schema``. Left out, they
            are found from the first rows when a stage needs columns.
        start_method: how processes start: "forkserver", "spawn" or "fork"; by default the first
            that the platform has. A fork copies locks that threads hold, and may hang.

    Raises:
        WorkerError: a worker process died; names the row that it worked on.
        ConfigError: the function or an item does not pickle.
        DataError: the function returned None, or a value that does not pickle.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).map(lambda x: x * 10))
    [0, 10, 20]
    >>> noisy = tp.from_iterable(lambda: range(3)).map(lambda x, rng: x + rng.integers(100), rng=True)
    >>> [int(x) for x in noisy], [int(x) for x in noisy]
    ([91, 77, 7], [84, 38, 96])
    """

    per_row = True
    makes_objects = True
    versioned = "fn"
    free = frozenset({"num_workers", "method", "start_method", "schema", "thread_safe"})
    elsewhere = dict.fromkeys(("batched", "batch_size"), COLUMNS) | {
        "num_proc": "use num_workers=..., method='process'",
        "remove_columns": "map() replaces the row; drop_columns() leaves columns out",
        "with_indices": "enumerate() adds the row's number as a column",
    }

    draws_by = (
        "pass rng=True, and the function is called as fn(row, rng), with a generator that is made anew for "
        "each row"
    )

    fn: Function
    _: KW_ONLY
    rng: bool = False
    seed: Seed = 0
    version: str | None = None
    num_workers: Natural = 0
    method: Kind = "thread"
    start_method: StartMethod | None = None
    schema: Schema | None = None
    thread_safe: bool = False

    def check(self) -> None:
        there = get_all_start_methods()
        self._require(self.start_method in (None, *there), "start_method", f"one of {there} here")

    @property
    def by_row(self) -> bool:  # type: ignore[override]
        return self.rng

    @property
    def by_epoch(self) -> bool:  # type: ignore[override]
        return self.rng

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        if not self.rng:  # a seed that nothing is drawn with
            del found["rng"], found["seed"]
        return found

    _turn = 0  # which one it is of several alike
    _watch: ClassVar[DrawWatch | None] = None  # of the stage that it is part of, if it is
    _said: ClassVar[str] = ""  # as that stage prints

    def resolve(self, below: Sequence[Stage]) -> Self:
        return self.resolved(_turn=same_below(self, below))

    def __repr__(self) -> str:
        return self._said or super().__repr__()

    @made_once
    def _draw_watch(self) -> DrawWatch:
        if self._watch is not None:
            return self._watch
        cure = "draw from the generator that rng=True gives it" if self.rng else self.draws_by
        return DrawWatch(self.fn, str(self), cure)

    @property
    def runs_user_code(self) -> bool:
        # With workers the function is called elsewhere, so that any thread may wait for it.
        return not (self.has_workers or self.thread_safe)

    @property
    def has_workers(self) -> bool:
        return self.num_workers > 0 and not self.alone

    @property
    def alone(self) -> bool:
        """Whether this process may not have the workers that are asked for."""
        return self.method == "process" and multiprocessing.current_process().daemon

    @made_once
    def _calls(self) -> Calls:
        return Calls(self, key_of(self, self._turn) if self.rng else None, self._draw_watch)

    def settle(self, threads: int) -> None:
        workers = self._calls.workers()
        if isinstance(workers, ProcessMap):
            workers.start()

    def process(self, run: Run) -> Run:
        rest = self.submit_run(run)
        return self._with(run, self._calls.here(run)) if rest is None else rest()

    def submit_run(self, run: Run) -> Callable[[], Run] | None:
        wait = self._calls.submit(run)
        return None if wait is None else lambda: self._with(run, wait())

    def _with(self, run: Run, answer: Answer) -> Run:
        results, error = answer
        if error is not None:
            ids = run.row_ids(len(results))
            blame(error, self, int(ids[0]) if len(ids) else None)
            raise error
        if run.items is None and run.bounds is None:
            return run.with_block(run.block.with_data(results))
        return run.with_items(results)


class Calls:
    def __init__(self, stage: Map, key: RowKey | None, watch: DrawWatch) -> None:
        self._stage = stage.fresh()  # a copy: workers end when nobody refers to the stage
        self._call = RowCall(stage.fn, key, str(stage), watch)
        self._workers: ThreadMap | ProcessMap | None = None
        self._lock = threading.Lock()

    def here(self, run: Run) -> Answer:
        """Call the function for each item in this thread; one thread at a time unless thread-safe."""
        with nullcontext() if self._stage.thread_safe else self._lock:
            return self._call.each(run.unroll(), self._words(run))

    def submit(self, run: Run) -> Callable[[], Answer] | None:
        workers = self.workers()
        if workers is None:
            return None
        items, words = run.unroll(), self._words(run)
        rows = min(CHUNK_ROWS, max(1, -(-len(items) // (CHUNKS * self._stage.num_workers))))
        waits = [
            workers.submit(items[n : n + rows], None if words is None else words[n : n + rows])
            for n in range(0, len(items), rows)
        ]
        return partial(joined, waits)

    def _words(self, run: Run) -> Words | None:
        return words_of(run) if self._stage.rng else None

    def workers(self) -> ThreadMap | ProcessMap | None:
        stage = self._stage
        if not stage.num_workers:
            return None
        if stage.alone:
            way = 'use method="thread", or the workers of map() without those of a DataLoader'
            warn_once(
                f"{stage}: a worker process may not start others, so that the function is called in this "
                f"one: {way}"
            )
            return None
        with self._lock:
            if self._workers is None or self._workers.pid != os.getpid():
                if stage.method == "process":
                    self._workers = ProcessMap(self._call, stage.num_workers, stage.start_method)
                else:
                    self._workers = ThreadMap(self._call, stage.num_workers)
                finalize(self, self._workers.close).atexit = False
            return self._workers


def joined(waits: list[Callable[[], Answer]]) -> Answer:
    results: list[Any] = []
    for wait in waits:
        found, error = wait()
        results += found
        if error is not None:
            return results, error
    return results, None


def key_of(stage: Stage, turn: int) -> RowKey:
    name = digest_of(stage.identity()["fn"])
    return RowKey(random_key(stage.options["seed"], stage.name, name, turn))


def same_below(stage: Stage, below: Sequence[Stage]) -> int:
    identity = json.dumps(stage.identity())
    return sum(
        type(other) is type(stage) and json.dumps(other.identity()) == identity for other in below
    )
