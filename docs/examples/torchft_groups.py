"""Train in replica groups, by torchft: one that is killed and started again takes weights and position from
another, and meanwhile the others take its batches.

    torchft_lighthouse --bind '[::]:29510' --min_replicas 1 --join_timeout_ms 1000
    export TORCHFT_LIGHTHOUSE=http://first-node:29510
    GROUP=0 torchrun --nproc-per-node 1 torchft_groups.py 'rows/*.parquet'

The last line on each node, with another GROUP; where it ends, again.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

import trainpipes as tp
from trainpipes.integrations.torchft import ReplicaLoader
from trainpipes.testing import digest

GROUPS = range(1, 5)  # that may take part
NUM_SHARDS = 12  # which each of these divides


def pipeline(files):
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", max_length=256)
    return rows.batch(4).repeat().pad_collate()


def main(files, steps=1000):
    dist.init_process_group("gloo")  # of the ranks of this group
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    def state_dict():
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=min(GROUPS),
        use_async_quorum=False,  # which groups take part says who takes which batch
        replica_id=f"group_{os.environ['GROUP']}",
    )
    optimizer = Optimizer(manager, adam)
    data = ReplicaLoader(pipeline(files), manager, groups=GROUPS)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        for batch in data.micro_batches():
            ids, mask = batch["input_ids"], batch["attention_mask"]
            labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            scores = model(ids[:, :-1])  # [B, L - 1, V]
            nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).backward()
        for weight in model.parameters():
            manager.allreduce(weight.grad).wait()
        groups = manager.num_participants()
        optimizer.step()
        step, done = manager.current_step(), manager.current_step() > step
        kept = "committed" if done else "not committed"
        print(f"step {step}, {groups} groups: {data.number} {digest(batch)} {kept}", flush=True)
    print("weights", digest([weight.detach() for weight in model.parameters()]))
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
