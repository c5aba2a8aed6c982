"""What several threads share is whole at any time: another one may come between any two lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from hundred_rows import given_by, pipeline
from trainpipes.columns import tensor_rows
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.engine.iterating.epoch_iterator import IteratorLock
from trainpipes.engine.planning import inputs
from trainpipes.engine.planning.inputs import BlockTable
from trainpipes.engine.shards import shard_rows
from trainpipes.samplers import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from trainpipes.samplers.orders import RowSampler
from trainpipes.sources import read_arrow as arrow
from trainpipes.sources.read_arrow import ArrowSource


def at_each_line(
    module: Any, make: Callable[[], Any], first: Callable[[Any], Any], other: Callable[[Any], Any]
) -> list[Any]:
    """What ``first`` makes of a fresh object where another thread does ``other`` with that before its first
    line in a module; before its second line; and so on."""
    found: list[Any] = []
    while True:
        came, result = _at_line(len(found), module.__file__, make(), first, other)
        if not came:
            return found
        found.append(result)


def _at_line(
    number: int, path: str, shared: Any, first: Callable[[Any], Any], other: Callable[[Any], Any]
) -> tuple[bool, Any]:
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != path:
            return None
        if event == "line":
            if lines == number:
                other(shared)
            lines += 1
        return trace

    sys.settrace(trace)
    try:
        result = first(shared)
    finally:
        sys.settrace(before)
    return number < lines, result


@pytest.mark.parametrize("make", [
    lambda: RandomSampler(seed=3),
    lambda: RandomSampler(seed=3, num_samples=70),
    lambda: SubsetRandomSampler(range(5, 25), seed=3),
    lambda: WeightedRandomSampler(range(30), 12, replacement=False, seed=3),
])  # fmt: skip
def test_an_epochs_order_is_its_own_whatever_others_draw_meanwhile(
    make: Callable[[], RowSampler],
) -> None:
    def drawn(sampler: RowSampler, epoch: int) -> list[int]:
        return sampler.index(epoch, 0, sampler.length(30), 30).tolist()

    def used() -> RowSampler:
        sampler = make()
        drawn(sampler, 0)
        return sampler

    module = sys.modules[type(make()).__module__]
    assert drawn(make(), 0) != drawn(make(), 1)
    for meanwhile in (0, 1):
        found = at_each_line(
            module, used, lambda s: drawn(s, 1), lambda s, e=meanwhile: drawn(s, e)
        )
        assert len(found) > 3
        assert all(order == drawn(make(), 1) for order in found)


def test_rows_of_a_table_in_chunks_can_be_taken_by_several_at_once() -> None:
    table = pa.concat_tables(pa.table({"x": range(n, n + 5)}) for n in range(0, 50, 5))
    rows = np.array([48, 3, 17])

    def take(source: ArrowSource) -> list[int]:
        return source.take(rows)["x"].to_pylist()

    found = at_each_line(arrow, lambda: ArrowSource(table), take, take)
    assert len(found) > 10
    assert all(taken == rows.tolist() for taken in found)


def test_the_order_of_an_epochs_blocks_can_be_asked_for_by_several_at_once() -> None:
    def order(blocks: BlockTable, epoch: int) -> list[int]:
        return blocks.order(epoch, lambda e: np.roll(np.arange(5), e))[1].tolist()  # type: ignore[union-attr]

    def later_ones(blocks: BlockTable) -> None:
        for epoch in range(10, 15):
            order(blocks, epoch)

    make = partial(BlockTable, np.arange(1, 6))
    found = at_each_line(inputs, make, lambda blocks: order(blocks, 2), later_ones)
    assert len(found) > 5
    assert all(taken == [3, 4, 0, 1, 2] for taken in found)


@pytest.mark.parametrize("unroll", [list, lambda rows: LazyBatches(lambda k: int(rows[k]), len(rows))],
                         ids=["at once", "when taken"])  # fmt: skip
def test_a_batch_of_a_shared_shard_can_be_asked_for_by_several_at_once(unroll: Any) -> None:
    shards: Any = SimpleNamespace(is_own=lambda m: m % 2 == 0, last_opened=())
    run: Any = SimpleNamespace(pick=lambda rows: rows)

    def make() -> Any:
        return shard_rows.own_items(shards, run, range(6), 0, unroll)

    def take(items: Any) -> Any:
        return items[2], items[4], items[2]

    assert take(make()) == (2, 4, 2)
    for module in (shard_rows, tensor_rows):
        found = at_each_line(module, make, take, take)
        assert all(taken == (2, 4, 2) for taken in found)


def test_processes_are_forked_while_a_thread_iterates() -> None:
    """A lock that the thread holds just then would be held in them for ever."""
    expected, over = given_by(pipeline()), threading.Event()

    def iterate() -> None:
        while not over.is_set():
            list(tp.Loader(pipeline(), threads=2))

    thread = threading.Thread(target=iterate)
    thread.start()
    try:
        for _ in range(4):
            workers = DataLoader(pipeline(), batch_size=None, num_workers=2, timeout=30)
            assert sorted(given_by(workers)) == sorted(expected)
    finally:
        over.set()
        thread.join()


def test_an_item_waits_for_all_states_that_are_taken() -> None:
    lock, acquired, goes_on = IteratorLock(), threading.Event(), threading.Event()
    wait, first = lock._wait, lock.between_items()

    def acquire() -> bool:
        held = wait()
        acquired.set()
        return held and goes_on.wait(10)

    def take_state() -> None:
        with lock.between_items():
            pass

    first.__enter__()
    lock._wait = acquire
    second = threading.Thread(target=take_state)
    second.start()
    assert not acquired.wait(0.1)
    first.__exit__(None, None, None)
    assert acquired.wait(10)
    assert not lock.acquire()
    lock._wait = wait
    threading.Timer(0.1, goes_on.set).start()
    assert lock.wait()
    lock.release()
    second.join()
    with lock.between_items():
        pass


def test_an_iterator_that_begins_leaves_the_state_of_another_thread_as_it_is() -> None:
    is_at_work, goes_on = threading.Event(), threading.Event()

    def kept(row: int) -> bool:
        if row == 3 and threading.current_thread() is not threading.main_thread():
            is_at_work.set()
            goes_on.wait(10)
        return True

    pipe = tp.from_dataset(range(20)).filter(kept).batch(2)
    batches = iter(pipe)
    next(batches)
    second = threading.Thread(target=next, args=(batches,))
    second.start()
    assert is_at_work.wait(10)
    next(iter(pipe))
    goes_on.set()
    second.join()
    again = iter(tp.from_dataset(range(20)).filter(kept).batch(2))
    again.load_state_dict(batches.state_dict())
    assert next(again) == next(batches) == [4, 5]
