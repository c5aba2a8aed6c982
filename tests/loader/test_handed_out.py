"""Functions are called by the workers of a ``Loader``, and all else is done in the process that trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch
import torch.utils.data as td

import trainpipes as tp
from trainpipes.testing import digest

pytestmark = pytest.mark.usefixtures("no_processes_left")

TABLE = pa.table({"id": range(300), "text": [f"row {n}" for n in range(300)]})
#: Whether functions may be called in the process that trains.
HERE = False


def elsewhere() -> None:
    assert HERE or parent_process() is not None, "called in the process that trains"


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(4).shuffle(50, seed=1)


def mapped(row: dict[str, Any]) -> dict[str, Any]:
    elsewhere()
    return {"id": row["id"], "twice": 2 * row["id"]}


def drawn(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    elsewhere()
    return {**row, "noise": int(rng.integers(1000))}


def kept(row: dict[str, Any]) -> bool:
    elsewhere()
    return bool(row["id"] % 3)


def several(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    elsewhere()
    return ({"id": row["id"], "n": n} for n in range(row["id"] % 4))


def very_many(row: dict[str, Any]) -> Iterator[int]:
    return iter(range(5000 if row["id"] == 7 else 1))


def columns(table: pa.Table) -> dict[str, pa.Array]:
    elsewhere()
    return {"twice": pa.array([2 * n for n in table["id"].to_pylist()])}


def stacked(batch: list[Any]) -> Any:
    elsewhere()
    return torch.tensor([row["id"] for row in batch])


class Squares:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, n: int) -> int:
        elsewhere()
        return n * n


class Doubled(tp.RowStage):
    def apply(self, row: Any) -> Any:
        elsewhere()
        return {"id": 2 * row["id"]}


class OnBatches(tp.BatchStage):
    def apply(self, batch: Any) -> Any:
        elsewhere()
        return batch["id"] + 1


class OnTables(tp.TableStage):
    def apply(self, table: pa.Table) -> pa.Table:
        elsewhere()
        return table.select(["id"])


CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "map": lambda: rows().map(mapped).batch(4),
    "map with a generator": lambda: rows().map(drawn, rng=True).batch(4),
    "of batches": lambda: rows().batch(4).map(len).map(float),
    "filter": lambda: rows().filter(kept).batch(4),
    "filter before the shuffle": lambda: (
        tp.from_arrow(TABLE).filter(kept).sharding_filter(4).shuffle(50, seed=1).batch(4)
    ),
    "flat_map": lambda: rows().map(mapped).flat_map(several).batch(4),
    "flat_map of very many": lambda: rows().flat_map(very_many).batch(64),
    "map_batches": lambda: rows().map_batches(columns).batch(4),
    "with_columns": lambda: rows().with_columns(columns).batch(4),
    "collate": lambda: rows().batch(4).collate(stacked),
    "dataset": lambda: tp.from_dataset(Squares()).sharding_filter(4).shuffle(9).batch(4),
    "stages of one's own": lambda: (
        rows().then(OnTables()).then(Doubled()).batch(4).collate().then(OnBatches())
    ),
    "pack": lambda: (
        tp.from_dataset([{"input_ids": [n] * (n % 9)} for n in range(200)])
        .sharding_filter(4).shuffle(9).map(dict).pack(16).batch(2).pad_collate()
    ),
    "stream": lambda: tp.from_iterable(partial(map, dict, TABLE.to_pylist())).map(mapped).batch(4),
    "mix": lambda: (
        tp.mix({
            "a": tp.from_arrow(TABLE).shuffle(50).map(mapped),
            "b": tp.from_arrow(TABLE).map(mapped, version="2").flat_map(several, version="3"),
        }, weights={"a": 1, "b": 2}).sharding_filter(4).batch(4)
    ),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CHAINS)
def test_workers_call_functions_and_the_batches_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [digest(item) for item in tp.Loader(CHAINS[name](), num_workers=2)]
    start = "forkserver" if name == "map" else "fork"
    loader = tp.Loader(CHAINS[name](), num_workers=3, multiprocessing_context=start)
    begun = [digest(item) for item in islice(loader, 11)]
    monkeypatch.setattr(f"{__name__}.HERE", True)
    assert given == [digest(item) for item in tp.Loader(CHAINS[name]())]
    assert begun == given[:11]
    resumed = tp.Loader(CHAINS[name](), threads=0)
    resumed.load_state_dict(loader.state_dict())
    assert begun + [digest(item) for item in resumed] == given


class Unsendable:
    """What a function makes of a row, which no other process gets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("rows travel once")


def unsendable(row: dict[str, Any]) -> dict[str, Any]:
    elsewhere()
    return {"row": Unsendable(row["id"]), "pid": os.getpid()}


def numbers_of(batch: list[dict[str, Any]]) -> Any:
    elsewhere()
    return [row["row"].number for row in batch], {row["pid"] for row in batch} == {os.getpid()}


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_that_functions_make_do_not_travel_where_their_batches_do(drop_last: bool) -> None:
    batches = rows().map(unsendable).batch(7, drop_last=drop_last)
    found = list(tp.Loader(batches.collate(numbers_of), num_workers=2))
    assert [here for _, here in found] == [True] * len(found)
    plain = rows().batch(7, drop_last=drop_last)
    assert [ids for ids, _ in found] == [[row["id"] for row in batch] for batch in plain]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("above", "below"),
    [
        (lambda p: p.batch(7).pad_collate(), lambda p: p.map(mapped)),
        (lambda p: p.batch(7).collate(), lambda p: p.map(drawn, rng=True)),
        (lambda p: p.batch(7).map(stacked), lambda p: p.map(mapped).filter(kept)),
        (lambda p: p.batch(7).map(stacked), lambda p: p.filter(kept).map(mapped)),
        (lambda p: p.batch(7).collate().batch(2), lambda p: p.map(mapped)),
        (lambda p: p.bucket_by_length(7, column="id").collate(), lambda p: p.map(mapped)),
        (lambda p: p.batch(max_tokens=900, column="id").collate(), lambda p: p.map(mapped)),
        (lambda p: p.batch(7).skip(2).collate().take(9), lambda p: p.map(mapped)),
        (lambda p: p.batch(7).collate(), lambda p: p.map_batches(columns)),
    ],
)
def test_functions_below_and_above_batches_give_what_they_give_here(
    above: Callable[..., tp.Pipeline],
    below: Callable[..., tp.Pipeline],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pipe() -> tp.Pipeline:
        return above(below(rows().select("id", "text")))

    batches = tp.Loader(pipe(), num_workers=2)
    iterator = iter(batches)
    first = [digest(batch) for batch in islice(iterator, 5)]
    state = batches.state_dict()
    del iterator
    monkeypatch.setitem(globals(), "HERE", True)
    whole = [digest(batch) for batch in pipe()]
    resumed = tp.Loader(pipe(), threads=0)
    resumed.load_state_dict(state)
    assert first == whole[:5]
    assert [digest(batch) for batch in resumed] == whole[5:]


def test_without_functions_no_worker_is_started() -> None:
    before = psutil.Process().children()
    loader = tp.Loader(rows().batch(4).collate(), num_workers=2)
    next(iter(loader))
    assert psutil.Process().children() == before
    assert "none is started: they would call functions, and there are none" in str(loader.explain())
    said = str(tp.Loader(CHAINS["map"](), num_workers=2).explain())
    assert "2 processes, which call map(mapped (test_handed_out.py:" in said


def dies_once(mark: str, row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] in (40, 200) and not Path(mark + str(row["id"])).exists():
        Path(mark + str(row["id"])).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if row["id"] % 10 == 0:
        raise ValueError("a bad row")
    return row


def test_rows_left_out_are_counted_once_where_workers_die(tmp_path: Path) -> None:
    pipe = rows().map(partial(dies_once, str(tmp_path / "died")), version="1", on_error="skip")
    loader = tp.Loader(pipe.batch(4), num_workers=2)
    assert sum(map(len, loader)) == 270
    assert "30 of 300 rows left out" in str(loader.explain())


def ends(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 111:
        os._exit(0)
    return row


def test_a_row_that_ends_its_process_is_left_out_and_listed(tmp_path: Path) -> None:
    quarantine = tp.Quarantine(tmp_path / "bad")
    pipe = rows().map(mapped).map(ends, on_error=quarantine).batch(4)
    loader = tp.Loader(pipe, num_workers=2)
    assert sum(map(len, loader)) == 299
    (file,) = (tmp_path / "bad").iterdir()
    assert "3 workers died one after the other" in file.read_text()


class Fatal(Squares):
    def __getitem__(self, n: int) -> int:
        return n if n != 37 else os._exit(1)


def test_an_item_of_a_dataset_that_ends_its_process_is_named() -> None:
    loader = tp.Loader(tp.from_dataset(Fatal()).batch(4), num_workers=2)
    with pytest.raises(tp.WorkerError, match=r"Fatal\[…\]: .*exit code 1.*row 37\)"):
        list(loader)


def refusing(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row["id"] % 10 == 0:
        raise ValueError("a bad row")
    return [row]


def test_what_flat_map_leaves_out_is_counted_though_a_state_was_asked_for_first() -> None:
    loader = tp.Loader(rows().flat_map(refusing, on_error="skip").batch(4), num_workers=2)
    batches = iter(loader)
    loader.state_dict()
    assert sum(map(len, batches)) == 270
    assert "30 of 300 rows left out" in str(loader.explain())


def initialised(worker: int) -> None:
    raise RuntimeError(f"no GPU for worker {worker}")


def test_an_error_of_worker_init_fn_is_raised() -> None:
    loader = tp.Loader(CHAINS["map"](), num_workers=2, worker_init_fn=initialised)
    with pytest.raises(RuntimeError, match="no GPU for worker"):
        next(iter(loader))


IGNORED = pytest.mark.filterwarnings("ignore:.*draws from torch's global generator")


def global_draw(row: dict[str, Any]) -> float:
    return float(torch.rand(()))


@IGNORED
def test_global_draws_do_not_depend_on_which_worker_makes_them() -> None:
    pipe = rows().map(global_draw).batch(4)
    first, second = (
        [draw for batch in tp.Loader(pipe, num_workers=n, epoch=0) for draw in batch]
        for n in (1, 3)
    )
    assert first == second
    assert len(set(first)) == 300


class Noisy(Squares):
    """Augments as many datasets of torch do."""

    opened = ""

    def __getitem__(self, n: int) -> Any:
        return n, float(torch.rand(())), self.opened


WEIGHTED = tp.samplers.WeightedRandomSampler([100.0] * 3 + [0.1] * 97, 480)


@IGNORED
@pytest.mark.parametrize("size", [1, 16])
def test_a_row_that_is_drawn_again_gets_other_draws(size: int) -> None:
    for pipe in (
        tp.from_dataset(Noisy(), WEIGHTED),
        tp.from_dataset(range(100), WEIGHTED).map(lambda n: (n, float(torch.rand(())))),
    ):
        drawn = [row for batch in tp.Loader(pipe.batch(size), num_workers=2) for row in batch]
        assert len(drawn) == len(set(drawn)) == 480


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SEEDED: dict[str, Callable[[int], tp.Pipeline]] = {
    "shuffle": lambda seed: tp.from_dataset(Noisy()).shuffle(scope="global", seed=seed).batch(1),
    "buffer": lambda seed: tp.from_dataset(Noisy()).shuffle(9, seed=seed).batch(1),
    "sampler": lambda seed: tp.from_dataset(
        Noisy(), sampler=tp.samplers.RandomSampler(seed=seed)
    ).batch(1),
    "torch's sampler": lambda seed: tp.from_dataset(
        Noisy(), sampler=td.RandomSampler(range(100), generator=generator(seed))
    ).batch(1),
    "torch's batch sampler": lambda seed: tp.from_dataset(
        Noisy(),
        batch_sampler=td.BatchSampler(
            td.RandomSampler(range(100), generator=generator(seed)), 1, False
        ),
    ),
    "mix": lambda seed: tp.mix(
        {"a": tp.from_dataset(Noisy()).shuffle(9, seed=seed)}, weights={"a": 1}, max_epochs=1
    ).batch(1),
}


@IGNORED
@pytest.mark.parametrize("way", SEEDED)
def test_another_seed_of_the_pipeline_gives_the_same_rows_other_draws(way: str) -> None:
    def draws(seed: int, workers: int = 2) -> dict[int, float]:
        torch.manual_seed(workers)
        loader = tp.Loader(SEEDED[way](seed), num_workers=workers)
        return {row[0]: row[1] for batch in loader for row in batch}

    first, second = draws(1), draws(2)
    assert first.keys() == second.keys() == set(range(100))
    assert not set(first.values()) & set(second.values())
    assert draws(1, workers=3) == first


def opens(worker: int) -> None:
    td.get_worker_info().dataset.opened = f"in worker {worker}"  # type: ignore[union-attr]


@IGNORED
@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_worker_init_fn_gets_the_dataset_that_its_worker_reads(method: str) -> None:
    pipe = tp.from_dataset(Noisy()).batch(4)
    loader = tp.Loader(pipe, num_workers=2, worker_init_fn=opens, multiprocessing_context=method)
    opened = {row[2] for batch in loader for row in batch}
    assert opened
    assert opened <= {"in worker 0", "in worker 1"}
    loader = tp.Loader(CHAINS["map"](), num_workers=1, worker_init_fn=opens)
    with pytest.raises(AttributeError) as caught:
        next(iter(loader))
    assert "raised in Loader(worker_init_fn)" in "".join(caught.value.__notes__)


def test_a_start_method_that_is_none_is_refused() -> None:
    with pytest.raises(
        tp.ConfigError, match=r"multiprocessing_context\) must be one of .*'thread'"
    ):
        tp.Loader(CHAINS["map"](), num_workers=2, multiprocessing_context="thread")
    with pytest.raises(tp.ConfigError, match=r"Processes\(start_method\) must be one of .*got 3"):
        tp.Processes(2, start_method=3)


def test_another_batch_size_holds_from_a_batch_on_and_in_later_passes() -> None:
    loader = tp.Loader(rows().map(str).batch(4).collate(list), threads=0)
    batches = iter(loader)
    assert len([*islice(batches, 5)]) == 5
    state = loader.state_dict()
    passes = []
    for options in ({"threads": 0}, {"num_workers": 2, "persistent_workers": True}):
        loader = tp.Loader(rows().map(str).batch(7).collate(list), **options)
        loader.load_state_dict(state, allow_changes=["batch_size"])
        passes.append([list(loader) for _ in range(3)])
    assert passes[0] == passes[1]


def test_workers_make_rows_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe() -> tp.Pipeline:
        kept_rows = tp.from_arrow(TABLE).map(mapped).filter(kept).cache(tmp_path)
        return kept_rows.sharding_filter(4).shuffle(50, seed=1).batch(4)

    given = [digest(batch) for _ in range(2) for batch in tp.Loader(pipe(), num_workers=2)]
    again = tp.Loader(pipe(), threads=0)  # which finds them
    assert [digest(batch) for batch in again] == given[: len(given) // 2]
    tp.cache.clear(tmp_path)
    monkeypatch.setattr(f"{__name__}.HERE", True)
    assert [digest(batch) for batch in pipe()] == given[: len(given) // 2]


@pytest.mark.parametrize("make", [
    lambda: tp.concat(tp.from_dataset(Squares()), tp.from_dataset(Squares())),
    lambda: tp.mix(
        {"a": tp.from_arrow(TABLE).zip(tp.from_arrow(TABLE).map(mapped).select("twice"))},
        weights={"a": 1},
    ),
])  # fmt: skip
def test_functions_that_no_worker_calls_are_told(
    make: Callable[[], tp.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.HERE", True)
    said = r"(Squares\[…\] within concat|map\(mapped .* within zip)\(\) is called by this process and not"
    with pytest.warns(UserWarning, match=said):
        next(iter(tp.Loader(make().batch(4), num_workers=2)))
