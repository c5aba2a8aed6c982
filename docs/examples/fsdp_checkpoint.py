"""Train with FSDP and torch.distributed.checkpoint; go on on another number of ranks.

    torchrun --nproc-per-node 2 fsdp_checkpoint.py --files 'rows/*.parquet' --checkpoints run/

Each rank writes its own part of a checkpoint, of the model, the optimizer and the data alike. Read on another
number of ranks, all three are dealt anew.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainpipes as tp
from trainpipes.testing import digest

VOCABULARY = 258  # of the tokenizer "bytes"


def pipeline(files: str) -> tp.Pipeline:
    return (
        tp.list_files(files)
        .read_parquet(columns=["text"])
        .sharding_filter(num_shards=24)
        .shuffle(buffer_size=10_000, seed=0)
        .tokenize("bytes", max_length=256)
        .repeat()
        .batch(4)
        .pad_collate()
    )


class NextByte(nn.Module):
    """What comes after a byte, by that byte alone. Put your model here."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.scores = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.tokens(input_ids[:, :-1]))  # [B, L - 1, V]
        target = input_ids[:, 1:].masked_fill(attention_mask[:, 1:] == 0, -100)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Weights:
    """The model and the optimizer, as torch.distributed.checkpoint asks for them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint; one without .metadata was cut short."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",))

    torch.manual_seed(0)
    model = fully_shard(NextByte().to(device), mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = tp.Loader(
        pipeline(args.files).distributed(mesh=mesh["data"]), num_workers=args.num_workers
    )
    run = {"weights": Weights(model, optimizer), "loader": loader}

    step = 0
    found = last_complete(args.checkpoints)
    if found is not None:
        dcp.load(run, checkpoint_id=found)
        step = int(found.name.removeprefix("step-"))

    batches = iter(loader)
    while step < args.steps:
        step += 1
        batch = next(batches)
        print(f"step {step}, rank {rank} of {ranks}: {digest(batch)}", flush=True)
        loss = model(**{name: t.to(device) for name, t in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        # or async_save, which writes while training goes on
        dcp.save(run, checkpoint_id=args.checkpoints / f"step-{step:08d}")
        if rank == 0:
            print(f"step {step} saved, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
