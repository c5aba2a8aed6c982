"""How a shard's rows go through stages: these are opened, and runs go through them one by one; and how a
user's function is called for rows, with a random generator for each row if it takes one.

Generators are Philox-4x64 (Salmon et al., SC'11): the key is a seed and a name, the upper 192 bits of the
counter are the row's number, epoch and part. So no two rows share numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence

from trainpipes._internal.activity import doing, each
from trainpipes._internal.pool import Pool
from trainpipes.columns.block import Block, naming_bad_values
from trainpipes.columns.run import Run
from trainpipes.errors import DataError, TrainpipesError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.held import EmptyRounds
from trainpipes.interfaces.quarantine import Guarded
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.watched_calls import AtWork, DrawWatch, Place, at_work_of

#: What is said of a function that raises what would end the rows.
RAISED_STOP = "a function that was called for rows raised StopIteration"
_Made = TypeVar("_Made")
#: Fewest rows that a function is called for at a time, if it is called for rows.
LEAST_ROWS = 8
#: About how many bytes a run has.
RUN_BYTES = 4 << 20


def open_stages(
    stages: Sequence[Stage], rows: kinds.OpenBelow, at: dict[str, Any], batch_size: int = 1
) -> tuple[Iterator[Run], Submitted | None]:
    """A shard's runs from stages, opened at a cursor; ``rows`` opens those below. And what the first stage
    with workers makes, which can be begun ahead. Whoever meets an error opens the stages anew.

    Stages that regroup rows make many items at once. Functions are called, and batches collated, for few of
    them: what they make takes memory, and a shard is asked for one item at a time.
    """
    submitted: list[Submitted] = []
    for stage in stages:
        if any(_calls_python(s) or isinstance(s, kinds.FinishingStage) for s in _inner(stage)):
            rows = partial(_in_parts, stage, rows, max(batch_size, LEAST_ROWS))
        rows = partial(_open_stage, stage, rows, submitted)
    return rows(at), submitted[0] if submitted else None


def _inner(stage: Stage) -> tuple[Stage, ...]:
    return stage.inner if isinstance(stage, kinds.WorkingStage) else (stage,)


def _calls_python(stage: Stage) -> bool:
    """Whether a stage calls a function, or makes an object, for each row or batch."""
    of_objects = stage.traits.gives == "objects" or isinstance(stage, kinds.FinishingStage)
    return stage.traits.per_row and (of_objects or stage._calls_function)


def _in_parts(stage: Stage, below: kinds.OpenBelow, rows: int, at: dict[str, Any]) -> Iterator[Run]:
    """Runs of as many items as a stage is to have at a time. None that was given is held."""
    return _parts(stage, below(at), rows)


def _parts(stage: Stage, runs: Iterator[Run], rows: int) -> Iterator[Run]:
    calls_python = any(map(_calls_python, _inner(stage)))
    while (run := next(runs, None)) is not None:
        most = _items_at_a_time(stage, run, rows, calls_python)
        firsts = range(0, len(run), most)
        parts = deque(
            [run] if len(firsts) < 2 else [run.part(n, min(n + most, len(run))) for n in firsts]
        )
        del run
        while parts:
            yield parts.popleft()


def _items_at_a_time(stage: Stage, run: Run, rows: int, calls_python: bool) -> int:
    if not calls_python:
        return max(1, int(RUN_BYTES * len(run) / max(1.0, run.block.row_bytes * len(run.block))))
    workers = (
        stage.most_workers if isinstance(stage, kinds.WorkingStage) and stage.has_workers else 1
    )
    return workers * (rows if run.bounds is None and run.items is None else 1)


def _open_stage(
    stage: Stage, below: kinds.OpenBelow, submitted: list[Submitted], at: dict[str, Any]
) -> Iterator[Run]:
    runs: Iterator[Run]
    if isinstance(stage, kinds.RegroupStage):
        runs = each(stage, stage.open(below, at))
    elif isinstance(stage, kinds.WorkingStage) and stage.has_workers:
        runs = Submitted(stage, below(at))
        submitted.append(runs)
    else:
        assert isinstance(stage, kinds.RunStage)
        runs = map(partial(called, stage, stage.process), below(at))
    return not_empty(runs, stage)


def not_empty(runs: Iterator[Run], stage: object) -> Iterator[Run]:
    """The runs of a stage that have an item; raises after many epochs without. No run that was given is
    held: its memory is free for the next one.
    """
    rounds = EmptyRounds()

    def has_items(run: Run) -> bool:
        if len(run):
            rounds.gave()
            return True
        rounds.saw(run)
        rounds.check(stage)
        return False

    return filter(has_items, runs)


def called(stage: kinds.RunStage, function: Callable[[Run], _Made], run: Run) -> _Made:
    try:
        with naming_bad_values(run.block, stage):
            return function(run)
    except StopIteration as error:  # the function's own: the rows have not ended
        raise stopped(error) from error


def stopped(error: StopIteration) -> RuntimeError:
    """What stands for a function's ``StopIteration``, and is about the same row."""
    stop = RuntimeError(RAISED_STOP)
    if hasattr(error, "_trainpipes"):
        stop._trainpipes = error._trainpipes  # type: ignore[attr-defined]
    return stop


class Submitted(Iterator[Run]):
    """Runs through a stage whose workers may begin with some of them ahead."""

    def __init__(self, stage: kinds.WorkingStage, below: Iterator[Run]) -> None:
        self._stage = stage
        self._below = below
        #: Runs that workers of the stage have begun with, and what waits for them; or what went wrong.
        self._begun: deque[tuple[Run, Callable[[], Run] | None] | Exception] = deque()

    def begin(self) -> None:
        """Have workers begin with one more run; errors are raised in its turn."""
        try:
            run = next(self._below)
            self._begun.append((run, called(self._stage, self._stage.submit_run, run)))
        except Exception as error:
            # The frames of its trace would hold the rows before the end.
            over = isinstance(error, StopIteration)
            self._begun.append(error.with_traceback(None) if over else error)

    def __next__(self) -> Run:
        while len(self._begun) < self._stage.most_begun:
            self.begin()
            if isinstance(self._begun[-1], Exception):
                break
        begun = self._begun.popleft() if self._begun else (next(self._below), None)
        if isinstance(begun, Exception):
            raise begun
        run, wait = begun
        return called(self._stage, self._stage.process if wait is None else lambda _: wait(), run)


#: Results for the first rows, and the error at the next one.
Answer = tuple[list[Any], BaseException | None]
#: The upper counter words of some items: uint64 ``[items, 3]``.
Words = npt.NDArray[np.uint64]
_NOTHING = np.zeros(4, dtype=np.uint64)


class RowKey(ISeedSequence):  # a Philox asks it for its key
    """The Philox key of ``permutation.random_key``.

    >>> from trainpipes.order.permutation import random_key
    >>> key = RowKey(random_key(0, "noise"))
    >>> rng = key.generator([0, 7, 2])  # row 7 of epoch 2
    >>> rng.bit_generator.random_raw(2).tolist()
    [18436814177646055453, 6772959251520411799]
    """

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[np.uint64]:
        return self.key

    def generator(self, words: Sequence[int]) -> Generator:
        """The generator of one item, by the three upper words of its counter."""
        bits = Philox(self)  # type: ignore[arg-type]  # takes what gives a state, as documented
        state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": (0, *words), "key": self.key},
            "buffer": _NOTHING,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        bits.state = state
        return Generator(bits)


def words_of(run: Run) -> Words:
    """Upper counter words of each item, uint64 ``[items, 3]``: a row's part, number and epoch; of a
    batch a digest over its rows.
    """
    places = row_words(run.block)
    if run.bounds is None:
        return places
    digests = [
        hashlib.sha256(places[start:stop].tobytes()).digest()[:24]
        for start, stop in pairwise(run.bounds.tolist())
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 3)


def row_words(block: Block) -> Words:
    places = np.empty((len(block), 3), dtype="<u8")
    places[:, 0], places[:, 1], places[:, 2] = block.part, block.ids, block.epoch
    return places


@dataclass(eq=False)
class RowCall:
    """A function of one row, or of a row and its generator (with ``key``), which worker processes call, too.
    What these do of ``begin`` and so on: see ``process_worker.Call``.
    """

    fn: Callable[..., Any]
    key: RowKey | None
    said: str
    watch: DrawWatch

    def begin(self, worker: int) -> None:
        self.watch.reports = False  # the parent does

    def answer(self, items: Sequence[Any], words: Words | None) -> Answer:
        return self.each(items, words, at_work=at_work_of(self))

    def noticed(self) -> str:
        return self.watch.found

    def hear(self, noticed: str) -> None:
        self.watch.hear(noticed)

    def leaves_out(self, stage: int) -> bool:
        return isinstance(self.fn, Guarded)

    @property
    def while_waiting(self) -> str:
        return self.said

    shares = False
    without = 'use method="thread"'

    def objects(self, sent_here: Sequence[Any]) -> Sequence[Any]:
        return sent_here

    def where(self, place: Place) -> str:
        return ""

    def died_at(self, error: TrainpipesError, how: str, place: Place) -> Answer:
        return [None] * max(0, place.row), error

    def each(
        self,
        items: Sequence[Any],
        words: Words | None,
        rows: Sequence[int] | None = None,
        at_work: AtWork | None = None,
    ) -> Answer:
        """Call the function for each item, up to the first at which it raises or returns None. ``at_work``
        notes the item at work, by its number in ``rows``, or here.
        """
        results: list[Any] = []
        counters = None if words is None else words.tolist()
        fn = self.watch.around(self.fn)
        try:
            for number, item in enumerate(items):
                if at_work is not None:
                    failed = at_work.at(number if rows is None else rows[number])
                    if failed is not None:
                        results.append(failed)
                        continue
                if self.key is None or counters is None:
                    result = fn(item)
                else:
                    result = fn(item, self.key.generator(counters[number]))
                if result is None:
                    raise DataError(
                        f"{self.said}: the function returned None; it returns the row to go on with (drop "
                        "rows with filter())"
                    )
                results.append(result)
        except BaseException as error:
            return results, error
        return results, None


class ThreadMap:
    """Threads that call one function, and with ``shares`` whoever waits for them; only process
    ``pid`` can use them.
    """

    #: Rows of a task, at least.
    least_rows = 1

    def __init__(self, call: RowCall, workers: int, shares: bool = False) -> None:
        self.pid = os.getpid()
        self._call = call
        self._pool = Pool(workers, shares=shares, within=True, name="trainpipes-map")

    def submit(self, items: Sequence[Any], words: Words | None) -> Callable[[], Answer]:
        pool = self._pool

        def wait() -> Answer:
            answer: Answer = pool.result(future)
            return answer

        future = pool.submit(partial(_call, ref(wait), self._call, items, words))
        return wait

    def close(self) -> None:
        self._pool.close()


def _call(
    wait: ref[Callable[[], Answer]], call: RowCall, items: Sequence[Any], words: Words | None
) -> Answer:
    with doing(call.said):
        return ([], None) if wait() is None else call.each(items, words)
