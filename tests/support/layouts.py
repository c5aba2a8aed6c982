"""Checkpoints of several layouts, made on the spot."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp

__all__ = ["counted", "of_ranks", "save", "state", "stateful", "uncounted"]


def counted() -> tp.Pipeline:
    return (
        tp.from_tensors(x=np.arange(300)).sharding_filter(12).shuffle(11, seed=4).batch(5).collate()
    )


def some(batch: Any) -> bool:
    return True


def uncounted() -> tp.Pipeline:
    return counted().filter(some).repeat()


def state(pipe: tp.Pipeline | None = None, steps: int = 7) -> dict[str, Any]:
    loader = tp.Loader(counted() if pipe is None else pipe)
    list(islice(loader, steps))
    return loader.state_dict()


def of_ranks(world: int, steps: int = 3) -> list[dict[str, Any]]:
    """The states of all ranks of an uncounted pipeline."""
    return [
        state(uncounted().distributed(rank=rank, world_size=world), steps) for rank in range(world)
    ]


def stateful(workers: int, steps: int = 5) -> dict[str, Any]:
    """The state of a StatefulDataLoader."""
    loader = StatefulDataLoader(counted(), batch_size=None, num_workers=workers)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    found: dict[str, Any] = loader.state_dict()
    return found


def save(value: Any, path: Path, layout: str) -> Path:
    """Write a checkpoint and give its path."""
    if layout == "torch":
        torch.save(value, path)
    elif layout == "json":
        path.write_text(json.dumps(value))
    elif layout == "dcp":
        import torch.distributed.checkpoint as dcp  # half a second and 70 MB

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save(value, checkpoint_id=path, no_dist=True)
    return path
