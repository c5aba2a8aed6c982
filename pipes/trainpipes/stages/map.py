"""``map``: a Python function on each row, or on each item above a batch."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_all_start_methods
from typing import Any, Literal, get_args
from weakref import finalize

import pyarrow as pa
from torchdata.nodes import BaseNode

from trainpipes.checks import checked_schema, flag, whole_number
from trainpipes.errors import ConfigError
from trainpipes.order import random_key
from trainpipes.runtime.caching.address import digest_of
from trainpipes.runtime.calling.hands import Hands, Kind, hands_for, spread
from trainpipes.runtime.calling.row_call import RowCall
from trainpipes.runtime.calling.row_random import RowKey, words_of
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.runtime.warn_once import warn_once
from trainpipes.shown import shown
from trainpipes.stages.blame import blame

__all__ = ["Kind", "Map", "StartMethod"]

StartMethod = Literal["forkserver", "spawn", "fork"]


class Map(Stage):
    """Applies a function to each item.

    In: rows, or what stands above a batch: lists of rows, collated batches. Out: what the function
    returns; None is refused (to drop rows use ``filter``). Cursor: none of its own. Costs a Python
    call an item; rows come as dicts of Python values and of arrays that ``map_batches`` made
    (about 1 us a column), so prefer ``map_batches`` where Arrow or NumPy can do the work.

    With ``rng=True`` it gets a ``numpy.random.Generator`` too, for augmentations: the same for the same row
    in the same epoch, after any resume, on any number of ranks, workers and threads; another one for
    another row, epoch, seed or function. Above a batch it is that of the rows of the batch. A row that a
    sampler draws twice is told apart by its place in the epoch, a packed row by its first token. Costs about
    5 us an item. torch takes a seed from it: ``torch.Generator().manual_seed(int(rng.integers(2**63)))``.

    With ``num_workers`` it is called for several items at a time, a few of them handed over together. Items
    come in the same order, and with the same draws. A run of rows is worked on while another is used.
    Processes are started at the first row, and end with the pipeline or after a minute without work; each
    item costs a pickle there and back (arrays and tensors travel as bytes, about 0.3 ms for 1 MB).

    Args:
        source: the node below, or None as a step of a pipeline.
        fn: function of one item; with ``rng`` of an item and a generator.
        rng: whether it gets a generator.
        seed: of the generators.
        version: names the function in checkpoints instead of its module and name: change it when
            what the function does changes.
        num_workers: threads or processes that call it; 0 for the thread that asks.
        method: "thread", for a function that several threads may call at a time; or "process": the
            function, items and results must pickle.
        schema: Arrow types of the columns that it returns, as a ``pyarrow.Schema``: rows are then columns
            from here on. Left out, they stay as they are until a stage works on columns, and the schema is
            found from the first rows; see "Rows as columns" in docs/compose.md.
        start_method: of processes, "forkserver", "spawn" or "fork"; by default the first of these that is
            there. A fork copies locks that threads of this process hold, and may hang.

    Raises:
        WorkerError: a worker process died; names the row that it had at hand.
        ConfigError: the function or an item does not pickle.
        DataError: the function returned None, or what does not pickle.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).map(lambda x: x * 10))
    [0, 10, 20]
    >>> noisy = tp.from_iterable(lambda: range(3)).map(lambda x, rng: x + rng.integers(100), rng=True)
    >>> [int(x) for x in noisy], [int(x) for x in noisy]
    ([91, 77, 7], [84, 38, 96])
    """

    role = "rows"
    per_row = True
    makes_objects = True
    free = frozenset({"num_workers", "method", "start_method", "schema"})

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        fn: Callable[..., Any] | None = None,
        *,
        rng: bool = False,
        seed: int = 0,
        version: str | None = None,
        num_workers: int = 0,
        method: Kind = "thread",
        start_method: StartMethod | None = None,
        schema: pa.Schema | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"map(fn) takes a function of one row, got {shown(fn)}")
        flag(rng, "map(rng)")
        whole_number(seed, None, "map(seed)", "of the generators that rng=True gives")
        whole_number(
            num_workers, 0, "map(num_workers)", "threads or processes that call the function"
        )
        if method not in get_args(Kind):
            raise ConfigError(f'map(method) is "thread" or "process", got {shown(method)}')
        there = get_all_start_methods()
        if start_method is not None and start_method not in there:
            raise ConfigError(
                f"map(start_method) is one of {there} here, got {shown(start_method)}"
            )
        super().__init__(
            source,
            fn=fn,
            rng=rng,
            seed=seed,
            version=version,
            num_workers=num_workers,
            method=method,
            start_method=start_method,
            schema=checked_schema(schema, "map(schema)"),
        )
        self.schema = schema
        self.by_row, self.by_epoch = self.by_row or rng, self.by_epoch or rng
        self._fn = fn
        self._turn = 0
        self._call: RowCall | None = None
        self._hands: Hands | None = None
        self._lock = threading.Lock()

    def identity(self) -> dict[str, Any]:
        return named(super().identity(), self.options["version"])

    def bind(self, below: Sequence[Stage]) -> None:
        self._turn = same_below(self, below)

    @property
    def runs_user_code(self) -> bool:
        # With workers the function is called elsewhere, so that any thread may wait for it.
        return not self.has_workers

    @property
    def has_workers(self) -> bool:  # type: ignore[override]
        return self.options["num_workers"] > 0 and not self._alone

    @property
    def _alone(self) -> bool:
        """Whether this process may not have the workers that are asked for."""
        return self.options["method"] == "process" and multiprocessing.current_process().daemon

    def settle(self, threads: int) -> None:
        hands = self._workers()
        if hands is not None:
            hands.start()

    def process(self, run: Run) -> Run:
        rest = self.hand_over(run)
        if rest is not None:
            return rest()
        words = words_of(run) if self.by_row else None
        with self._lock:
            answer = self.call.each(run.unroll(), words)
        return self._with(run, *answer)

    def hand_over(self, run: Run) -> Callable[[], Run] | None:
        hands = self._workers()
        if hands is None:
            return None
        words = words_of(run) if self.by_row else None
        answer = spread(hands, self.options["num_workers"], run.unroll(), words)
        return lambda: self._with(run, *answer())

    def _workers(self) -> Hands | None:
        """Those of this process; None where the function is called by whoever asks."""
        workers, method = self.options["num_workers"], self.options["method"]
        if not workers:
            return None
        if self._alone:
            warn_once(
                f"{self}: a worker process may not start others, so that the function is called in this one: "
                'use method="thread", or the workers of map() without those of a DataLoader'
            )
            return None
        with self._lock:
            if self._hands is None or self._hands.process != os.getpid():
                self._hands = hands_for(self.call, workers, method, self.options["start_method"])
                finalize(self, self._hands.close).atexit = False
            return self._hands

    @property
    def call(self) -> RowCall:
        """The function, with what it is called with."""
        if self._call is None:
            key = key_of(self, self._turn) if self.by_row else None
            self._call = RowCall(self._fn, key, str(self))
        return self._call

    def _with(self, run: Run, results: list[Any], error: BaseException | None) -> Run:
        """A run of what came of each item, up to the first that raised."""
        if error is not None:
            ids = run.row_ids(len(results))
            blame(error, self, int(ids[0]) if len(ids) else None)
            raise error
        if run.items is None and run.bounds is None:
            return run.with_block(run.block.with_data(results))
        return run.with_items(results)


def named(identity: dict[str, Any], version: str | None) -> dict[str, Any]:
    """The identity of a stage that calls a function, in which ``version``, if given, stands for that; without
    a seed that nothing is drawn with."""
    if version is not None:
        identity["fn"] = f"version {version}"
        identity.pop("version")
    if not identity.get("rng", True):
        del identity["rng"], identity["seed"]
    return identity


def key_of(stage: Stage, turn: int) -> RowKey:
    """The key of a stage's generators: of its seed and its function. Of several alike in a chain, ``turn`` is
    the number of those below."""
    name = digest_of(stage.identity()["fn"])
    return RowKey(random_key(stage.options["seed"], stage.name, name, turn))


def same_below(stage: Stage, below: Sequence[Stage]) -> int:
    """Stages of a chain below one with generators that would draw the same."""
    identity = json.dumps(stage.identity())
    return sum(
        type(other) is type(stage) and json.dumps(other.identity()) == identity for other in below
    )
