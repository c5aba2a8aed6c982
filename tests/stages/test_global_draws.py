"""Functions that draw from NumPy's, Python's or torch's global generator: no state holds it, so a warning
says what to do instead. Functions that do not are never accused."""

from __future__ import annotations

import random
import subprocess
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import map_functions as fn
import trainpipes as tp
from interpreters import python

Row = dict[str, Any]


def rows(count: int = 40) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(count)}))


def said_of(pipe: Any) -> list[str]:
    """The warnings of one epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in pipe:
            pass
    return [str(one.message) for one in caught]


class Noisy(tp.RowStage):
    def apply(self, row: Row) -> Row:
        return {**row, "noise": random.random()}


class NoisyTable(tp.TableStage):
    def apply(self, table: pa.Table) -> pa.Table:
        return table.append_column("noise", pa.array(np.random.rand(len(table))))


class NoisyBatch(tp.BatchStage):
    def apply(self, batch: Any) -> Any:
        return batch, torch.rand(2)


def several(row: Row) -> Iterator[Row]:
    for _ in range(random.randrange(3)):
        yield row


DRAWN: dict[str, tuple[Callable[[], tp.Pipeline], str, str]] = {
    "map": (lambda: rows().map(lambda row: {**row, "n": np.random.rand()}), "NumPy's", "pass rng=True"),
    "map of python": (
        lambda: rows().map(lambda row: {**row, "n": random.gauss(0, 1)}), "Python's", "rng=True",
    ),
    "map of torch": (lambda: rows().map(lambda row: {**row, "n": torch.rand(3)}), "torch's", "rng=True"),
    "map of much": (
        lambda: rows().map(lambda row: np.random.normal(size=(64, 64, 3))), "NumPy's", "rng=True",
    ),
    "map of some": (
        lambda: rows().map(lambda row: random.random() if row["x"] % 5 == 3 else 0.5), "Python's", "rng=True",
    ),
    "map with rng": (
        lambda: rows().map(lambda row, rng: random.random(), rng=True), "Python's", "that rng=True gives",
    ),
    "map in threads": (
        lambda: rows().map(lambda row: np.random.rand(), num_workers=2), "NumPy's", "pass rng=True",
    ),
    "map of batches": (
        lambda: rows().batch(4).map(lambda b: (b, random.random())), "Python's", "rng=True",
    ),
    "filter": (
        lambda: rows().filter(lambda row: random.random() < 0.5), "Python's", r"sample\(fraction\)",
    ),
    "flat_map": (lambda: rows().flat_map(several), "Python's", r"map\(fn, rng=True\) before it"),
    "map_batches": (
        lambda: rows().map_batches(lambda c: {"n": np.random.rand(len(c["x"]))}, format="numpy"),
        "NumPy's", r"map\(fn, rng=True\) before it, or in a TableStage",
    ),
    "with_columns": (
        lambda: rows().with_columns(lambda c: {"n": torch.rand(len(c["x"]))}, format="torch"),
        "torch's", "TableStage",
    ),
    "RowStage": (lambda: rows().then(Noisy()), "Python's", r"use map\(fn, rng=True\) in its place"),
    "TableStage": (lambda: rows().then(NoisyTable()), "NumPy's", r"define open\(\)"),
    "BatchStage": (
        lambda: rows().batch(4).then(NoisyBatch()), "torch's", r"map\(fn, rng=True\) in its place",
    ),
    "collate": (
        lambda: rows().batch(4).collate(lambda b: (b, np.random.rand())), "NumPy's", "in its place",
    ),
    "image_transform": (
        lambda: tp.from_dataset([{"image": np.zeros((1, 1, 1), np.uint8)}] * 9)
        .image_transform(lambda image: image + random.randrange(9), version="1"),
        "Python's", "draw from torch's generator",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_a_function_that_draws_from_a_global_generator_is_told_once_what_to_do(name: str) -> None:
    make, whose, cure = DRAWN[name]
    pipe = make()
    found = said_of(pipe)
    assert len(found) == 1, found
    assert f"draws from {whose} global generator, which no state holds" in found[0]
    with pytest.raises(AssertionError, match=cure):
        raise AssertionError(found[0])
    assert said_of(pipe) == []


def test_the_stage_is_named_with_its_function() -> None:
    def augment(row: Row) -> Row:
        return {**row, "n": random.random()}

    (found,) = said_of(rows().map(augment))
    assert "map(test_the_stage_is_named_with_its_function.augment (test_global_draws.py:" in found


def test_two_generators_are_named_in_one_sentence() -> None:
    (found,) = said_of(rows().map(lambda row: (random.random(), np.random.rand())))
    assert "draws from NumPy's and Python's global generators" in found


def test_a_function_in_a_worker_process_is_told_of_in_the_process_that_trains() -> None:
    (found,) = said_of(rows().map(fn.drawn_from_numpy, num_workers=2, method="process"))
    assert found.startswith("map(drawn_from_numpy")
    assert "draws from NumPy's global generator" in found


def seeded(row: Row) -> float:
    random.seed(row["x"])
    np.random.seed(row["x"])
    torch.manual_seed(row["x"])
    return random.random() + np.random.rand() + float(torch.rand(()))


def put_back(row: Row) -> Any:
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found = random.random(), np.random.rand(), torch.rand(2)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    return found


INNOCENT: dict[str, Callable[[], Any]] = {
    "nothing is drawn": lambda: rows().map(lambda row: {**row, "y": row["x"] + 1}),
    "a generator of its own": lambda: rows().map(lambda row: np.random.default_rng(row["x"]).random()),
    "rng": lambda: rows().map(lambda row, rng: rng.random(), rng=True),
    "a seed of the row": lambda: rows().map(seeded),
    "the state is put back": lambda: rows().map(put_back),
    "torch's in image_transform": lambda: (
        tp.from_dataset([{"image": np.zeros((1, 1, 1), np.uint8)}] * 9)
        .image_transform(lambda image: image + torch.randint(9, ()), version="1")
    ),
    "stages of this library": lambda: (
        rows().shuffle(9).sample(0.5).map(lambda row: row).batch(4).collate().repeat(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INNOCENT)
def test_a_function_that_is_exact_is_not_accused(name: str) -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert said_of(INNOCENT[name]()) == []
    if name != "a seed of the row":
        assert random.getstate() == before[0]
        assert np.array_equal(np.random.get_state()[1], before[1][1])
        assert torch.equal(torch.get_rng_state(), before[2])


def trained(fn: Callable[[Row], Any], threads: int, **how: Any) -> list[str]:
    """The warnings of a run whose training loop draws, in the main thread, beside threads of the pool."""
    pipe = rows(48).sharding_filter(8).shuffle(16).map(fn, **how).batch(2).collate()
    layer = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in tp.Loader(pipe, threads=threads):
            torch.nn.functional.dropout(layer(torch.ones(4, 2, 8))[0])
            random.random()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("workers", [0, 2])
def test_dropout_in_the_training_loop_accuses_no_function_in_a_thread_of_the_pool(
    workers: int,
) -> None:
    def slow(row: Row) -> Row:
        return {**row, "y": sum(range(50_000))}

    assert trained(slow, threads=2, num_workers=workers) == []


def test_a_function_in_a_thread_is_told_of_while_the_training_loop_waits() -> None:
    def slow(row: Row) -> Row:
        return {**row, "y": sum(range(50_000)) + float(torch.rand(()))}

    (found,) = trained(slow, threads=1)
    assert "draws from torch's global generator" in found


def test_a_worker_of_a_loader_says_it_in_its_own_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import random, pyarrow as pa, trainpipes as tp\n"
        "def noisy(row):\n    return {**row, 'n': random.random()}\n"
        "if __name__ == '__main__':\n"
        "    rows = tp.from_arrow(pa.table({'x': range(64)})).sharding_filter(4)\n"
        "    pipe = rows.map(noisy).batch(2).collate()\n"
        "    print(len(list(tp.Loader(pipe, num_workers=1))))\n"
    )
    done = subprocess.run(
        [*python(), script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "32\n"
    assert "draws from Python's global generator" in done.stderr


def test_calls_after_the_first_few_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    states = random.getstate
    looks: list[int] = []

    def counted() -> Any:
        looks.append(1)
        return states()

    monkeypatch.setattr(random, "getstate", counted)
    pipe = rows(500).map(lambda row: row["x"])
    for _ in range(3):
        list(islice(pipe, 500))
    assert 0 < len(looks) <= 40
