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
from trainpipes.columns.rectangles import Rectangles
from trainpipes.columns.tensor_rows import LazyBatches
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
        assert early > 0.8 * len(pipe)  # the first of a run, too
        assert len(by) < 1.2 * len(pipe)  # hardly any was made twice


def test_two_threads_read_the_first_windows_at_once(
    pipe: tp.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=20)
    met: set[str] = set()
    read = BlockReader.read

    def meet(*given: Any) -> Any:
        name = threading.current_thread().name
        with lock:
            meets = name not in met and len(met) < 2  # the one that iterates may be one of them
            met.update([name] * meets)
        if meets:
            together.wait()  # for the other thread's first read
        return read(*given)

    lock = threading.Lock()
    monkeypatch.setattr(BlockReader, "read", meet)
    next(iter(tp.Loader(pipe, threads=2)))
    assert len(met) == 2


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


#: Which thread worked on which rows.
seen: list[tuple[int, list[int]]] = []


class Noted(tp.TableStage):
    """Notes them."""

    thread_safe = True

    def apply(self, table: pa.Table) -> pa.Table:
        seen.append((threading.get_ident(), table.column("x").to_pylist()))
        return table


def to_integers(table: pa.Table) -> dict[str, Any]:
    return {"x": table["x"].cast(pa.int64())}


class TestStagesAboveAFunction:
    """A function of the user's runs in the thread that iterates; what stands above it runs beside."""

    @pytest.mark.parametrize("keep", [False, True], ids=["counted", "not counted"])
    def test_run_ahead_in_other_threads(self, keep: bool) -> None:
        called = set[int]()
        seen.clear()

        def double(row: dict[str, int]) -> dict[str, int]:
            called.add(threading.get_ident())
            return {"x": 2 * row["x"]}

        rows = tp.from_arrow(pa.table({"x": list(range(4000))})).shuffle(500, seed=1)
        if keep:
            rows = rows.filter([["x", ">=", 0]])
        pipe = rows.map(double).then(Noted()).batch(8).collate()
        expected = list(tp.Loader(pipe, threads=0))
        assert {thread for thread, _ in seen} == {threading.get_ident()}
        pipe.load_state_dict(pipe.state_at(0, epoch=0))
        seen.clear()
        batches = iter(tp.Loader(pipe))
        found = [next(batches)]
        asked = len(found[0]["x"])
        for _ in range(500):  # rows are worked on that nobody has asked for
            if sum(len(rows) for _, rows in seen) > asked:
                break
            time.sleep(0.01)
        assert sum(len(rows) for _, rows in seen) > asked
        found += batches
        assert same(found, expected)
        assert called == {threading.get_ident()}
        assert any(thread != threading.get_ident() for thread, _ in seen)

    def test_an_error_of_theirs_comes_in_its_turn(self) -> None:
        rows = [{"x": "1"} for _ in range(400)]
        rows[205] = {"x": "one"}
        types = pa.schema({"x": pa.string()})
        pipe = tp.from_dataset(rows).map(lambda row: row, schema=types)
        pipe = pipe.with_columns(to_integers, thread_safe=True)
        loader = tp.Loader(pipe.batch(10).collate())
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        for _ in range(2):  # asked again, it fails again
            with pytest.raises(pa.ArrowInvalid, match="one") as caught:
                next(batches)
            assert "raised in with_columns" in caught.value.__notes__[0]

    def test_states_go_on_exactly(self) -> None:
        def pipe() -> tp.Pipeline:
            rows = tp.from_arrow(pa.table({"x": list(range(120))})).shuffle(40, seed=1)
            return rows.filter(lambda row: row["x"] % 3 > 0).then(Noted()).batch(4).collate()

        expected = list(tp.Loader(pipe(), threads=0))
        for stop in range(len(expected)):
            loader = tp.Loader(pipe())
            batches = iter(loader)
            for _ in range(stop):
                next(batches)
            again = tp.Loader(pipe())
            again.load_state_dict(loader.state_dict())
            assert same(list(again), expected[stop:])
