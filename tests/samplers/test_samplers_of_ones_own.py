"""Samplers of users and other libraries: an epoch's keys are the same on all ranks and after a resume."""

from __future__ import annotations

import random
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as td

import trainpipes as tp
from engine.test_randomness import global_generators_untouched, seed_everything
from resuming import check_resume
from trainpipes.samplers import torch_samplers

ROWS = list(range(20))


class Own(td.Sampler[int]):
    def __len__(self) -> int:
        return len(ROWS)


class OfEpoch(Own):
    """As many are: a generator of its own, seeded by the epoch that ``set_epoch`` gives."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(ROWS), generator=generator).tolist())


class Counting(OfEpoch):
    """Also counts by itself, as Accelerate's ``SeedableRandomSampler``."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        self.epoch += 1


class ByNumpy(Own):
    def __iter__(self) -> Any:
        return iter(np.random.permutation(len(ROWS)).tolist())


class ByPython(Own):
    def __iter__(self) -> Any:
        return iter(random.sample(ROWS, len(ROWS)))


class DrawsAtEpoch(OfEpoch):
    """Draws its order as it is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.order = random.sample(ROWS, len(ROWS))

    def __iter__(self) -> Any:
        return iter(self.order)


class Outer(td.Sampler[int]):
    """Changes the order of another sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        return iter(list(self.sampler)[::-1])


class Drawn:
    """The numbers of a sampler, drawn once, as a dataset."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.numbers: list[int] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> int:
        if self.numbers is None:
            self.numbers = list(self.sampler)
        return self.numbers[index]


class Distributed(td.DistributedSampler[int]):
    """One replica's part of another sampler, as Catalyst's ``DistributedSamplerWrapper``."""

    def __init__(self, sampler: Any, rank: int) -> None:
        super().__init__(Drawn(sampler), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        self.sampler = sampler

    def __iter__(self) -> Any:
        self.dataset: Any = Drawn(self.sampler)
        return iter(itemgetter(*super().__iter__())(self.dataset))


class Repeating(OfEpoch):
    """One replica's part, without torch's ``DistributedSampler``, as timm's ``RepeatAugSampler``."""

    def __init__(self, rank: int) -> None:
        self.num_replicas, self.rank = 2, rank

    def __len__(self) -> int:
        return len(ROWS) // 2

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[self.rank :: 2])


class OfNames(OfEpoch):
    """One replica's part, by attributes of other names."""

    def __init__(self, rank: int, count: str, which: str) -> None:
        self.which = which
        vars(self).update({count: 2, which: rank})

    def __len__(self) -> int:
        return len(ROWS) // 2

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[vars(self)[self.which] :: 2])


class Unsized:
    """One replica's part without a length, as detectron2's ``TrainingSampler``."""

    def __init__(self, rank: int) -> None:
        self._rank, self._world_size = rank, 2

    def __iter__(self) -> Any:
        return iter(random.sample(ROWS, len(ROWS))[self._rank :: 2])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


EVERY = {
    "of epoch": lambda rank: OfEpoch(),
    "counting": lambda rank: Counting(),
    "by NumPy": lambda rank: ByNumpy(),
    "by Python": lambda rank: ByPython(),
    "draws at epoch": lambda rank: DrawsAtEpoch(),
    "outer": lambda rank: Outer(OfEpoch()),
    "outer by torch": lambda rank: Outer(td.RandomSampler(ROWS, generator=seeded())),
    "distributed": lambda rank: Distributed(td.RandomSampler(ROWS), rank),
    "distributed, seeded": lambda rank: Distributed(
        td.RandomSampler(ROWS, generator=seeded()), rank
    ),
    "repeating": Repeating,
    "world_size": lambda rank: OfNames(rank, "world_size", "rank"),
    "_world_size": lambda rank: OfNames(rank, "_world_size", "_rank"),
    "num_processes": lambda rank: OfNames(rank, "num_processes", "process_index"),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_all_ranks_and_processes_draw_the_same_and_another_order_each_epoch(name, shuffled):
    def pipeline(rank: int) -> tp.Pipeline:
        seed_everything(rank)
        sampler = EVERY[name](rank)
        if shuffled:
            return tp.from_dataset(ROWS).shuffle(sampler=sampler).sharding_filter(2)
        return tp.from_dataset(ROWS, sampler).sharding_filter(2)

    whole = pipeline(0)
    assert len(whole) == len(ROWS)
    with global_generators_untouched():
        epochs = [list(whole), list(whole)]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [ROWS, ROWS]
    for rank in (0, 1):
        part = pipeline(rank).distributed(rank=rank, world_size=2)
        for epoch in epochs:
            assert list(part) == epoch[rank::2]
    check_resume(pipeline(0), processes=0)


def test_batches_of_torchs_and_our_distributed_samplers_are_those_of_all_replicas():
    theirs = [td.DistributedSampler(ROWS, 2, rank) for rank in range(2)]
    ours = [tp.samplers.DistributedSampler(ROWS, 2, rank) for rank in range(2)]
    for replicas in (theirs, ours):
        of_each: list[Any] = [td.BatchSampler(sampler, 3, False) for sampler in replicas]
        pipes = [tp.from_dataset(ROWS, batch_sampler=batches) for batches in of_each]
        for epoch in range(2):
            for sampler in replicas:
                sampler.set_epoch(epoch)
            turns = [batch for turn in zip(*of_each, strict=True) for batch in turn]
            assert [list(pipe) for pipe in pipes] == [turns, turns]
            assert len(pipes[0]) == len(turns) == 8
        check_resume(pipes[0], processes=0)


def test_a_sampler_stays_at_its_epoch_and_rank():
    sampler = Outer(Repeating(1))
    pipe = tp.from_dataset(ROWS, sampler)
    assert list(pipe) != list(pipe)
    assert (sampler.sampler.epoch, sampler.sampler.rank) == (0, 1)


def test_of_a_sampler_without_a_length_all_replicas_come_in_turn():
    epochs = [list(tp.from_dataset(ROWS, Unsized(rank))) for rank in range(2)]
    assert epochs[0] == epochs[1] != ROWS
    assert sorted(epochs[0]) == ROWS


class CutAtOnce(Own):
    """One replica's part, cut when it is made, as detectron2's ``InferenceSampler``."""

    def __init__(self, rank: int) -> None:
        self._rank, self._world_size = rank, 2
        self.part = ROWS[10 * rank : 10 * rank + 10]

    def __len__(self) -> int:
        return len(self.part)

    def __iter__(self) -> Any:
        return iter(self.part)


def test_a_sampler_whose_replicas_give_the_same_rows_is_refused():
    for rank in range(2):
        pipes = [
            tp.from_dataset(ROWS, CutAtOnce(rank)),
            tp.from_dataset(ROWS).shuffle(sampler=CutAtOnce(rank)),
        ]
        for pipe in pipes:
            with pytest.raises(
                tp.DataError, match=r"its 2 gave the same keys.*rank=0 and world_size=1"
            ):
                list(pipe)
    single = td.DistributedSampler([0], num_replicas=2, rank=0)
    assert list(tp.from_dataset([5], single)) == [5, 5]  # as with torch


def test_batches_of_a_sampler_without_a_length_have_none():
    pipe = tp.from_dataset(ROWS, batch_sampler=td.BatchSampler(Outer(WithoutLength()), 3, False))
    assert [list(pipe), list(pipe)] == [[[4, 3, 2], [1, 0]]] * 2
    check_resume(pipe, processes=0)


class WithoutLength(td.Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def torchs(kind: Any, *args: Any, seed: int = 3, **options: Any) -> td.Sampler[int]:
    return kind(*args, **options, generator=torch.Generator().manual_seed(seed))  # type: ignore[no-any-return]


def replica(**options: Any) -> td.Sampler[int]:
    return td.DistributedSampler(range(100), 2, 0, **options)


def reseeded() -> td.Sampler[int]:
    """Its generator was used before, and its epoch set: both change nothing here."""
    sampler: Any = torchs(td.RandomSampler, range(100))
    list(sampler)
    return sampler  # type: ignore[no-any-return]


def later() -> td.Sampler[int]:
    sampler: Any = replica()
    sampler.set_epoch(7)
    sampler.rank = 1
    return sampler  # type: ignore[no-any-return]


HUNDRED = list(range(100))
KEYED = {"a": 1, b"b": 2, ("c", 1): 3, 4: 4}
ORDER = np.random.default_rng(0).permutation(100)
#: A sampler, others that are known to be the same, and those that are not, by what the state names.
KNOWN: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "list": (ORDER.tolist(), [list(ORDER)], {"keys": ORDER[::-1].tolist()}),
    "array": (ORDER, [ORDER.astype(np.int32)], {"keys": ORDER[::-1]}),
    "tensor": (torch.as_tensor(ORDER), [], {"keys": torch.arange(100)}),
    "range": (range(50), [], {"keys": range(50, 100)}),
    "subset": (
        torchs(td.SubsetRandomSampler, range(50)),
        [torchs(td.SubsetRandomSampler, range(50))],
        {
            "indices": torchs(td.SubsetRandomSampler, range(1, 51)),
            "seed": torchs(td.SubsetRandomSampler, range(50), seed=4),
        },
    ),
    "weighted": (
        td.WeightedRandomSampler([1.0] * 100, 50),
        [td.WeightedRandomSampler(torch.ones(100), 50)],
        {
            "weights": td.WeightedRandomSampler([1.0] * 99 + [2.0], 50),
            "replacement": td.WeightedRandomSampler([1.0] * 100, 50, replacement=False),
            "seed": torchs(td.WeightedRandomSampler, [1.0] * 100, 50),
        },
    ),
    "random": (
        torchs(td.RandomSampler, range(100)),
        [reseeded()],
        {
            "seed": torchs(td.RandomSampler, range(100), seed=4),
            "replacement": torchs(td.RandomSampler, range(100), replacement=True),
            "rows": torchs(td.RandomSampler, range(90), num_samples=100),
        },
    ),
    "distributed": (
        replica(),
        [later()],
        {
            "seed": replica(seed=1),
            "shuffle": replica(shuffle=False),
            "drop_last": replica(drop_last=True),
            "rows": td.DistributedSampler(range(99), 2, 0),
        },
    ),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_state_knows_a_list_of_keys_or_torchs_sampler_by_what_it_holds(name, shuffled):
    def pipe(sampler: Any) -> tp.Pipeline:
        rows = tp.from_dataset(HUNDRED, None if shuffled else sampler)
        return (rows.shuffle(sampler=sampler) if shuffled else rows).batch(4)

    saved, same, others = KNOWN[name]
    state, rest = pipe(saved).state_at(3), list(pipe(saved))[3:]
    for sampler in same:
        again = pipe(sampler)
        again.load_state_dict(state)
        assert list(again) == rest
    for option, sampler in others.items():
        with pytest.raises(tp.StateError, match=f"/content/of/{option}: saved"):
            pipe(sampler).load_state_dict(state)


def test_a_state_knows_what_a_batch_sampler_of_torch_draws_from():
    def pipe(sampler: Any) -> tp.Pipeline:
        return tp.from_dataset(HUNDRED, batch_sampler=td.BatchSampler(sampler, 4, False))

    state = pipe(tp.samplers.RandomSampler(100)).state_at(3)
    pipe(tp.samplers.RandomSampler(100)).load_state_dict(state)
    for sampler, named in (
        (tp.samplers.RandomSampler(100, seed=1), "seed"),
        (ByNumpy(), "sampler"),
    ):
        with pytest.raises(tp.StateError, match=f"(/content/of/of/{named}|data/rows): saved"):
            pipe(sampler).load_state_dict(state)
    keys = [["a", b"b"], [("c", 1), np.int64(4)]]
    state = tp.from_dataset(KEYED, batch_sampler=keys).state_at(0)
    tp.from_dataset(KEYED, batch_sampler=[*map(list, keys)]).load_state_dict(state)
    with pytest.raises(tp.StateError, match="/content/of/keys: saved"):
        tp.from_dataset(KEYED, batch_sampler=keys[::-1]).load_state_dict(state)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_state_that_says_nothing_of_what_a_sampler_holds_goes_on(shuffled, monkeypatch):
    def pipe() -> tp.Pipeline:
        rows = tp.from_dataset(HUNDRED, None if shuffled else ORDER)
        return (rows.shuffle(sampler=ORDER) if shuffled else rows).batch(4)

    with monkeypatch.context() as patch:
        patch.setattr(torch_samplers, "content_of", lambda sampler: {})
        state = pipe().state_at(3)
    assert "content" not in state["pipeline"]
    again = pipe()
    again.load_state_dict(state)
    assert list(again) == list(pipe())[3:]
