"""from_iterable: items that an iterable draws or shares out by itself are the same everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import trainpipes as tp
from engine.test_randomness import global_generators_untouched, seed_everything
from resuming import check_resume
from trainpipes.samplers.torch_samplers import OwnDraws

ROWS = 80


class Shuffled(IterableDataset[int]):
    """Shuffles its files, and then within a buffer, as many do."""

    def __iter__(self) -> Iterator[int]:
        files = [*range(ROWS // 10)]
        random.shuffle(files)
        for file in files:
            yield from (10 * file + np.random.permutation(10)).tolist()


def drawn() -> list[int]:
    return torch.randperm(ROWS).tolist()


@pytest.mark.parametrize("factory", [Shuffled(), drawn])
@pytest.mark.parametrize("buffered", [False, True])
def test_what_shuffles_by_global_generators_is_the_same_on_all_ranks_and_after_a_resume(
    factory: Any, buffered: bool
) -> None:
    def pipeline(seed: int) -> tp.Pipeline:
        seed_everything(seed)
        rows = tp.from_iterable(factory).sharding_filter(2)
        return (rows.shuffle(20) if buffered else rows).batch(4).repeat()

    pipe = pipeline(0)
    with global_generators_untouched():
        whole = list(islice(pipe, 40))
    epochs = whole[:20], whole[20:]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == [*range(ROWS)]
    for rank in range(2):
        part = iter(pipeline(1 + rank).distributed(rank=rank, world_size=2))
        for batch in whole[rank::2]:
            random.random()
            assert next(part) == batch
    check_resume(pipeline(3), processes=0, limit=50)


def test_one_that_draws_nothing_is_soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OwnDraws] = []
    noted = OwnDraws.__init__
    monkeypatch.setattr(
        OwnDraws, "__init__", lambda own, seed: made.append(own) or noted(own, seed)
    )
    assert len(list(tp.from_iterable(range(100)))) == 100
    assert [own._idle for own in made] == [16]
    assert len(list(tp.from_iterable(Shuffled()))) == ROWS
    assert made[1]._idle < 0


class OfWorker(IterableDataset[int]):
    """Keeps the part of a DataLoader's worker by itself."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(number, 40, workers))


def test_what_shares_itself_out_to_workers_is_not_shared_out_twice() -> None:
    pipe = tp.from_iterable(OfWorker()).sharding_filter(4)
    assert sorted(map(int, DataLoader(pipe, batch_size=None, num_workers=2))) == [*range(40)]


def test_a_generator_that_is_not_read_to_its_end_is_closed_with_the_epoch() -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    pipe = tp.from_iterable(numbers).take(3)
    assert list(pipe) == [0, 1, 2]
    assert closed == [True]
    assert list(pipe) == [0, 1, 2]
    assert closed == [True, True]


def test_an_error_in_rows_that_skip_leaves_out_loses_none_and_gives_none_of_them() -> None:
    errors = [OSError("once")]

    class Once(Iterator[int]):
        at = -1

        def __next__(self) -> int:
            if self.at == 2 and errors:
                raise errors.pop()
            self.at += 1
            if self.at == 9:
                raise StopIteration
            return self.at

    rows = iter(tp.from_iterable(Once).skip(5))
    with pytest.raises(OSError, match="once"):
        next(rows)
    assert list(rows) == [5, 6, 7, 8]


def test_a_data_pipe_is_read_for_its_types_beside_a_pass_of_it() -> None:
    rows = IterableWrapper([{"x": i, "y": str(i)} for i in range(20)])
    pipe = tp.from_iterable(rows).select("x").shuffle(8)
    for _ in range(2):
        assert sorted(row["x"] for row in pipe) == [*range(20)]
