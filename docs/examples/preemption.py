"""Train until SIGTERM: finish the step, save, and leave. Started again, go on with the next batch.

    torchrun --nproc-per-node 2 preemption.py 'rows/*.parquet' run.pt 1000

The signal may reach all ranks, some, or torchrun: all ranks leave after the same step.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trainpipes as tp
from trainpipes.testing import digest

SAVE_EVERY = 200  # steps

asked_to_leave = False


def note_signal(*_: object) -> None:
    global asked_to_leave
    asked_to_leave = True


def pipeline(files: str) -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(24)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", add_eos=True)
    return rows.repeat().pack(256).batch(4).pad_collate()


def main(files: str, checkpoint: str, steps: int = 1000, num_workers: int = 0) -> None:
    signal.signal(signal.SIGTERM, note_signal)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    model = nn.parallel.DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = tp.Loader(pipeline(files), num_workers=num_workers)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}

    step = 0
    if Path(checkpoint).exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step = saved["step"]

    batches = iter(loader)
    while step < steps:
        batch = next(batches)
        step += 1
        print(f"step {step}, rank {rank}: {digest(batch)}", flush=True)
        scores = model(batch["input_ids"][:, :-1].to(device))
        labels = batch["labels"][:, 1:].to(device)
        nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

        leave = torch.tensor(int(asked_to_leave))
        dist.all_reduce(leave, dist.ReduceOp.MAX)  # on the CPU; one rank is enough
        if leave or step % SAVE_EVERY == 0 or step == steps:
            state = loader.full_state_dict()  # of all ranks, after this step
            if rank == 0:
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**saved, "loader": state, "step": step}, checkpoint + ".new")
                os.replace(checkpoint + ".new", checkpoint)  # whole, or as it was
        if leave:
            print(f"rank {rank} leaves after step {step} of {steps}", flush=True)
            break
    dist.barrier()  # nobody leaves before rank 0 has saved
    del model.logger, model.reducer  # it may hold the group last, and wait for ever (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
