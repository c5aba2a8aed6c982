"""``pipe.to_hf()``: rows in stages and loaders of Hugging Face's ``datasets``, with a position everywhere."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node

ROWS = 53
TABLE = pa.table({"n": list(range(ROWS)), "text": [f"row {n}" for n in range(ROWS)]})


def numbered() -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(num_shards=4).shuffle(16, seed=1)


def is_kept(row: dict[str, Any]) -> bool:
    return int(row["n"]) % 3 > 0


def is_even(row: dict[str, Any]) -> bool:
    return int(row["n"]) % 2 == 0


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(row["text"])}


def twice(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"n": [n for n in rows["n"] for _ in range(2)]}


PIPELINES: dict[str, Callable[[], tp.Pipeline]] = {
    "counted": numbered,
    "filtered": lambda: numbered().filter(is_kept),
    "python rows": lambda: tp.from_dataset(TABLE.to_pylist()).sharding_filter(num_shards=4),
}
STAGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda rows: rows,
    "map": lambda rows: rows.map(longer),
    "batched map": lambda rows: rows.map(
        twice, batched=True, batch_size=5, remove_columns=["n", "text"]
    ),
    "filter": lambda rows: rows.filter(is_even),
    "remove_columns": lambda rows: rows.remove_columns("text"),
    "torch": lambda rows: rows.with_format("torch"),
    "skip": lambda rows: rows.skip(5),
    "take": lambda rows: rows.take(20),
    "node": lambda rows: split_dataset_by_node(rows, 1, 2),
    "node by rows": lambda rows: split_dataset_by_node(rows, 1, 3),
}


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", PIPELINES)
def test_a_dataset_goes_on_after_any_of_its_rows(kind: str, stage: str, epoch: int) -> None:
    def dataset() -> Any:
        made = STAGES[stage](PIPELINES[kind]().to_hf())
        made.set_epoch(epoch)
        return made

    first = dataset()
    rows, states = [], []
    for row in first:
        rows.append(row)
        states.append(json.dumps(first.state_dict()))
    assert rows
    for taken in (1, 2, 7, len(rows) - 1, len(rows)):
        resumed = dataset()
        resumed.load_state_dict(json.loads(states[taken - 1]))
        assert repr(list(resumed)) == repr(rows[taken:])


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("counted", "torch"),
        ("counted", "batched map"),
        ("filtered", "filter"),
        ("python rows", "map"),
    ],
)
def test_loaders_go_on_after_any_batch(kind: str, stage: str) -> None:
    for workers, epoch in ((0, 1), (2, 1)):

        def loader(
            workers: int = workers, epoch: int = epoch, loader: Any = StatefulDataLoader
        ) -> Any:
            rows = STAGES[stage](PIPELINES[kind]().to_hf())
            rows.set_epoch(epoch)
            return loader(rows, batch_size=4, num_workers=workers)

        batches = list(loader())
        for taken in (1, len(batches) - 2):
            first = loader()
            iterator = iter(first)
            for _ in range(taken):
                next(iterator)
            state = first.state_dict()
            del iterator
            resumed = loader()
            resumed.load_state_dict(state)
            assert repr(list(resumed)) == repr(batches[taken:])
        assert repr(list(loader(loader=DataLoader))) == repr(batches)


def numbers(rows: Any) -> list[int]:
    return [int(row["n"]) for row in rows]


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    rows = numbered().to_hf()
    loader = DataLoader(rows, batch_size=None, num_workers=2, persistent_workers=True)
    alone, by_workers = [], []
    for epoch in range(3):
        rows.set_epoch(epoch)
        alone.append(numbers(rows))
        by_workers.append(numbers(loader))
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in alone + by_workers)
    assert len(set(map(tuple, alone))) == len(set(map(tuple, by_workers))) == 3
    assert alone[0] == numbers(numbered())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nodes_and_their_workers_have_every_row_once(ranks: int) -> None:
    for epoch in (0, 1):
        rows = []
        for rank in range(ranks):
            part = split_dataset_by_node(numbered().to_hf(), rank, ranks)
            part.set_epoch(epoch)
            rows += numbers(DataLoader(part, batch_size=None, num_workers=1 + (ranks == 2)))
        assert sorted(rows) == list(range(ROWS))
    parts = [numbered().to_hf().shard(4, index) for index in range(4)]  # as Accelerate has it
    assert sorted(n for part in parts for n in numbers(part)) == list(range(ROWS))


def test_the_order_of_parts_is_that_of_the_whole() -> None:
    parts = [split_dataset_by_node(numbered().to_hf(), rank, 2) for rank in range(2)]
    taken = [n for pair in zip(*map(numbers, parts), strict=False) for n in pair]
    assert taken == numbers(numbered())[: len(taken)]


def test_a_pipeline_that_repeats_has_no_end_and_goes_on_in_any_epoch() -> None:
    rows = numbered().filter(is_kept).repeat().to_hf()
    found, states = [], []
    for row in rows:
        found.append(row["n"])
        states.append(rows.state_dict())
        if len(found) == 200:
            break
    for taken in (30, 100, 150):
        resumed = numbered().filter(is_kept).repeat().to_hf()
        resumed.load_state_dict(states[taken - 1])
        assert numbers(islice(resumed, 200 - taken)) == found[taken:]


def test_columns_are_known_without_asking_for_a_row_where_they_have_types() -> None:
    rows = numbered().tokenize("bytes", "text").to_hf()
    assert rows.column_names == ["n", "input_ids"]
    assert rows.features["n"] == datasets.Value("int64")
    assert rows.num_shards == 4
    assert next(iter(rows.with_format("torch")))["input_ids"].dtype in (torch.int32, torch.int64)
    assert PIPELINES["python rows"]().to_hf().column_names is None
    assert tp.from_iterable(lambda: [{"n": 1}]).to_hf().column_names is None


def test_more_workers_than_shards_leave_some_idle() -> None:
    rows = tp.from_arrow(TABLE).to_hf()
    assert rows.num_shards == 1
    assert numbers(DataLoader(rows, batch_size=None, num_workers=2)) == list(range(ROWS))


def test_it_can_be_copied_and_pickled_also_while_it_is_iterated() -> None:
    rows = numbered().to_hf()
    iterator = iter(rows)
    next(iterator)
    for same in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows)):
        assert numbers(same) == numbers(numbered())


def test_a_dataset_of_ours_may_be_the_source_of_a_pipeline() -> None:
    assert sorted(row["n"] for row in tp.from_hf(numbered().to_hf())) == list(range(ROWS))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: numbered().batch(4).to_hf(), r"got batch\(4\); leave that and what follows it out"),
        (lambda: numbered().distributed(rank=0, world_size=2).to_hf(), "leave .distributed.. out"),
        (lambda: list(tp.from_dataset(range(3)).to_hf()), "must be a dict, got 0; make dicts"),
        (lambda: numbered().to_hf().shard(3, 0), r"3 ranks or workers cannot share the 4 .*\[1, 2, 4\]"),
        (lambda: tp.from_arrow(TABLE).to_hf().shard(2, 1), r"add .sharding_filter\(\) to the pipeline"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(use: Callable[[], Any], message: str) -> None:
    with pytest.raises((tp.ConfigError, tp.TopologyError), match=message):
        use()


def test_states_of_other_data_or_of_other_parts_are_refused() -> None:
    rows = numbered().to_hf()
    next(iter(rows))
    state = rows.state_dict()

    def refused(other: Any, state: Any) -> str:
        other.load_state_dict(state)
        with pytest.raises(tp.StateError) as error:
            next(iter(other))
        return str(error.value)

    assert "seed: saved 1, now 2" in refused(
        tp.from_arrow(TABLE).sharding_filter(num_shards=4).shuffle(16, seed=2).to_hf(), state
    )
    part = split_dataset_by_node(numbered().to_hf(), 1, 2)
    assert "must be of part 1 of 2, got one of part 0 of 1" in refused(part, state)
    table = datasets.Dataset.from_list(TABLE.to_pylist()).to_iterable_dataset()
    next(iter(table))
    assert "must be one of pipe.to_hf()" in refused(numbered().to_hf(), table.state_dict())
    damaged = copy.deepcopy(state)
    damaged["examples_iterable"]["trainpipes"] = "{"
    assert "trainpipes: damaged" in refused(numbered().to_hf(), damaged)


def test_an_iterable_dataset_is_read_by_threads_that_have_not_read_one_before() -> None:
    """Each thread has file systems of its own, which all such datasets keep in one place."""
    made = datasets.Dataset.from_list([{"n": n} for n in range(24)])

    def make() -> tp.Pipeline:
        return tp.from_hf(made.to_iterable_dataset()).sharding_filter(4).batch(3)

    state, expected = make().state_at(1), list(make())
    for _ in range(10):
        pipe = make()
        pipe.load_state_dict(state)
        assert list(tp.Loader(pipe, threads=4)) == expected[1:]
