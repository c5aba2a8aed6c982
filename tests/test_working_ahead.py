"""What threads do before it is asked for: the same items, whenever they are made."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.rectangles import Rectangles
from trainpipes.sources.files.block_reader import BlockReader


@pytest.fixture
def pipe(tmp_path: Path) -> tp.Pipeline:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1000, n).tolist() for n in rng.integers(1, 40, 6000)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "ids.parquet", row_group_size=250)
    files = tp.list_files(str(tmp_path / "*.parquet"))
    return files.read_parquet().sharding_filter(6).shuffle(500, seed=3).batch(8).pad_collate()


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(found, expected, strict=True)
    )


class TestLateItems:
    def test_are_made_once_and_let_go(self) -> None:
        made: list[int] = []

        def make(k: int) -> str:
            made.append(k)
            return f"item {k}"

        items = LazyBatches(make, 3)
        assert len(items) == 3
        assert items[1] == items[1] == "item 1"
        assert made == [1]
        items[1] = None
        assert items._items == [None] * 3
        assert items[1] == "item 1"  # made again, and not kept
        assert items._items == [None] * 3
        assert list(items) == ["item 0", "item 1", "item 2"] == items[0:3]
        items[0] = "another"
        assert items[0] == "another"

    def test_have_a_fixed_number(self) -> None:
        items = LazyBatches(str, 2)
        with pytest.raises(TypeError, match="not taken out"):
            del items[0]
        with pytest.raises(TypeError, match="nothing is put between"):
            items.append("x")

    def test_a_batch_that_is_kept_does_not_change(self, pipe: tp.Pipeline) -> None:
        expected = list(tp.Loader(pipe, threads=0))
        pipe.load_state_dict(pipe.state_at(0, epoch=0))
        kept = []
        for batch in tp.Loader(pipe, threads=0):
            kept.append({k: v.clone() for k, v in batch.items()})
            batch["input_ids"].fill_(-7)
        assert same(kept, expected)


class TestATrainerAtWork:
    @pytest.mark.parametrize("threads", [1, 2])
    def test_gets_the_same_batches_and_states(self, pipe: tp.Pipeline, threads: int) -> None:
        expected = list(tp.Loader(pipe, threads=0))
        pipe.load_state_dict(pipe.state_at(0, epoch=0))
        loader = tp.Loader(pipe, threads=threads)
        found, states = [], []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number % 100 == 50:
                states.append((number, loader.state_dict()))
            time.sleep(0.0003)
        assert same(found, expected)
        for number, state in states:
            assert state == pipe.state_at(number + 1, epoch=0)
            other = tp.Loader(pipe, threads=threads)
            other.load_state_dict(state)
            assert same(list(other), expected[number + 1 :])

    def test_has_them_made_by_another_thread(
        self, pipe: tp.Pipeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by: list[str] = []
        cut = Rectangles.__getitem__

        def note(*given: Any) -> Any:
            by.append(threading.current_thread().name)
            return cut(*given)

        monkeypatch.setattr(Rectangles, "__getitem__", note)
        own = threading.current_thread().name
        early = 0  # batches for which this thread had nothing to make
        before = 0
        for taken, _ in enumerate(tp.Loader(pipe, threads=1), 1):
            early += by.count(own) == before
            before = by.count(own)
            for _ in range(100):  # at work until one more is there, however slow the machine is
                time.sleep(0.001)
                if len(by) > taken:
                    break
        assert early > len(pipe) / 2
        assert len(by) < 1.2 * len(pipe)  # hardly any was made twice


def test_two_threads_read_the_first_windows_at_once(
    pipe: tp.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=20)
    met: set[str] = set()
    read = BlockReader.read

    def meet(*given: Any) -> Any:
        name = threading.current_thread().name
        if name not in met:
            met.add(name)
            together.wait()  # for the other thread's first read
        return read(*given)

    monkeypatch.setattr(BlockReader, "read", meet)
    own = threading.current_thread().name
    next(iter(tp.Loader(pipe, threads=2)))
    assert len(met - {own}) == 2


class TestPassesThatFollowEachOther:
    def test_give_what_they_give_alone(self, pipe: tp.Pipeline) -> None:
        loader = tp.Loader(pipe, threads=2)
        passes = [list(loader) for _ in range(5)]
        for number, found in enumerate(passes):
            pipe.load_state_dict(pipe.state_at(0, epoch=number))
            assert same(found, list(tp.Loader(pipe, threads=0)))

    def test_threads_go_with_the_pass(self, pipe: tp.Pipeline) -> None:
        before = set(threading.enumerate())
        loader = tp.Loader(pipe, threads=2)
        for _ in range(3):
            list(loader)
        deadline = time.monotonic() + 10
        while set(threading.enumerate()) - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not set(threading.enumerate()) - before
