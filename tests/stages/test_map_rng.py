"""``map(rng=True)``: what a row is drawn depends on the seed, the function, the epoch and the row, and on
nothing else."""

from __future__ import annotations

import random
import re
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
from torch.utils.data import DataLoader

import map_functions as fn
import trainpipes as tp
from interpreters import python
from resuming import check_resume
from trainpipes.samplers import WeightedRandomSampler
from trainpipes.stages.map import Map

Row = dict[str, Any]
ROWS = 60


def drawn(row: Row, rng: np.random.Generator) -> Row:
    return {**row, "drawn": rng.bit_generator.random_raw(2).tolist()}


def drawn_again(row: Row, rng: np.random.Generator) -> Row:
    return {**row, "again": rng.bit_generator.random_raw(2).tolist()}


def drawn_for_all(batch: Any, rng: np.random.Generator) -> tuple[Any, list[int]]:
    return batch, rng.bit_generator.random_raw(2).tolist()


def source(rows: int = ROWS) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(rows)}))


def by_row(items: Any, column: str = "drawn") -> dict[int, list[int]]:
    """What each row was drawn, whatever the order and the batches."""
    found = {}
    for item in items:
        for row in item if isinstance(item, list) else [item]:
            assert row["x"] not in found
            found[row["x"]] = row[column]
    return found


EXPECTED = by_row(source().map(drawn, rng=True))

WAYS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: source().shuffle(9, seed=5).map(drawn, rng=True),
    "before a shuffle": lambda: source().map(drawn, rng=True).shuffle(9),
    "before a filter and a shuffle": lambda: (
        source().map(drawn, rng=True).filter(lambda row: True).shuffle(9)
    ),
    "after a filter": lambda: source().filter(lambda row: True).shuffle(9).map(drawn, rng=True).batch(3),
    "in shards": lambda: source().sharding_filter(6).shuffle(9).map(drawn, rng=True).batch(4),
    "in any order": lambda: source().shuffle(scope="global").map(drawn, rng=True).batch(7),
    "after a cache": lambda: source().cache().shuffle(9).map(drawn, rng=True).batch(7),
    "without threads": lambda: tp.Loader(source().map(drawn, rng=True).batch(7), threads=0),
    "in a thread": lambda: tp.Loader(source().map(drawn, rng=True).batch(7), threads=2),
    "in workers": lambda: tp.Loader(
        source().sharding_filter(6).map(drawn, rng=True).batch(4), num_workers=2
    ),
    "in a DataLoader's workers": lambda: DataLoader(
        source().sharding_filter(6).map(drawn, rng=True).batch(4), batch_size=None, num_workers=2,
        generator=torch.Generator(),
    ),
    "in several threads": lambda: source().map(drawn, rng=True, num_workers=3).batch(7),
    "of a stream": lambda: (
        tp.from_iterable(lambda: ({"x": x} for x in range(ROWS))).shuffle(9).map(drawn, rng=True).batch(4)
    ),
    "of tensors": lambda: (
        tp.from_tensors(x=torch.arange(ROWS)).shuffle(9).map(lambda row: {"x": int(row["x"])})
        .map(drawn, rng=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_drawn_the_same_in_whatever_order_and_company(way: str) -> None:
    assert by_row(WAYS[way]()) == EXPECTED


def test_every_epoch_draws_anew_and_rolls_on_under_repeat() -> None:
    pipe = source().shuffle(9).map(drawn, rng=True)
    epochs = [by_row(pipe) for _ in range(3)]
    assert epochs[0] == EXPECTED
    assert not any(epochs[0][x] == epochs[1][x] or epochs[1][x] == epochs[2][x] for x in epochs[0])
    rows = [row for batch in pipe.repeat(3).batch(7) for row in batch]
    assert [by_row(rows[n : n + ROWS]) for n in range(0, 3 * ROWS, ROWS)] == epochs
    dealt = source().sharding_filter(4).shuffle(9).map(drawn, rng=True).batch(4).repeat(3)
    rows = [row for batch in dealt for row in batch]
    assert [by_row(rows[n : n + ROWS]) for n in range(0, 3 * ROWS, ROWS)] == epochs


def test_another_seed_another_function_and_another_version_draw_anew() -> None:
    found = [
        by_row(source().map(drawn, rng=True, seed=1)),
        by_row(source().map(drawn_again, rng=True), "again"),
        by_row(source().map(drawn, rng=True, version="2")),
        EXPECTED,
    ]
    for x in range(ROWS):
        assert len({tuple(one[x]) for one in found}) == 4


def test_the_same_function_twice_in_a_chain_draws_twice() -> None:
    def first(row: Row) -> Row:
        return {**row, "drawn": 0, "first": row["drawn"]}

    rows = list(source().map(drawn, rng=True).map(first).map(drawn, rng=True).shuffle(9))
    assert by_row(rows, "first") == EXPECTED
    assert not any(row["first"] == row["drawn"] for row in rows)
    other = source().map(drawn, rng=True, seed=9).map(drawn, rng=True).map(drawn, rng=True)
    assert by_row(other) == by_row(rows)  # the second with that seed


def test_batches_are_drawn_by_their_rows() -> None:
    def draws(pipe: Any) -> list[list[int]]:
        return [drawn for _, drawn in pipe]

    batches = source().shuffle(9).batch(4)
    pipe = batches.map(drawn_for_all, rng=True)
    above, next_epoch = draws(pipe), draws(pipe)
    padded = draws(batches.pad_collate().map(drawn_for_all, rng=True))
    collated = batches.collate().map(drawn_for_all, rng=True, num_workers=2)
    assert above == padded == draws(tp.Loader(collated, threads=2))
    others = draws(source().batch(4).map(drawn_for_all, rng=True))
    assert len({tuple(one) for one in [*above, *next_epoch, *others]}) == 3 * ROWS // 4


def test_a_row_that_a_sampler_draws_twice_is_drawn_twice() -> None:
    rare = WeightedRandomSampler([1.0, 0.0, 9.0], num_samples=40)
    rows = [{"x": x} for x in range(3)]
    for pipe in (tp.from_dataset(rows).shuffle(sampler=rare), tp.from_dataset(rows, sampler=rare)):
        pipe = pipe.sharding_filter(4).map(drawn, rng=True)
        found = list(pipe)
        assert len({row["x"] for row in found}) == 2
        assert len({tuple(row["drawn"]) for row in found}) == 40
        assert not {tuple(row["drawn"]) for row in found} & {tuple(row["drawn"]) for row in pipe}
    check_resume(pipe.batch(3), points=4, epochs=2, processes=0)


def test_rows_packed_of_one_document_are_drawn_apart() -> None:
    long = [list(range(50)), [1, 2], list(range(33)), [3]]
    for method in ("best_fit", "first_fit", "concat"):
        packed = tp.from_arrow(pa.table({"input_ids": long})).pack(8, method=method)
        pipe = packed.map(drawn, rng=True)
        found = list(pipe)
        assert len({tuple(row["drawn"]) for row in found}) == len(found) > 9
        assert not {tuple(row["drawn"]) for row in found} & {tuple(row["drawn"]) for row in pipe}
        check_resume(pipe.repeat(2), points=4, epochs=1, processes=0)


def test_rows_made_of_one_row_are_drawn_apart() -> None:
    made = source(3).flat_map(lambda row: [row] * 400)  # more of a row than are made at a time
    found = [tuple(row["drawn"]) for row in made.map(drawn, rng=True)]
    assert len(set(found)) == len(found) == 1200
    ids = made.map_batches(lambda rows: pa.table({"input_ids": [[5] * 8] * len(rows)}))
    options = {"vocab_size": 90, "mask_token_id": 1, "special_ids": [0]}
    masked = ids.mask_tokens(**options).batch(1200).pad_collate()
    labels = next(iter(masked))["labels"].tolist()
    assert len(set(map(tuple, labels))) > 40


def test_a_state_knows_of_the_seed_and_not_of_the_workers() -> None:
    state = source().map(drawn, rng=True).state_dict()
    for other in (source().map(drawn, rng=True, seed=1), source().map(drawn)):
        with pytest.raises(tp.StateError):
            other.load_state_dict(state)
    source().map(drawn, rng=True, num_workers=4, method="process").load_state_dict(state)
    # Without generators a stage is known as it was before there were any.
    assert Map(fn=drawn, seed=3).identity() == {"stage": "map", "fn": f"{drawn.__module__}.drawn"}


def test_global_generators_are_left_alone() -> None:
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    list(source().map(drawn, rng=True).batch(4).map(drawn_for_all, rng=True))
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]


# Draws are as random as their generator is


def uniform(row: Row, rng: np.random.Generator) -> Row:
    return {"x": row["x"], "u": rng.random(3), "n": rng.normal(), "k": rng.integers(10)}


def test_draws_of_neighboring_rows_and_epochs_are_independent() -> None:
    rows = 4000
    pipe = source(rows).map(uniform, rng=True)
    epochs = [list(pipe) for _ in range(2)]
    u = np.array([[row["u"] for row in epoch] for epoch in epochs])  # [epochs, rows, draws]
    assert len(np.unique(u)) == u.size
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    chi = ((counts - u.size / 50) ** 2 / (u.size / 50)).sum()
    assert 20 < chi < 100  # 49 degrees of freedom
    small = 4 / np.sqrt(rows)
    pairs = [
        (u[0, :-1, 0], u[0, 1:, 0]),  # a row and the next
        (u[0, :, 0], u[1, :, 0]),  # an epoch and the next
        (u[0, :, 0], u[0, :, 1]),  # a draw and the next
        (u[0, :, 0], np.arange(rows)),
    ]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < small for a, b in pairs)
    normal = np.array([row["n"] for row in epochs[0]])
    assert abs(normal.mean()) < small
    assert abs(normal.std() - 1) < small
    digits = np.bincount([row["k"] for row in epochs[0]], minlength=10)
    assert ((digits - rows / 10) ** 2 / (rows / 10)).sum() < 30  # 9 degrees of freedom


# Golden draws


def test_draws_are_those_that_earlier_versions_gave(golden: Any) -> None:
    def named(**options: Any) -> list[list[Any]]:
        pipe = source(6).map(drawn, rng=True, version="golden", **options).batch(3)
        above = pipe.map(drawn_for_all, rng=True, version="golden", **options)
        return [[[[row["drawn"] for row in rows], said] for rows, said in above] for _ in range(2)]

    found = {"seed 0": named(), "seed 42": named(seed=42), "seed -1": named(seed=-1)}
    golden("row_draws.json", found)


def said_of(pipe: Any) -> list[str]:
    """The warnings of one epoch."""
    with warnings.catch_warnings(record=True, action="always") as caught:
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


class NoisyRows:
    """Augments as many datasets of torch do."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, n: int) -> float:
        return n + random.random()


class NoisyBatches(NoisyRows):
    def __getitems__(self, keys: list[int]) -> list[float]:
        return [n + np.random.rand() for n in keys]


IMAGES = tp.from_dataset([{"image": np.zeros((1, 1, 1), np.uint8)}] * 9)
#: What draws from which generator, and what it is told to do.
DRAWN: dict[str, tuple[Callable[[], tp.Pipeline], str, str]] = {
    "map": (lambda: source().map(lambda row: {**row, "n": np.random.rand()}), "NumPy's", "pass rng=True"),
    "map of python": (lambda: source().map(lambda row: random.gauss(0, 1)), "Python's", "rng=True"),
    "map of torch": (lambda: source().map(lambda row: torch.rand(3)), "torch's", "rng=True"),
    "map of two": (
        lambda: source().map(lambda row: (random.random(), np.random.rand())), "NumPy's and Python's", "rng",
    ),
    "map of some": (
        lambda: source().map(lambda row: random.random() if row["x"] % 5 == 3 else 0), "Python's", "rng=",
    ),
    "map with rng": (
        lambda: source().map(lambda row, rng: random.random(), rng=True), "Python's", "that rng=True gives",
    ),
    "map in threads": (
        lambda: source().map(lambda row: np.random.rand(), num_workers=2), "NumPy's", "pass rng=True",
    ),
    "map in processes": (
        lambda: source().map(fn.drawn_from_numpy, num_workers=2, method="process"),
        "NumPy's", r"^map\(drawn_from_numpy",
    ),
    "map of batches": (lambda: source().batch(4).map(lambda b: (b, random.random())), "Python's", "rng=True"),
    "filter": (lambda: source().filter(lambda row: random.random() < 0.5), "Python's", r"sample\(fraction\)"),
    "flat_map": (lambda: source().flat_map(several), "Python's", r"map\(fn, rng=True\) before it"),
    "map_batches": (
        lambda: source().map_batches(lambda c: {"n": np.random.rand(len(c["x"]))}, format="numpy"),
        "NumPy's", r"map\(fn, rng=True\) before it, or in a TableStage",
    ),
    "with_columns": (
        lambda: source().with_columns(lambda c: {"n": torch.rand(len(c["x"]))}, format="torch"),
        "torch's", "TableStage",
    ),
    "RowStage": (lambda: source().then(Noisy()), "Python's", r"use map\(fn, rng=True\) instead"),
    "TableStage": (lambda: source().then(NoisyTable()), "NumPy's", r"define open\(\)"),
    "BatchStage": (lambda: source().batch(4).then(NoisyBatch()), "torch's", r"map\(fn, rng=True\) instead"),
    "collate": (lambda: source().batch(4).collate(lambda b: (b, np.random.rand())), "NumPy's", "instead"),
    "image_transform": (
        lambda: IMAGES.image_transform(lambda image: image + random.randrange(9), version="1"),
        "Python's", "draw from torch's generator",
    ),
    "from_dataset": (
        lambda: tp.from_dataset(NoisyRows()), "Python's", r"^NoisyRows\[.*map\(fn, rng=True\) after it",
    ),
    "from_dataset of many": (
        lambda: tp.from_dataset(NoisyBatches()).shuffle(4).batch(2), "NumPy's", "after it",
    ),
    "from_iterable in a thread": (
        lambda: tp.Loader(tp.from_iterable(lambda: iter([random.random()])), threads=1),
        "Python's", r"^from_iterable\(.*random\.Random\(0\)",
    ),
    "a function with a name": (
        lambda: source().map(augment), "Python's", r"^map\(augment \(test_map_rng.py:\d+",
    ),
}  # fmt: skip


def augment(row: Row) -> Row:
    return {**row, "n": random.random()}


@pytest.mark.parametrize("name", DRAWN)
def test_a_function_that_draws_from_a_global_generator_is_told_once_what_to_do(name: str) -> None:
    make, whose, cure = DRAWN[name]
    pipe = make()
    # A generator makes 624 numbers at a time, which looks like a seed: here that is not while it is watched.
    random.seed(0)
    random.random()
    np.random.seed(0)
    np.random.rand()
    found = said_of(pipe)
    assert len(found) == 1, found
    assert re.search(f"draws from {whose} global generators?, which no state holds", found[0])
    assert re.search(cure, found[0])
    assert said_of(pipe) == []


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
    "nothing is drawn": lambda: source().map(lambda row: {**row, "y": row["x"] + 1}),
    "a generator of its own": lambda: source().map(lambda row: np.random.default_rng(row["x"]).random()),
    "rng": lambda: source().map(lambda row, rng: rng.random(), rng=True),
    "a seed of the row": lambda: source().map(seeded),
    "the state is put back": lambda: source().map(put_back),
    "torch's in image_transform": lambda: (
        IMAGES.image_transform(lambda image: image + torch.randint(9, ()), version="1")
    ),
    "stages of this library": lambda: (
        source().shuffle(9).sample(0.5).map(lambda row: row).batch(4).collate().repeat(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("workers", "threads", "draws"), [(0, 2, False), (2, 2, False), (0, 1, True)]
)
def test_a_training_loop_that_draws_beside_threads_of_the_pool_accuses_no_function_that_does_not(
    workers: int, threads: int, draws: bool
) -> None:
    def slow(row: Row) -> Row:
        return {**row, "y": sum(range(50_000)) + (float(torch.rand(())) if draws else 0)}

    rows = source(48).sharding_filter(8).shuffle(16)
    pipe = rows.map(slow, num_workers=workers).batch(2).collate()
    layer = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in tp.Loader(pipe, threads=threads):
            torch.nn.functional.dropout(layer(torch.ones(4, 2, 8))[0])
            random.random()
    told = ["draws from torch's global generator" in str(one.message) for one in caught]
    assert told == [True] * draws


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
    options: Any = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    done = subprocess.run([*python(), script], **options)
    assert done.stdout == "32\n"
    assert "draws from Python's global generator" in done.stderr


def test_calls_after_the_first_few_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    states = random.getstate
    looks: list[int] = []

    def counted() -> Any:
        looks.append(1)
        return states()

    monkeypatch.setattr(random, "getstate", counted)
    pipe = source(500).map(lambda row: row["x"])
    for _ in range(3):
        list(islice(pipe, 500))
    assert 0 < len(looks) <= 40
