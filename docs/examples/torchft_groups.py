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
from trainpipes.testing import digest

NUM_SHARDS = (
    12  # best if each number of groups that may take part divides it: here 1, 2, 3, 4, 6 or 12
)
MICRO_BATCHES = 1  # of each rank in a step, whose gradients are accumulated


def pipeline(files):  # endless and counted: which rows a batch holds follows from its number
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", max_length=256)
    return rows.batch(4).repeat().pad_collate()


class SharedBatches:
    """The batches of this process in each step, while groups come and go.

    torchft counts the batches that went into the weights, over all groups, and gives a group that comes back
    this count with the weights. So the count says where all groups stand in the one sequence of batches: in
    each step those that take part take the next ones. A step that is not committed counts nothing, and its
    batches are dealt out again.
    """

    def __init__(self, pipe, manager, rank=0, ranks=1):
        self.pipe, self.manager, self.rank, self.ranks = pipe, manager, rank, ranks
        self.batches, self.upcoming = None, None  # the iterator, and what it is ready for
        self.number = None  # of the batch given last, over all groups

    def of_step(self):
        """The batches of the step that the manager has begun. Waits until it is known who takes part."""
        group, groups = self.manager.participating_rank() or 0, self.manager.num_participants()
        number = self.manager.batches_committed() * MICRO_BATCHES * self.ranks
        first, step = number + group * self.ranks + self.rank, groups * self.ranks
        if self.upcoming != (first, step):  # other groups than before, or a step was not committed
            loader = tp.Loader(self.pipe.distributed(rank=first % step, world_size=step))
            loader.load_state_dict(self.state_at(first))
            self.batches = iter(loader)
        for number in range(first, first + MICRO_BATCHES * step, step):
            batch = next(self.batches)
            self.number, self.upcoming = number, (number + step, step)
            yield batch

    def state_at(self, number):
        """The state in which all batches before one were taken."""
        return self.pipe.distributed(rank=0, world_size=1).state_at(number)

    def check(self, state):
        """Raise a StateError if a group that is there reads other data, or in another order."""
        tp.Loader(self.pipe.distributed(rank=0, world_size=1)).load_state_dict(state)


def main(files, steps=1000):
    dist.init_process_group("gloo")  # of the ranks of this group
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    def state_dict():
        content = {"model": model.state_dict(), "optimizer": adam.state_dict()}
        return {**content, "data": data.state_at(0)}  # and the manager counts batches

    def load_state_dict(state):
        data.check(state["data"])
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=False,  # which groups take part says who takes which batch
        replica_id=f"group_{os.environ['GROUP']}",
    )
    optimizer = Optimizer(manager, adam)
    data = SharedBatches(pipeline(files), manager, dist.get_rank(), dist.get_world_size())
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        for batch in data.of_step():
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
