"""The process that trains: alone, or one of those that ``torchrun`` starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainpipes import TrainpipesError

__all__ = ["Rank", "this_rank"]


@dataclass(frozen=True)
class Rank:
    """This process among all that train.

    Args:
        number: from 0; that one saves, and tells how far it is.
        ranks: how many there are.
        device: what it trains on.
        wrapped: models whose gradients are the mean of all ranks; they can do no steps after the end.
    """

    number: int
    ranks: int
    device: torch.device
    wrapped: list[DistributedDataParallel] = field(default_factory=list)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on the device; with several ranks one whose gradients are the mean of all."""
        model = model.to(self.device)
        if self.ranks == 1:
            return model
        self.wrapped.append(DistributedDataParallel(model))
        return self.wrapped[-1]

    def move(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch on the device."""
        return {
            name: value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in batch.items()
        }

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order. A collective: all ranks call it."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values


@contextmanager
def this_rank(args: argparse.Namespace) -> Iterator[Rank]:
    """Seed torch, and join the other ranks if ``torchrun`` started this process; leave them at the end.

    Whatever goes wrong with the data ends the script with one line, not with a traceback.

    Args:
        args: of the command line: ``device``, ``seed`` and ``threads``.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":  # so that a resumed run has the same losses, to the last bit
        torch.use_deterministic_algorithms(True)
        # Costs a sixth of the time, and nothing here reads memory that it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = Rank(dist.get_rank() if ranks > 1 else 0, ranks, device)
    try:
        yield rank
    except TrainpipesError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    finally:
        if ranks > 1:
            for model in rank.wrapped:
                # The last to hold the group must not be this: it waits for gloo's threads without letting
                # them have the interpreter, and the process may never end (torch 2.13).
                del model.logger, model.reducer
            dist.destroy_process_group()
