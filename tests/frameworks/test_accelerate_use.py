"""Accelerate: how its options and numbers of ranks must fit, and plain DataLoaders of rows."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
    gather_object,
)
from torch.utils.data import DataLoader

import trainpipes as tp
from frameworks.runs import pipeline, rank
from frameworks.test_accelerate import numbered
from trainpipes.integrations.accelerate import loader
from trainpipes.testing import digest


def test_global_batches_and_the_accelerator_must_fit() -> None:
    pipe, accelerator = pipeline("counted"), Accelerator(cpu=True, gradient_accumulation_steps=3)
    three = pipe.distributed(rank=0, world_size=3)
    for given, batches, told in (
        (pipe, 4, "gradient_accumulation_steps must be 4 for global_bat"),
        (pipe, 0, "global_batches must be an integer of 1 or more"),
        (three, 4, "global_batches must be divisible by 3 ranks, got 4"),
    ):
        with pytest.raises(tp.ConfigError, match=told):
            loader(given, accelerator, global_batches=batches)
    made = loader(pipe, accelerator, global_batches=3)
    assert accelerator.gradient_accumulation_steps == 3
    assert len(made) == len(pipe) // 3 * 3 == len(list(made))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("configured", "accumulated", "told"),
    [(1, 1, 1), (1, 4, 1), (2, 4, 2), (4, 1, None), ("auto", 1, None), ("auto", 3, 3)],
)
def test_global_batches_are_what_deepspeed_divides_by(
    configured: Any, accumulated: int, told: int | None
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    state: Any = accelerator.state  # as where DeepSpeed is installed
    state.deepspeed_plugins = DeepSpeedPlugin(gradient_accumulation_steps=configured)
    state.distributed_type = DistributedType.DEEPSPEED
    way = "write that number" if told == configured else "leave it out"
    said = f"steps must be 4 for global_batches=8 on 2 ranks, got {told}; {way}"
    with nullcontext() if told is None else pytest.raises(tp.ConfigError, match=said):
        loader(pipeline("counted"), accelerator, global_batches=8)
        assert accelerator.gradient_accumulation_steps == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("tensor_parallel", "told"),
    [
        (True, r"write loader\(pipe.distributed\(rank=0, world_size=1\), accelerator\)"),
        (False, r"got 2 ranks and 1 replicas.*pipe.distributed\(rank=..., world_size=...\)"),
    ],
)
def test_ranks_that_are_not_the_processes_are_refused(tensor_parallel: bool, told: str) -> None:
    """Where both hold parts of one replica, and where there is one process."""
    from accelerate.parallelism_config import ParallelismConfig  # not in all versions that work

    accelerator: Any = Accelerator(cpu=tensor_parallel)
    if tensor_parallel:  # Accelerate has it on GPUs alone
        accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(tp.ConfigError, match=told):
        loader(pipeline("counted"), accelerator)
    alone = pipeline("counted").distributed(rank=0, world_size=1)
    assert len(list(loader(alone, accelerator))) == 24


@pytest.mark.ranks(4)
def test_an_evaluation_where_two_ranks_share_each_replica_is_not_filled_up() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    accelerator: Any = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    place = {"rank": accelerator.process_index // 2, "world_size": 2}
    with pytest.raises(tp.ConfigError, match=r'must be "even" where .*got .uneven.; leave it out'):
        loader(numbered(18, "uneven").distributed(**place), accelerator)
    valid = loader(numbered(16).distributed(**place), accelerator)
    found = [accelerator.gather_for_metrics(batch["row"]).tolist() for batch in valid]
    assert found == [[*range(n, n + 4)] * 2 + [*range(n + 4, n + 8)] * 2 for n in (0, 8)]
    accelerator.even_batches = False
    valid = loader(numbered(18, "uneven").distributed(**place), accelerator)
    assert [len(batch["row"]) for batch in valid] == [[4, 4, 2], [4, 4]][place["rank"]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["counted", "filtered"])
@pytest.mark.parametrize("options", [{}, {"epoch": 0}])
def test_an_evaluation_of_a_few_batches_begins_at_the_start_after_a_resume_too(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def run(steps: range) -> list[list[str]]:
        accelerator = Accelerator(cpu=True)
        train = loader(pipeline("counted"), accelerator)
        valid = loader(pipeline(kind), accelerator, **options)
        if steps.start:
            accelerator.load_state(str(tmp_path))
        evaluated = []
        for step, _ in zip(steps, train, strict=False):
            evaluated.append([digest(batch) for batch in islice(valid, 3)])
            if step == 4:
                accelerator.save_state(str(tmp_path))
        return evaluated

    assert run(range(8))[5:] == run(range(5, 8))


class Batch(list):
    """Notes where it is sent."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch([*self, torch.device(device).type, non_blocking])


@pytest.mark.ranks(1)
def test_batches_come_where_the_accelerator_says() -> None:
    pipe = tp.from_dataset(range(2)).batch(2).map(Batch)
    for placed, non_blocking, found in (
        (True, False, [0, 1, "cpu", False]), (True, True, [0, 1, "cpu", True]), (False, False, [0, 1]),
    ):  # fmt: skip
        config = DataLoaderConfiguration(non_blocking=non_blocking)
        accelerator = Accelerator(cpu=True, dataloader_config=config, device_placement=placed)
        assert list(loader(pipe, accelerator)) == [found]


# Over plain DataLoaders


def check_plain(
    rows: int, dispatch: bool | None, epochs: int = 2, given: Any = None, **options: Any
) -> None:
    """Each row comes once where both ranks' batches divide them; else some first ones come again, which fill
    up each worker's last batches to whole ones of both ranks."""
    table = pa.table({"row": list(range(rows))})
    pipe = tp.from_arrow(table).sharding_filter(4).shuffle(16, seed=1)
    pipe = pipe if given is None else pipe.distributed(rank=rank(), world_size=given)
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    loader = DataLoader(pipe, batch_size=4, **options)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    orders = []
    for _ in range(epochs):
        own = [batch["row"].tolist() for batch in loader]
        both = gather_object([own])
        assert len({len(batches) for batches in both}) == 1, "ranks take as many steps"
        orders.append([row for batches in both for batch in batches for row in batch])
        if rows % 32 == 0:
            assert sorted(orders[-1]) == list(range(rows))
            assert len(own) == len(loader)
        else:
            assert set(orders[-1]) == set(range(rows))
            workers = max(1, options.get("num_workers", 0))
            assert len(orders[-1]) - rows <= workers * 2 * 4 - 2
    assert epochs == 1 or orders[0] != orders[1], "each epoch has an order of its own"


@pytest.mark.timeout(300)
@pytest.mark.ranks(2)
def test_accelerate_gives_every_row_and_each_rank_is_told_once_who_shares_them_out() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # Rows that both ranks' batches divide, and rows that they don't; with workers, those of each.
        for rows, (workers, dispatch) in product(
            (96, 101), ((0, None), (0, False), (2, True), (2, False))
        ):
            check_plain(rows, dispatch, num_workers=workers)
        for dispatch in (True, False):
            spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
            check_plain(101, dispatch, epochs=1, **spawned)
            check_plain(101, dispatch, given=2)
    told = [str(one.message) for one in said if "shares out rows" in str(one.message)]
    ends = sorted(text.split(" so that ")[1].split(" reads")[0] for text in told)
    assert ends == ["each rank", "the first rank"]
