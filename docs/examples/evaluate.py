"""The mean loss over all rows, each counted once, on any number of ranks.

torchrun --nproc-per-node 2 evaluate.py 'held-out/*.parquet' weights.pt
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import trainpipes as tp


def pipeline(files: str) -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"])
    rows = rows.sharding_filter(num_shards=24, split="stride", tail="uneven")  # nothing is left out
    return rows.tokenize("bytes", add_eos=True, labels=True).batch(4).pad_collate()


@torch.no_grad()
def evaluate(model: nn.Module, files: str, device: torch.device) -> tuple[float, int]:
    """The mean loss of a token, and the rows of all ranks. Give it the model itself, not its DDP."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, tokens, rows
    for batch in tp.Loader(pipeline(files)):
        ids, labels = batch["input_ids"].to(device), batch["labels"][:, 1:].to(device)
        scores = model(ids[:, :-1])  # [B, L - 1, V]
        loss = cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")  # 0 at -100
        sums += torch.stack([loss, (labels != -100).sum(), torch.tensor(len(ids), device=device)])
    if dist.is_initialized():
        dist.all_reduce(sums)  # once, after the loop: a rank may have a batch more than another
    total, tokens, rows = sums.tolist()
    return total / max(1, tokens), int(rows)


def main(files: str, weights: str) -> tuple[float, int]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    model.load_state_dict(torch.load(weights, weights_only=True))
    loss, rows = evaluate(model.to(device).eval(), files, device)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f} over {rows:,} rows")
    return loss, rows


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
