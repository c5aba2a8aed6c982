"""Train with FSDP and torch.distributed.checkpoint; go on on another number of ranks.

    torchrun --nproc-per-node 2 fsdp_checkpoint.py --files 'rows/*.parquet' --checkpoints run/

Each rank writes its own part of a checkpoint, of the model, the optimizer and the data alike. Read on another
number of ranks, all three are dealt anew.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import trainpipes as tp
from trainpipes.testing import digest


def pipeline(files: str) -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(num_shards=24)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", max_length=256)
    return rows.repeat().batch(4).pad_collate()


class Weights:
    """The model and the optimizer, as torch.distributed.checkpoint asks for them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = model, optimizer

    def state_dict(self) -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(*self.parts), strict=True))

    def load_state_dict(self, state: dict) -> None:
        saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(*self.parts, **saved)


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint; one without .metadata was cut short."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",))

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    model = fully_shard(layers.to(device), mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = tp.Loader(pipeline(args.files).distributed(mesh=mesh["data"]))
    run = {"weights": Weights(model, optimizer), "loader": loader}

    step, found = 0, last_complete(args.checkpoints)
    if found is not None:
        dcp.load(run, checkpoint_id=found)
        step = int(found.name.removeprefix("step-"))

    batches = iter(loader)
    while step < args.steps:
        step += 1
        batch = next(batches)
        print(f"step {step}, rank {rank} of {ranks}: {digest(batch)}", flush=True)
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        # or async_save, which writes while training goes on: see elastic.py
        dcp.save(run, checkpoint_id=args.checkpoints / f"step-{step:08d}")
        if rank == 0:
            print(f"step {step} saved, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
