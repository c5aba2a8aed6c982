from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY
from multiprocessing import get_all_start_methods
from typing import Any, Literal, Self
from weakref import finalize

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import Function, Natural, Returning, Schema, Seed
from trainpipes._internal.locks import ForkLock
from trainpipes._internal.messages import warn_once
from trainpipes.columns.block import BadCell, Block, first_bad
from trainpipes.columns.columns import from_columns, table_of, untyped_columns
from trainpipes.columns.run import Run, unplaced
from trainpipes.engine.calling import Answer, RowCall, RowKey, ThreadMap, words_of
from trainpipes.engine.planning.column_types import ColumnTypes, is_of_rows
from trainpipes.engine.processes.executor_options import AnExecutor, as_options, executor_of
from trainpipes.engine.processes.executors import Executor, Processes, Threads
from trainpipes.engine.processes.worker_pool import WorkerPool
from trainpipes.errors import DataError, SchemaError, TrainpipesError
from trainpipes.interfaces.contents import digest_of
from trainpipes.interfaces.options import DRAWS
from trainpipes.interfaces.quarantine import NOT_OF_ROWS, CallsFunction, Failed, OnBadRow
from trainpipes.interfaces.read_columns import at_row, blame, refused
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import RunStage, WorkingStage
from trainpipes.interfaces.watched_calls import DrawWatch, at_work_of
from trainpipes.order.permutation import random_key
from trainpipes.stages.columns import columns_as, with_column

#: Rows that a worker is given at a time, at most. Fewer cost more messages; more wait longer for the last.
CHUNK_ROWS = 64
#: Chunks of a run for each worker, about. More even out rows of unequal cost.
CHUNKS = 2


class _Running:
    """Where a stage's function is called in this process, and the workers there once they are made."""

    def __init__(self, executor: Executor | None) -> None:
        self.executor, self.lock = executor, ForkLock()
        self.pool: ThreadMap | WorkerPool | None = None


class RowFunction(WorkingStage, per_row=True, gives="objects"):
    """A stage that calls a function for each row, perhaps in workers."""

    rng = True
    seed = 0
    num_workers = 0
    shares = False  # whether threads that wait for its own may call it, too

    @property
    def _executor(self) -> Executor | None:
        """Where the function is called; None for the thread that iterates."""
        return Processes(self.num_workers) if self.num_workers else None

    @property
    def timeout(self) -> float | None:
        return None

    _turn = 0  # its number among equal stages

    def _resolve(self, below: Sequence[Stage]) -> Self:
        identity = json.dumps(self.identity())
        alike = (s for s in below if type(s) is type(self) and json.dumps(s.identity()) == identity)
        return self._resolved(_turn=sum(1 for _ in alike))

    @property
    def function(self) -> tuple[Callable[..., Any], Any]:
        """The function, and its name, on which draws depend. It must not hold the stage,
        which closes its workers when it is gone.
        """
        raise NotImplementedError

    @property
    def _runs_user_code(self) -> bool:
        # With workers the function is called elsewhere, so that any thread may wait for it.
        return not (self.has_workers or self.thread_safe)

    @property
    def has_workers(self) -> bool:
        return self._running.executor is not None and not self.alone

    @property
    def most_workers(self) -> int:
        # None, too, where another iterator has settled on no threads meanwhile.
        executor = self._running.executor
        return 1 if executor is None else executor.workers

    @property
    def alone(self) -> bool:
        """Whether this process may not have the workers that are asked for."""
        threads = isinstance(self._running.executor, Threads)
        return not threads and multiprocessing.current_process().daemon

    @made_once
    def _call(self) -> RowCall:
        fn, name = self.function
        key = random_key(self.seed, "map", digest_of(name), self._turn)
        return RowCall(fn, RowKey(key) if self.rng else None, str(self), self._draw_watch)

    @made_once
    def _running(self) -> _Running:
        return _Running(self._executor)

    def _workers(self) -> ThreadMap | WorkerPool | None:
        running = self._running
        executor = running.executor
        if executor is None:
            return None
        if self.alone:
            way = 'use method="thread", or the workers of map() without those of a DataLoader'
            why = "a worker process may not start others, so the function is called in this one"
            warn_once(f"{self}: {why}: {way}")
            return None
        with running.lock:
            workers = running.pool
            if workers is None or workers.pid != os.getpid():
                workers = executor._answering(self._call, timeout=self.timeout, shares=self.shares)
                running.pool = workers
                finalize(self, workers.close).atexit = False
            return workers

    def _settle(self, threads: int) -> None:
        workers = self._workers()
        if isinstance(workers, WorkerPool):
            workers.start()

    def process(self, run: Run) -> Run:
        rest = self.submit_run(run)
        if rest is not None:
            return rest()
        with nullcontext() if self.thread_safe else self._running.lock:
            at_work = at_work_of(self)
            rows = None if at_work is None else run.first_ids()
            answer = self._call.each(self._items(run), self._words(run), rows, at_work)
            return self._with(run, answer)

    def submit_run(self, run: Run) -> Callable[[], Run] | None:
        workers = self._workers()
        if workers is None:
            return None
        items, words = self._items(run), self._words(run)
        share = -(-len(items) // (CHUNKS * self.most_workers))
        rows = min(CHUNK_ROWS, max(1, share, workers.least_rows))
        parts = [slice(n, n + rows) for n in range(0, len(items), rows)]
        waits = [workers.submit(items[p], None if words is None else words[p]) for p in parts]
        return lambda: self._with(run, joined(waits))

    def _items(self, run: Run) -> Sequence[Any]:
        return run.unroll_copies()

    def _words(self, run: Run) -> Any:
        return words_of(run) if self.rng else None

    def _with(self, run: Run, answer: Answer) -> Run:
        results, error = answer
        if error is not None:
            ids = run.row_ids(len(results))
            blame(error, self, int(ids[0]) if len(ids) else None)
            raise error
        if run.items is None and run.bounds is None:
            return run.with_block(run.block.with_data(results))
        return run.with_items(results)


class Map(CallsFunction, RowFunction, versioned="fn"):
    """Apply a function to each row; after ``batch`` to each batch.

    With ``rng=True`` the function gets a ``numpy.random.Generator`` too: the same for the same row
    in the same epoch, on any number of ranks and workers. A batch has that of its rows, a packed
    row that of its first token. For torch:
    ``torch.Generator().manual_seed(int(rng.integers(2**63)))``.

    With ``num_workers`` several threads or processes call the function ahead of use; rows, order
    and draws stay the same. ``map_batches`` is faster for work that Arrow or NumPy can do.

    Args:
        fn: function of an item; with ``rng=True`` of an item and a generator. It must not return
            None, nor the same array or tensor with other values: several calls come before use. It may
            change a dict or list that it gets, but not what that holds, which a dataset may keep.
        rng: give the function a generator.
        seed: for the generators.
        version: names the function in checkpoints instead of its module and name; change it when
            the function changes.
        num_workers: threads or processes that call it; 0 for the thread that iterates.
        thread_safe: whether several threads may call the function at once. Otherwise only the
            thread that iterates calls it.
        on_error: for a row of which the function raises: "raise"; or "skip" the row, count and log
            it; or list it, too, with ``Quarantine``. Errors that are about no row
            (``ConnectionError``, ``TimeoutError``, ``ImportError``, ``MemoryError``) stop the run.
        method: "thread", for a thread-safe function; or "process": function, items and results must
            pickle.
        schema: Arrow types of the columns that it returns, as a ``pyarrow.Schema``. Left out, they
            are found from the first rows when a stage needs columns.
        executor: where the function is called, in place of ``num_workers`` and ``method``: ``tp.Threads(n)``,
            ``tp.Processes(n)``, or ``tp.Ray(...)`` for the machines of a Ray cluster.
        timeout: with processes, the seconds that a call may take, at least: then its worker is killed, and
            another process tries the row once more. A second time the row is a ``WorkerError``, or left out.
        start_method: how processes start: "forkserver", "spawn" or "fork"; by default the first
            that the platform has. A fork copies locks that threads hold, and may hang.

    Raises:
        WorkerError: three worker processes died at one row, which it names. A process that dies otherwise is
            replaced, and its rows are done again: the function must not mind.
        ConfigError: the function or an item does not pickle.
        DataError: the function returned None, or a value that does not pickle.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).map(lambda x: x * 10))
    [0, 10, 20]
    >>> noisy = tp.from_iterable(lambda: range(3)).map(lambda x, rng: x + rng.integers(100), rng=True)
    >>> [int(x) for x in noisy], [int(x) for x in noisy]
    ([91, 77, 7], [84, 38, 96])
    """

    free = frozenset(
        {"num_workers", "method", "start_method", "executor", "timeout", "schema", "thread_safe"}
    )

    fn: Returning
    _: KW_ONLY
    rng: bool = False
    seed: Seed = 0
    version: str | None = None
    num_workers: Natural = 0
    method: Literal["thread", "process"] = "thread"
    start_method: Literal["forkserver", "spawn", "fork"] | None = None
    executor: AnExecutor | None = None
    timeout: float | None = None
    schema: Schema | None = None
    thread_safe: bool = False
    on_error: OnBadRow = "raise"

    def check(self) -> None:
        there = get_all_start_methods()
        self._require(self.start_method in (None, *there), "start_method", f"one of {there} here")
        if self.executor is not None:
            short = {"num_workers": 0, "method": "thread", "start_method": None}
            given = [name for name, usual in short.items() if getattr(self, name) != usual]
            self._require(not given, "executor", f"None where {' and '.join(given)} is given")
            self._set(**as_options(executor_of(self.executor, "map(executor)")))
        if self.timeout is not None:
            good = isinstance(self.timeout, int | float) and self.timeout > 0
            self._require(good, "timeout", "more than 0 seconds")
            way = 'method="process", since a thread cannot be ended'
            is_process = self.method == "process" or self.executor is not None
            self._require(is_process, "method", f"{way}, where timeout is given")
            has_one = self.executor is not None or self.num_workers > 0
            self._require(has_one, "num_workers", "1 or more where timeout is given")

    @property
    def _executor(self) -> Executor | None:
        if self.executor is not None or not self.num_workers:
            assert not isinstance(self.executor, str)  # check() made a Ray of it
            return self.executor
        if self.method == "thread":
            return Threads(self.num_workers)
        return Processes(self.num_workers, self.start_method)

    def _traits(self) -> dict[str, Any]:
        return {**super()._traits(), **({"depends_on": {"row", "epoch"}} if self.rng else {})}

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if not self.rng:  # a seed that nothing is drawn with
            del identity["rng"], identity["seed"]
        return identity

    @property
    def function(self) -> tuple[Callable[..., Any], Any]:
        return self.guarded(self.fn), self.identity()["fn"]

    def _items(self, run: Run) -> Sequence[Any]:
        self.refuse_batches(run)
        return super()._items(run)

    def _with(self, run: Run, answer: Answer) -> Run:
        mapped = super()._with(run, answer)
        return mapped.pick(self.without_failed(run, answer[0])) if self.leaves_out else mapped

    @made_once
    def _draw_watch(self) -> DrawWatch:
        cure = "draw from the generator that rng=True gives it" if self.rng else DRAWS["Map"]
        return DrawWatch(self.fn, str(self), cure)


def joined(waits: list[Callable[[], Answer]]) -> Answer:
    results: list[Any] = []
    for wait in waits:
        part, error = wait()
        results += part
        if error is not None:
            return results, error
    return results, None


class ColumnFunction(
    CallsFunction, RunStage, takes="columns", gives="found types", asks_inputs=True, versioned="fn"
):
    """A stage that calls a user's function with columns."""

    free = frozenset({"thread_safe"})

    fn: Function
    _: KW_ONLY
    format: Literal["arrow", "numpy", "torch"] = "arrow"
    version: str | None = None
    thread_safe: bool = False
    on_error: OnBadRow = "raise"

    def returned(self, run: Run) -> tuple[Run, pa.Table | None]:
        """The rows, and the columns that the function makes of them; None of no rows that it takes."""
        self._check_rows(run)
        self.refuse_batches(run)
        try:
            run, result = self._called(run)
            if isinstance(result, Failed):
                return run, None
            data = from_columns(result, self, self._type)
        except BadCell as bad:
            place = min(bad.row or 0, len(run.block) - 1)  # it may return more rows than it got
            raise at_row(f"{self}: {bad}", self, run.block.ids[place], SchemaError) from None
        except Exception as error:
            if not is_of_rows(error):  # which names its row
                blame(error, self, int(run.block.ids[0]))
            raise
        if len(data) != len(run.block):
            counts = f"got {len(run.block)} rows and returned {len(data)}"
            rule = "the function gives one row for each row it gets"
            raise refused(self, f": {rule}, {counts}; to drop rows use filter()", DataError)
        return run, data

    def _called(self, run: Run) -> tuple[Run, Any]:
        """The rows of which the function makes something, and that; ``Failed`` of none at all."""
        fn = self._draw_watch.around(self.fn)
        at_work = at_work_of(self)
        result = None
        if at_work is not None and len(run) == 1:
            result = at_work.at(int(run.block.ids[0]))
        if result is None:
            result = self._call(self.guarded(fn), run)
        if not isinstance(result, Failed):
            if self.leaves_out:
                self._left_out.drop(run.block, np.zeros(len(run), dtype=np.int64))
            return run, result
        run = run.pick(self.without_failed(run, self._failures(run, result)))
        return run, self._call(fn if len(run) else self.guarded(fn), run)

    def _call(self, fn: Callable[..., Any], run: Run) -> Any:
        columns = columns_as(run.block, self.format, self)
        try:
            return fn(columns)
        except Exception as error:
            row = self._row_of(error, run)
            blame(error, self, None if row is None else int(run.block.ids[row]))
            raise

    def _row_of(self, error: Exception, run: Run) -> int | None:
        """The row that the error names; or else the first of which the function raises such an error by
        itself, found by halves.
        """
        if isinstance(error, TrainpipesError) and error.path is None and error.row is not None:
            row, error.row = min(error.row, len(run) - 1), None
            return row
        if isinstance(error, NOT_OF_ROWS):
            return None

        def raises(start: int, stop: int) -> bool:
            try:
                self.fn(columns_as(run.block.slice(start, stop), self.format, self))
            except Exception as again:
                return isinstance(again, type(error))
            return False

        row = first_bad(len(run), raises)
        return row if len(run) == 1 or raises(row, row + 1) else None

    def _failures(self, run: Run, failed: Failed) -> list[Failed | None]:
        """Of rows of which the function ``failed``: of each, why it fails by itself, if so."""
        if len(run) == 1:
            return [failed]
        failures: list[Failed | None] = []
        for half in (run.part(0, len(run) // 2), run.part(len(run) // 2, len(run))):
            result = self.guarded(self.fn)(columns_as(half.block, self.format, self))
            fails = isinstance(result, Failed)
            failures += self._failures(half, result) if fails else [None] * len(half)
        return failures

    def _type(self, name: str) -> pa.DataType | None:
        """The type of a column that the function returns as a list: that of the first rows."""
        inputs = self._inputs
        key = f"{self.name}-{inputs.chain.stages.index(self)}"

        def find() -> pa.Schema:
            steps = inputs.chain.steps
            below = steps[: steps.index(self)]
            cure = "have the function return Arrow arrays of a type, pa.array(values, pa.string())"
            return ColumnTypes(inputs).find(below, str(self), cure, self._untyped)

        schema = inputs.schemas.get(key, find)
        return schema.field(name).type if name in schema.names else None

    def _untyped(self, block: Block) -> Block:
        run, result = self._called(unplaced(block))
        columns = {} if isinstance(result, Failed) else untyped_columns(result)
        rows = zip(*columns.values(), strict=True)
        return run.block.with_data([dict(zip(columns, values, strict=True)) for values in rows])


class MapBatches(ColumnFunction):
    """Apply a function to the columns of many rows at once, which returns the new columns.

    Treat each row by itself: the number of rows in a call may differ between two runs.

    Args:
        fn: function of columns that returns columns, a value for each row. With
            ``format="arrow"`` of a ``pyarrow.Table``, returning a table or a dict of arrays; with
            "numpy" or "torch" of a dict of arrays or tensors ``[rows, ...]``, returning such a
            dict. Ragged columns come as object arrays of arrays in "numpy", as lists of tensors in
            "torch"; nulls of floats as NaN. A returned array ``[rows, n, ...]`` becomes fixed-size
            lists. Of a part of an array, as ``buffer[:n]``, a copy is taken; a whole one must not be
            returned again with other values, see ``map``. A DataError with ``row=n`` names row n (from 0)
            of those given.
        format: "arrow", "numpy" or "torch": form of the function's argument.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.
        on_error: for rows of which the function raises; see ``map``. They are found by calling it
            for halves of the rows.

    Raises:
        DataError: another number of rows; or with "numpy" or "torch" a null among integers or
            bools.
        SchemaError: the function returned something that makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.map_batches(lambda c: {"y": c["x"] * 2}, format="numpy"))
    [{'y': 2}, {'y': 4}]
    """

    def process(self, run: Run) -> Run:
        run, table = self.returned(run)
        return run if table is None else run.with_block(run.block.with_data(table))


class WithColumns(ColumnFunction):
    """Add the columns that a function makes of the columns of many rows at once.

    A column whose name is there already replaces the old column; otherwise as ``map_batches``.

    Args:
        fn: function of columns that returns columns; see ``map_batches``.
        format: "arrow", "numpy" or "torch": form of the function's argument.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.
        on_error: for rows of which the function raises; see ``map``. They are found by calling it
            for halves of the rows.

    Raises:
        DataError: another number of rows; or with "numpy" or "torch" a null among integers or
            bools.
        SchemaError: the function returned something that makes no columns.

    >>> import pyarrow as pa, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2]}))
    >>> list(pipe.with_columns(lambda c: {"double": c["x"] * 2}, format="numpy"))
    [{'x': 1, 'double': 2}, {'x': 2, 'double': 4}]
    """

    def process(self, run: Run) -> Run:
        run, new_columns = self.returned(run)
        if new_columns is None:
            return run
        table = table_of(run.block.data, self)
        for field, column in zip(new_columns.schema, new_columns.columns, strict=True):
            table = with_column(table, field, column)
        return run.with_block(run.block.with_data(table))
