"""Train while nodes come and go: each time, go on from the last checkpoint on as many ranks as there are.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else torch 2.13 waits for ever where a node joins
    torchrun --nnodes 1:3 --nproc-per-node 8 --max-restarts 100 --rdzv-backend c10d \
        --rdzv-endpoint first-node:29400 --rdzv-id run-1 elastic.py 'rows/*.parquet' checkpoints/

The same on each node, with one folder for all. Where one is lost or joins, torchrun starts the ranks of all
others anew; the node at the endpoint has to stay.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import trainpipes as tp
from trainpipes.testing import digest

NUM_SHARDS = 48  # 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks
MICRO_BATCHES = 48  # of all ranks together in a step: the same ones on any number of ranks
SAVE_EVERY = 5  # steps


def pipeline(files: str) -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", add_eos=True)
    return rows.repeat().pack(256).batch(4).pad_collate()


class Weights:
    """Those of the model and the optimizer, as torch.distributed.checkpoint asks for them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = model, optimizer

    def state_dict(self) -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(*self.parts), strict=True))

    def load_state_dict(self, state: dict) -> None:
        saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(*self.parts, **saved)


def main(files: str, folder: str, steps: int = 1000) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    saving_group = dist.new_group(backend="gloo")  # what saves talks while training does
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    model = nn.parallel.DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = tp.Loader(pipeline(files))
    parts = {"weights": Weights(model, optimizer), "loader": loader}

    # The newest that is whole, as rank 0 sees it: .metadata is written last.
    found = [max((path.parent for path in Path(folder).glob("*/.metadata")), default=None)]
    dist.broadcast_object_list(found)
    done, saving = 0, None
    if found[0] is not None:
        dcp.load(parts, checkpoint_id=found[0])
        done = int(found[0].name)

    left = range(done, steps)
    for step, batches in zip(left, tp.steps(loader, batches=MICRO_BATCHES), strict=False):
        for number, batch in enumerate(batches):
            name = f"step {step}, {rank + number * ranks} on {ranks} ranks"
            print(f"{name}: {digest(batch)}", flush=True)
            with batches.no_sync(model):
                scores = model(batch["input_ids"][:, :-1].to(device))  # [B, L - 1, V]
                labels = batch["labels"][:, 1:].to(device)
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
                (loss * batches.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            if saving is not None:
                saving.result()
            where = Path(folder, f"{step + 1:08d}")
            saving = dcp.async_save(parts, checkpoint_id=where, process_group=saving_group)
    if saving is not None:
        saving.result()
    del model.logger, model.reducer  # it may hold the group last, and wait for ever (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
