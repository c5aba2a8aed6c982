"""What each rank runs: a small model trained by ``trainpipes.steps``; after each step its loss and weights.

    python -m torch.distributed.run --nproc-per-node 2 steps_on_ranks.py FOLDER NAME STEPS

It goes on from FOLDER/saved.pt, if that is there, and saves it after STEPS more. Rank 0 writes
FOLDER/NAME.json: of each step the digests of its batches, the mean of their losses, the sum of the weights.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainpipes as tp
from launch import write_beside
from trainpipes.testing import digest

BATCHES = 8


def pipelines() -> dict[str, tp.Pipeline]:
    rows = tp.from_dataset(range(400)).sharding_filter(8).shuffle(50, seed=3)
    numbers = rows.map(lambda n: {"x": torch.tensor([n / 400.0, n % 7 / 7.0])})
    kept = rows.filter(lambda n: n % 3 > 0).map(
        lambda n: {"x": torch.tensor([n / 400.0, n % 5 / 5.0])}
    )
    return {"counted": numbers.batch(4).collate(), "filtered": kept.batch(4).collate()}


def main(folder: Path, name: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved = folder / "saved.pt"
    start = torch.load(saved) if saved.exists() else None
    found: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for kind, pipe in pipelines().items():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        loader = tp.Loader(pipe)
        if start is not None:
            layers.load_state_dict(start[kind]["layers"])
            optimizer.load_state_dict(start[kind]["optimizer"])
            loader.load_state_dict(start[kind]["loader"])
        model = nn.parallel.DistributedDataParallel(layers)
        found[kind] = []
        while len(found[kind]) < steps:
            for step in tp.steps(loader, batches=BATCHES):
                losses, digests = torch.zeros(1, dtype=torch.float64), []
                for batch in step:
                    with step.no_sync(model):
                        x = batch["x"].double()
                        loss = (model(x).squeeze(1) - x.prod(1)).square().mean()
                        (loss * step.weight).backward()
                    losses += loss.detach() / BATCHES
                    digests.append(digest(batch))
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(losses)
                everyone: list[Any] = [None] * ranks
                dist.all_gather_object(everyone, digests)
                weights = sum(float(p.detach().sum()) for p in layers.parameters())
                found[kind].append([sorted(chain.from_iterable(everyone)), losses.item(), weights])
                if len(found[kind]) == steps:
                    break
        parts[kind] = {
            "layers": layers.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.full_state_dict(),
        }
        del model.logger, model.reducer
    if rank == 0:
        torch.save(parts, saved)
        write_beside(folder / f"{name}.json", found)
    dist.barrier()
    dist.destroy_process_group()


def steps_of(folder: Path, name: str) -> dict[str, list[Any]]:
    """What rank 0 wrote, by the kind of pipeline."""
    found: dict[str, list[Any]] = json.loads((folder / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
