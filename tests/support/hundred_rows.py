"""A hundred rows in 13 batches, and the loaders that run them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import rows_of, table_of_rows

TABLE = table_of_rows(0, 100)


def shuffled_rows(num_shards: int = 4) -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(num_shards).shuffle(15, seed=2)


def pipeline() -> tp.Pipeline:
    """13 batches an epoch, the last one short."""
    return shuffled_rows().batch(8)


def of_unknown_length() -> tp.Pipeline:
    return shuffled_rows().filter(is_even).batch(8)


def is_even(row: Any) -> bool:
    return bool(row["row"] % 2 == 0)


def given_by(loader: Any, count: int | None = None) -> list[list[int]]:
    """Row numbers of the next batches."""
    return [rows_of(item) for item in islice(loader, count)]


def epochs_of(count: int, make: Callable[[], tp.Pipeline] = pipeline) -> list[list[list[int]]]:
    """What a pipeline gives in its first epochs, run in this process."""
    pipe = make()
    return [given_by(pipe) for _ in range(count)]


def kept(state: Any) -> Any:
    """A state as it comes back from a checkpoint."""
    return json.loads(json.dumps(state))


def in_process(pipe: tp.Pipeline, workers: int, **options: Any) -> Any:
    return pipe


def plain(pipe: tp.Pipeline, workers: int, **options: Any) -> Any:
    return DataLoader(pipe, batch_size=None, num_workers=workers, **options)


def stateful(pipe: tp.Pipeline, workers: int, **options: Any) -> Any:
    return StatefulDataLoader(pipe, batch_size=None, num_workers=workers, **options)


def ours(pipe: tp.Pipeline, workers: int, **options: Any) -> Any:
    return tp.Loader(pipe, num_workers=workers, **options)


def loaded(run: Any, state: Any) -> Any:
    """A pipeline or a loader, standing where a state says."""
    run.load_state_dict(state)
    return run


def rank_of_two(rank: int, way: Any, pipe: tp.Pipeline, workers: int, there: Any) -> None:
    """In a process of its own: an epoch each time it is asked for one, until it is killed."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    loader = way(pipe, workers)
    while there.recv():
        there.send(given_by(loader))
