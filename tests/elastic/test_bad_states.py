"""Ranks, environments and states that do not fit are refused, each with its own way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from hundred_rows import loaded
from ranks import in_worker
from trainpipes.engine.iterating import epoch_end
from trainpipes.order.layout import Topology

TABLE = pa.table({"x": list(range(203))})
#: What a refused environment is told to do.
BY_HAND = "pipe.distributed(rank=..., world_size=...)"


def rows(shards: int = 12, *, seed: int = 1, count: int = 203, size: int = 4) -> tp.Pipeline:
    table = pa.table({"x": list(range(count))})
    return tp.from_arrow(table).sharding_filter(shards).shuffle(20, seed=seed).batch(size)


def uncounted() -> tp.Pipeline:
    """Without an end, so that ranks need not agree on one; a state says where each shard stands."""
    return tp.from_arrow(TABLE).sharding_filter(12).filter(not_40).batch(4).repeat()


def shared() -> tp.Pipeline:
    """Of one shard, which all ranks read."""
    return tp.from_arrow(TABLE).sharding_filter(1).filter(not_40).repeat()


def not_40(row: dict[str, Any]) -> bool:
    return bool(row["x"] != 40)


def filtered(shards: int = 4) -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(shards).filter(over_40).batch(4)


def over_40(row: dict[str, Any]) -> bool:
    return bool(row["x"] > 40)


pytestmark = pytest.mark.filterwarnings("ignore:.*do not divide num_shards")


def states(
    world: int, steps: int | list[int] = 4, make: Any = rows, **options: Any
) -> list[dict[str, Any]]:
    """Each rank's state after so many steps."""
    found = []
    for rank in range(world):
        pipe = make(**options).distributed(rank=rank, world_size=world)
        taken = steps if isinstance(steps, int) else steps[rank]
        list(islice(pipe, taken))
        found.append(pipe.state_dict())
    return found


def refused(error: type[Exception], *said: str) -> Any:
    """Expects an error that says all of these, in their order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, said)))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has said anything."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# Ranks and workers


@pytest.mark.parametrize(("rank", "world"), [(1, 2), (0, 3), (1, 5)])
def test_the_states_of_ranks_that_share_shards_at_different_steps_are_not_merged(
    rank: int, world: int
) -> None:
    saved = states(world, [4 - (one == rank) for one in range(world)], shared)
    with refused(tp.StateError, "shard-0000", "differ", "merge states that one run saved"):
        tp.merge_states(saved)


@pytest.mark.parametrize("workers", [0, 1])
def test_several_ranks_without_a_sharding_filter_are_refused(workers: int) -> None:
    pipe = tp.from_arrow(pa.table({"x": [1, 2, 3]})).batch(2).distributed(rank=0, world_size=2)
    with refused(tp.TopologyError, "2 ranks", "the same rows", "add .sharding_filter()"):
        next(iter(tp.Loader(pipe, num_workers=workers)))


Told = Callable[[Any, Any], None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Sets what a launcher says in the environment."""

    def tell(rank: str | None, world: str | None) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
            if value is not None:
                monkeypatch.setenv(name, value)

    return tell


@pytest.mark.parametrize(
    ("rank", "world"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "two"), ("1", None), (None, "2")]
)
def test_an_environment_that_makes_no_sense_is_refused(rank: Any, world: Any, told: Told) -> None:
    told(rank, world)
    named = f"RANK={rank!r}, WORLD_SIZE={world!r}"
    with refused(tp.TopologyError, "0 <= RANK < WORLD_SIZE", named, BY_HAND):
        next(iter(rows()))
    assert next(iter(rows().distributed(rank=0, world_size=2)))  # what was said counts


@pytest.mark.parametrize(("rank", "world"), [("0", None), (None, "1"), ("0", "1")])
def test_an_environment_of_one_process_may_be_told_by_halves(
    rank: Any, world: Any, told: Told
) -> None:
    told(rank, world)
    assert len(list(rows())) == 51


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_an_environment_that_contradicts_torch_distributed_is_refused(told: Told) -> None:
    told("1", "4")
    said = "torch.distributed says rank 0 of 1", "RANK=1, WORLD_SIZE=4"
    with refused(tp.TopologyError, *said, BY_HAND):
        next(iter(rows()))
    told("0", "1")
    assert next(iter(rows()))


def test_an_epoch_of_unknown_length_on_several_ranks_needs_torch_distributed() -> None:
    pipe = filtered().distributed(rank=0, world_size=2)
    for subject in (pipe, tp.Loader(pipe), tp.Loader(pipe, num_workers=1)):
        said = "torch.distributed is not initialized", "init_process_group()", "add .repeat()"
        with refused(tp.TopologyError, *said):
            next(iter(subject))
    assert pipe.state_dict()["batches"] == 0  # type: ignore[index]


@pytest.mark.usefixtures("group_of_one")
def test_a_mesh_that_is_not_data_parallel_alone_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
    said = "must have only dimensions that are data parallel", "pass mesh['replicate', 'shard']"
    with refused(tp.ConfigError, *said):
        filtered().distributed(mesh=mesh)
    with refused(tp.ConfigError, "rank=0 and world_size=None; leave these out"):
        filtered().distributed(mesh=mesh["replicate", "shard"], rank=0)
    alone = filtered().distributed(mesh=mesh["replicate", "shard"])
    assert list(alone) == list(filtered())
    lightning: Any = SimpleNamespace(mesh_dim_names=("data_parallel", "tensor_parallel"))
    with refused(tp.ConfigError, "pass mesh['data_parallel']"):
        filtered().distributed(mesh=lightning)
    others = SimpleNamespace(mesh_dim_names=("dp",), mesh=torch.tensor([1, 2]), get_rank=lambda: 0)
    with refused(tp.ConfigError, "a mesh of this process, got one of ranks [1, 2] in rank 0"):
        filtered().distributed(mesh=others)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match=r"must be a DeviceMesh, got 'dp'; write mesh\['dp'\]"):
        filtered().distributed(mesh="dp")  # type: ignore[arg-type]


@pytest.mark.usefixtures("group_of_one")
def test_an_epoch_of_unknown_length_on_ranks_that_cannot_meet_is_refused() -> None:
    said = "one of 2 ranks, and torch.distributed has 1", "pipe.distributed(mesh=...)"
    with refused(tp.TopologyError, *said):
        next(iter(filtered().distributed(rank=0, world_size=2)))


def test_an_epoch_of_unknown_length_on_several_ranks_with_plain_workers_is_refused() -> None:
    pipe = filtered().distributed(rank=0, world_size=2)
    said = "2 ranks with DataLoader workers", "add .repeat()", "trainpipes.Loader"
    with in_worker(0, 2, 1000, pipe), refused(tp.TopologyError, *said):
        next(iter(pipe))


def test_ranks_do_not_agree_in_a_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_end, "members_of", lambda *_: (0, 1))
    said = "they cannot in a worker process", "distributed(rank=0, world_size=1)"
    with in_worker(0, 2, 1000, None), refused(tp.TopologyError, *said):
        epoch_end.agreement_over(Topology(0, 2))


# States that do not make one


@pytest.mark.parametrize(("make", "said"), [
    (lambda: [*states(3)[:2], states(3, seed=2)[2]], ("stages/shuffle/seed", "0 has 1", "2 has 2")),
    (lambda: [states(3)[0], *states(3, count=210)[1:]], ("data/rows", "0 has 203", "1 has 210")),
    (lambda: [states(3)[0], states(3, shards=24)[1]], ("num_shards", "0 has 12", "1 has 24")),
    (lambda: states(2, [25, 24]), ("epoch", "0 has 1", "1 has 0", "the same step")),
    (lambda: states(3, [4, 4, 3]), ("batches: state 0 has 12, state 2 has 9", "after the same step")),
    (lambda: states(3, [0, 1, 1]), ("batches: state 0 has 0, state 1 has 3", "after the same step")),
], ids=["options", "data", "shards", "epochs", "a step behind", "not started"])  # fmt: skip
def test_states_that_differ_in_what_ranks_share_are_not_merged(
    make: Callable[[], list[dict[str, Any]]], said: tuple[str, ...]
) -> None:
    with refused(tp.StateError, *said):
        tp.merge_states(make())


def test_a_rank_that_comes_twice_changes_nothing_and_is_named_where_another_is_missing() -> None:
    first, second, third = states(3, make=uncounted)
    whole = tp.merge_states([first, second, third])
    assert tp.merge_states([first, first, second, third]) == whole
    with refused(tp.StateError, "[2, 5, 8, 11]", "rank [2] of 3 (states [0, 1] are the same)"):
        tp.merge_states([first, first, second])


@pytest.mark.parametrize("world", [5, 8, 9])
def test_of_ranks_that_share_shards_one_may_be_missing(world: int) -> None:
    saved = states(world, 3, uncounted)
    for lost in range(world):
        assert tp.merge_states(saved[:lost] + saved[lost + 1 :]) == tp.merge_states(saved)


@pytest.mark.parametrize(("world", "there", "shards", "ranks"), [
    (2, [0], [1, 3, 5, 7, 9, 11], "rank [1] of 2"),
    (3, [0, 2], [1, 4, 7, 10], "rank [1] of 3"),
    (3, [1], [0, 2, 3, 5, 6, 8, 9, 11], "ranks [0, 2] of 3"),
    (4, [3, 1, 0], [2, 6, 10], "rank [2] of 4"),
    (12, [*range(3), *range(4, 12)], [3], "rank [3] of 12"),
])  # fmt: skip
def test_a_rank_that_is_missing_is_named_with_its_shards(
    world: int, there: list[int], shards: list[int], ranks: str
) -> None:
    saved = states(world, 1, uncounted)
    ways = "torch.distributed.checkpoint", "loader.full_state_dict()"
    with refused(tp.StateError, str(shards), ranks, "merge the states of all ranks", *ways):
        tp.merge_states([saved[rank] for rank in there])
    one, *others = states(3)
    assert tp.merge_states(others) == one  # of a counted run any rank's state is whole


@pytest.mark.parametrize(("steps", "state", "shard", "delivered", "m", "owed"), [
    ([4, 4, 3], 2, 11, 0, 12, 1),
    ([3, 4, 4], 0, 9, 0, 12, 1),
    ([4, 4, 0], 2, 2, 0, 12, 1),
    ([0, 1, 0], 0, 0, 0, 3, 1),
    ([9, 8, 9], 1, 1, 2, 27, 3),
], ids=["one step behind", "first rank behind", "not started", "one started", "later on"])  # fmt: skip
def test_a_rank_that_is_behind_or_has_not_started_is_named(
    steps: list[int], state: int, shard: int, delivered: int, m: int, owed: int
) -> None:
    wrong = f"{delivered} batches, but batches = {m} means {owed}"
    way = "save on all ranks after the same step"
    with refused(tp.StateError, f"state {state}", f"shard-{shard:04d}", wrong, way):
        tp.merge_states(states(3, steps, uncounted))


@pytest.mark.parametrize(("things", "said"), [
    (lambda: [], ("merge_states", "got none")),
    (lambda: 3, ("merge_states", "got int")),
    (lambda: [states(2)[0], 3], ("state", "got int")),
    (lambda: [states(2)[0], None], ("state", "got NoneType")),
    (lambda: [states(2)[0], "{}"], ("state", "got str")),
    (lambda: [states(2)[0], {"model": 1}], ("state", "without the key 'trainpipes' ('model')")),
])  # fmt: skip
def test_what_is_no_state_is_not_merged(things: Callable[[], Any], said: tuple[str, ...]) -> None:
    with refused(tp.StateError, *said):
        tp.merge_states(things())


# States that do not fit who loads them


def load(state: dict[str, Any], rank: int, world: int, make: Any = rows, **options: Any) -> Any:
    pipe = loaded(make(**options).distributed(rank=rank, world_size=world), state)
    return next(iter(pipe))


@pytest.mark.parametrize(("rank", "world", "own", "lacking"), [
    (0, 1, [*range(12)], [1, 2, 4, 5, 7, 8, 10, 11]),
    (1, 3, [1, 4, 7, 10], [1, 4, 7, 10]),
    (0, 2, [0, 2, 4, 6, 8, 10], [2, 4, 8, 10]),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_lacks_shards_of_a_rank_is_refused_with_the_ways_to_get_them(
    rank: int, world: int, own: list[int], lacking: list[int], workers: int
) -> None:
    loader = tp.Loader(uncounted().distributed(rank=rank, world_size=world), num_workers=workers)
    ways = "merge_states([...])", "loader.full_state_dict()", "torch.distributed.checkpoint"
    with refused(tp.StateError, str(own), str(lacking), *ways):
        loader.load_state_dict(states(3, make=uncounted)[0])


@pytest.mark.parametrize("rank", [0, 3])
def test_a_ranks_state_is_enough_for_ranks_that_share_its_shards(rank: int) -> None:
    saved = states(3, make=uncounted)
    assert load(saved[0], rank, 6, uncounted) == load(tp.merge_states(saved), rank, 6, uncounted)


# States of StatefulDataLoader


def stateful(pipe: tp.Pipeline, steps: int, **options: Any) -> dict[str, Any]:
    """The state of a StatefulDataLoader of two workers after so many batches."""
    loader = StatefulDataLoader(pipe, batch_size=None, num_workers=2, **options)
    batches = iter(loader)
    list(islice(batches, steps))
    state: dict[str, Any] = loader.state_dict()
    return state


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("make", [rows, uncounted])
def test_a_stateful_data_loaders_state_is_refused_elsewhere_and_counting_gives_one(
    make: Any,
) -> None:
    state = stateful(make(), 5)
    said = (
        "the state of a StatefulDataLoader",
        "load it into a StatefulDataLoader with as many workers",
        "load_state_dict(pipe.state_at(batches_delivered_to_each_rank, epoch=...))",
    )
    for load in (make().load_state_dict, tp.Loader(make()).load_state_dict):
        with refused(tp.StateError, *said):
            load(state)
    with refused(tp.StateError, *said):
        tp.merge_states([state])
    whole = list(islice(make(), 8))
    again = loaded(StatefulDataLoader(make(), batch_size=None, num_workers=2), state)
    assert list(islice(again, 3)) == whole[5:]
    assert list(islice(loaded(tp.Loader(make()), make().state_at(5)), 3)) == whole[5:]


def state_of_worker(worker: int, pipe: tp.Pipeline) -> dict[str, Any]:
    """The state of one of two workers after its first batch."""
    with in_worker(worker, 2, 1000, pipe):
        next(iterator := iter(pipe))
        return iterator.state_dict()


@pytest.mark.parametrize("make", [rows, uncounted])
def test_the_state_of_one_worker_of_several_is_refused_elsewhere(make: Any) -> None:
    state = state_of_worker(1, make())
    said = "a single worker, number 1 of 2", "StatefulDataLoader with as many workers"
    for subject in (make(), tp.Loader(make())):
        with refused(tp.StateError, *said):
            subject.load_state_dict(state)
    with refused(tp.StateError, *said):
        tp.merge_states([state])


def test_a_workers_state_in_one_of_other_workers_is_refused() -> None:
    state, pipe = state_of_worker(0, rows()), rows()
    said = "worker 0 of 2", "worker 0 of 3", "trainpipes.Loader takes any"
    with in_worker(0, 3, 1000, pipe), refused(tp.StateError, *said):
        iterator = iter(pipe)
        iterator.load_state_dict(state)
        next(iterator)
