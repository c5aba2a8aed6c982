"""Calls a user function for rows, with a random generator for each row if it takes one.

Generators are Philox-4x64 (Salmon et al., SC'11): the key is a seed and a name, the upper 192 bits
of the counter are the row's number, epoch and part. So no two rows share numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence

from trainpipes._internal.activity import doing
from trainpipes._internal.pool import Pool
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.errors import DataError, TrainpipesError
from trainpipes.interfaces.quarantine import Guarded
from trainpipes.interfaces.watched_calls import DrawWatch, Place, current

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
        return self.each(items, words)

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
    ) -> Answer:
        """Call the function for each item, up to the first at which it raises or returns None. A worker
        process notes the item at work, by its number in ``rows``, or here.
        """
        results: list[Any] = []
        counters = None if words is None else words.tolist()
        fn = self.watch.around(self.fn)
        at_work = current()
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
