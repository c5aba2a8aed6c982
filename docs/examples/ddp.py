"""Train with DistributedDataParallel; killed at any moment, go on, also on another number of ranks.

    torchrun --nproc-per-node 2 ddp.py --files 'rows/*.parquet' --checkpoint run.pt

A checkpoint is one file. Rank 0 writes it, and it fits any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import trainpipes as tp
from trainpipes.testing import digest

NUM_SHARDS = 24  # 1, 2, 3, 4, 6, 8, 12 or 24 ranks
GLOBAL_BATCH = 96  # rows of an optimizer step, on any number of ranks
MICRO_BATCH = 4


def pipeline(files: str) -> tp.Pipeline:
    return (
        tp.list_files(files)
        .read_parquet(columns=["text"])
        .sharding_filter(num_shards=NUM_SHARDS)
        .shuffle(buffer_size=10_000, seed=0)
        .tokenize("bytes", max_length=256)
        .repeat()
        .batch(MICRO_BATCH)
        .pad_collate()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = tp.Loader(pipeline(args.files))

    done = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        done = saved["step"]

    left = range(done + 1, args.steps + 1)
    steps = tp.steps(loader, batches=GLOBAL_BATCH // MICRO_BATCH)
    for step, batches in zip(left, steps, strict=False):
        for batch in batches:
            print(f"step {step}, rank {rank} of {ranks}: {digest(batch)}", flush=True)
            with batches.no_sync(model):
                ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
                labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
                loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels.flatten())
                (loss * batches.weight).backward()
        optimizer.step()
        optimizer.zero_grad()

        state = loader.full_state_dict()  # fits any number of ranks; all ranks ask for it
        if rank == 0:
            content = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            beside = args.checkpoint.with_suffix(".new")
            torch.save({**content, "loader": state, "step": step}, beside)
            os.replace(beside, args.checkpoint)  # whole, or not there
            print(f"step {step} saved, loss {loss.item():.3f}", flush=True)
    # It may hold the group last, and wait for gloo's threads for ever (torch 2.13).
    del model.logger, model.reducer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
