"""What is left in mid-epoch is let go: at once, without the garbage collector, and from anywhere."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from tokenizer_fixtures import bpe
from trainpipes.engine.iterating import consumer
from trainpipes.tokenizers.hf import HuggingFace

ROWS, WIDTH = 4000, 200  # which Arrow holds


@pytest.fixture
def files(tmp_path: Path) -> Path:
    pq.write_table(
        pa.table({"x": [bytes(WIDTH)] * ROWS}), tmp_path / "a.parquet", row_group_size=500
    )
    return tmp_path


@pytest.fixture(scope="module")
def collected() -> None:
    """What tests of other files have left is gone."""
    gc.collect()


@pytest.fixture
def no_collections(collected: None) -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def double(batch: Any) -> Any:
    return [*batch, *batch]


WAYS: dict[str, Callable[[tp.Pipeline], Any]] = {
    "iter": lambda pipe: next(iter(pipe)),
    "mapped": lambda pipe: next(iter(pipe.map(double))),
    "Loader": lambda pipe: next(iter(tp.Loader(pipe, threads=0))),
    "threads": lambda pipe: next(iter(tp.Loader(pipe, threads=1))),
    "looks": lambda pipe: (pipe.peek(), str(pipe.show(1)), pipe.state_at(2), pipe.stats(2)),
    "state": lambda pipe: (next(iter(pipe)), pipe.state_dict()),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_pipeline_that_is_left_are_let_go_with_it(
    way: str, files: Path, no_collections: None
) -> None:
    def once() -> None:
        WAYS[way](tp.list_files(files).read_parquet().shuffle(ROWS).batch(4))

    once()
    most, deadline = pa.total_allocated_bytes() + ROWS * WIDTH, time.monotonic() + 60
    for _ in range(6):
        once()
    while pa.total_allocated_bytes() > most:  # a thread may be at work yet
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [0, 2])
def test_rows_of_a_loop_that_was_left_are_let_go_while_its_loader_stays(
    threads: int, files: Path, no_collections: None
) -> None:
    loader = tp.Loader(tp.read_parquet(files).shuffle(ROWS).batch(4), threads=threads)
    most, deadline = pa.total_allocated_bytes() + ROWS * WIDTH // 2, time.monotonic() + 30
    next(iter(loader))
    while pa.total_allocated_bytes() > most:  # a thread may be at work yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert loader.state_dict()["batches"] == 1
    assert sum(map(len, loader)) == ROWS


def test_a_pipeline_that_a_temporary_iterator_outlives_goes_on(files: Path) -> None:
    batches = iter(tp.list_files(files).read_parquet().repeat(2).batch(1000))
    gc.collect()
    assert sum(len(batch) for batch in batches) == 2 * ROWS


def test_a_tokenizer_that_nobody_holds_is_let_go(no_collections: None) -> None:
    tokenizer = HuggingFace(bpe())
    tokenizer.encode(pa.array(["a few", "words"], pa.large_string()))
    gone = weakref.ref(tokenizer)
    del tokenizer
    assert gone() is None


def test_an_iterator_with_workers_may_be_collected_where_its_file_is_decoded(
    tmp_path: Path,
) -> None:
    """The thread that reads ahead drops the last reference."""
    (tmp_path / "a.txt").write_text("a")
    held: dict[str, Any] = {}
    is_given, is_gone = threading.Event(), threading.Event()

    def decode(file: Any, block: int) -> Iterator[pa.Table]:
        for n in range(ROWS):
            is_ahead = threading.current_thread() is not threading.main_thread()
            if n % 64 == 32 and held and is_ahead and is_given.wait(2):
                held.clear()
                is_gone.set()
            yield pa.table({"x": [n]})

    pipe = tp.read_files(tmp_path / "a.txt", decode, lambda file: [ROWS]).shuffle(64, seed=0)
    loader = tp.Loader(pipe.batch(4).map(double), num_workers=1)
    held["batches"] = iter(loader)
    next(held["batches"])
    is_given.set()
    assert is_gone.wait(60)
    loader.load_state_dict(loader.state_dict())
    assert sum(len(batch) for batch in loader) == 2 * (ROWS - 4)


def test_an_iterator_is_let_go_in_silence_where_a_program_has_no_classes_left(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: Any = iter(tp.list_files(files).read_parquet().batch(4))
    next(batches)
    monkeypatch.setattr(consumer, "ShardItems", None)  # as modules are when it ends
    batches._current.leave()
    assert batches._current.left
