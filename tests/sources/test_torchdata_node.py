"""Items of torchdata nodes as rows: as the node gives them, and resumed where it stood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Mapper,
    MultiNodeWeightedSampler,
    Prefetcher,
)

import trainpipes as tp
from resuming import check_resume
from trainpipes.nodes import Batch, FromArrow
from trainpipes.testing import digest


class Noise(BaseNode[dict[str, Any]]):
    """Rows with random numbers of a generator that goes on from epoch to epoch; its state is a tensor."""

    def __init__(self, count: int = 23) -> None:
        super().__init__()
        self.count = count
        self.generator = torch.Generator()
        self.generator.manual_seed(7)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.given = 0
        if initial_state is not None:
            self.given = initial_state["given"]
            self.generator.set_state(initial_state["generator"])

    def next(self) -> dict[str, Any]:
        if self.given >= self.count:
            raise StopIteration
        self.given += 1
        return {"x": self.given - 1, "noise": float(torch.rand(1, generator=self.generator))}

    def get_state(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}


def weighted() -> BaseNode[Any]:
    sources = {"a": IterableWrapper(range(20)), "b": IterableWrapper(range(100, 115))}
    return MultiNodeWeightedSampler(sources, {"a": 0.7, "b": 0.3}, seed=3)


NODES: dict[str, Callable[[], BaseNode[Any]]] = {
    "iterable": lambda: IterableWrapper(range(17)),
    "weighted": weighted,
    "own": Noise,
    "chain": lambda: Prefetcher(Mapper(Batcher(weighted(), 3, drop_last=False), tuple), 2),
}  # fmt: skip


def items(node: BaseNode[Any]) -> list[Any]:
    node.reset()
    return list(node)


@pytest.mark.parametrize("name", NODES)
def test_items_are_those_that_the_node_gives(name):
    pipe = tp.from_torchdata(NODES[name]())
    assert [digest(item) for item in pipe] == [digest(item) for item in items(NODES[name]())]


def test_epochs_of_torchdatas_nodes_are_those_that_the_node_counts():
    node, pipe = weighted(), tp.from_torchdata(weighted())
    for _ in range(3):
        assert list(pipe) == items(node)


@pytest.mark.parametrize("name", NODES)
def test_a_run_resumes_exactly_also_in_later_epochs_and_in_fresh_processes(name):
    every = 9 if name == "chain" else 2  # its thread takes its time to end
    node = NODES[name]
    shuffled = lambda: tp.from_torchdata(node()).shuffle(8, seed=1).batch(3)  # noqa: E731
    check_resume(shuffled, processes=int(name in ("own", "chain")), every=every)
    endless = lambda: tp.from_torchdata(node()).batch(4).repeat(2).to("cpu")  # noqa: E731
    check_resume(endless, processes=0, epochs=2, every=every)


def test_an_epoch_is_the_same_whether_the_one_before_it_was_read_to_its_end():
    def second_epoch(read: int) -> list[Any]:
        pipe = tp.from_torchdata(Noise())
        iterator = iter(pipe)
        for _ in range(read):
            next(iterator)
        return list(pipe)

    assert second_epoch(23) == second_epoch(5) == second_epoch(1)


def test_two_pipelines_over_one_node_do_not_disturb_each_other():
    node = Noise()
    one, other = tp.from_torchdata(node), tp.from_torchdata(node).batch(5)
    expected, batches = list(tp.from_torchdata(Noise())), list(tp.from_torchdata(Noise()).batch(5))
    first, second = iter(one), iter(other)
    found = [next(first), next(first)]
    found_batches = [next(second)]
    found += list(first)
    found_batches += list(second)
    assert found == expected
    assert found_batches == batches


@pytest.mark.usefixtures("failed_workers_let_go")
def test_more_than_one_consumer_is_refused_with_the_reason():
    pipe = tp.from_torchdata(Noise()).batch(4)
    with pytest.raises(tp.TopologyError, match=r"2 ranks: each of several ranks"):
        list(pipe.distributed(rank=0, world_size=2))
    with pytest.raises(tp.TopologyError, match=r"2 DataLoader workers: each of several ranks"):
        list(DataLoader(pipe, batch_size=None, num_workers=2))
    with pytest.raises(tp.ConfigError, match=r"sharding_filter\(4\) cannot follow.*own"):
        tp.from_torchdata(Noise()).sharding_filter(4)
    with pytest.raises(tp.TopologyError, match="its own copy"):
        pipe.explain(world_size=2)


def test_one_worker_reads_it():
    expected = [digest(item) for item in tp.from_torchdata(Noise()).batch(4)]
    pipe = tp.from_torchdata(Noise()).batch(4)
    assert [digest(item) for item in DataLoader(pipe, batch_size=None, num_workers=1)] == expected
    assert [digest(item) for item in tp.Loader(pipe, num_workers=1, epoch=0)] == expected


def test_rows_of_a_node_become_columns_where_they_are_needed():
    pipe = tp.from_torchdata(Noise()).map(lambda row: {**row, "text": "t" * row["x"]})
    batches = list(pipe.tokenize("bytes").batch(8).pad_collate())
    assert [len(batch["x"]) for batch in batches] == [8, 8, 7]
    assert batches[0]["x"].tolist() == list(range(8))


def test_what_a_node_reads_may_be_a_pipeline_over_another_node():
    class Outer(Noise):
        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            self.inner = list(tp.from_torchdata(IterableWrapper(range(self.count))))
            super().reset(initial_state)

    assert list(tp.from_torchdata(Outer(5)).batch(2)) == list(tp.from_torchdata(Noise(5)).batch(2))


def test_a_nodes_state_may_have_any_keys():
    class Keyed(Noise):
        def get_state(self) -> dict[str, Any]:
            return {**super().get_state(), "first": 1, "epochs": 2, "dataset": 3}

    check_resume(lambda: tp.from_torchdata(Keyed()).batch(4), processes=0, epochs=3, every=2)


def test_what_cannot_be_kept_in_a_state_is_refused():
    class Odd(Noise):
        def get_state(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(tp.ConfigError, match=r"state of .*Odd holds what cannot be kept as JSON"):
        list(tp.from_torchdata(Odd()))


def test_a_state_of_another_node_is_refused():
    state = tp.from_torchdata(Noise()).batch(4).state_dict()
    with pytest.raises(tp.StateError):
        tp.from_torchdata(IterableWrapper(range(9))).batch(4).load_state_dict(state)

    class Strict(Noise):
        def __init__(self, fits: bool) -> None:
            super().__init__()
            self.fits = fits

        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            if initial_state is not None and not self.fits:
                raise KeyError("generator")
            super().reset(initial_state)

    state = tp.from_torchdata(Strict(True)).batch(4).state_at(2)
    later = tp.from_torchdata(Strict(False)).batch(4)
    later.load_state_dict(state)
    with pytest.raises(tp.StateError, match="cannot go to the position"):
        list(later)


def test_what_is_no_node_is_refused_with_a_way_out():
    with pytest.raises(tp.ConfigError, match="from_iterable"):
        tp.from_torchdata(range(3))  # type: ignore[arg-type]
    import pyarrow as pa

    with pytest.raises(tp.ConfigError, match="write that as a pipeline"):
        tp.from_torchdata(Batch(FromArrow(table=pa.table({"x": np.arange(3)})), 2))
