"""Train with Ray Train; killed at any moment, go on, also on another number of workers.

python ray_train.py --files '/shared/rows/*.parquet' --storage /shared/runs --workers 2
"""

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

import trainpipes as tp
from trainpipes.integrations.ray import load, loader, save
from trainpipes.testing import digest

NUM_SHARDS = 12  # 1, 2, 3, 4, 6 or 12 workers
MICRO_BATCHES = 12  # of all workers together in a step: the same ones on any number of workers
SAVE_EVERY = 2  # steps


def pipeline(files):
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(buffer_size=10_000, seed=0).tokenize("bytes", add_eos=True)
    return rows.repeat().pack(256).batch(2).pad_collate()


def train_loop_per_worker(config):
    device, context = get_device(), ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))  # put your model here
    ddp = prepare_model(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = loader(pipeline(config["files"]).to(device))

    step, checkpoint = 0, ray.train.get_checkpoint()  # the last one of this run
    if load(data, checkpoint):
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "run.pt"), map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    batches = iter(data)
    while step < config["steps"]:
        for number in range(rank, MICRO_BATCHES, workers):
            batch = next(batches)
            print(f"step {step}, {number} on {workers} workers: {digest(batch)}", flush=True)
            is_last = number + workers >= MICRO_BATCHES
            with nullcontext() if is_last or workers == 1 else ddp.no_sync():
                scores = ddp(batch["input_ids"][:, :-1])  # [B, L - 1, V]
                labels = batch["labels"][:, 1:]
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
                (loss * workers / MICRO_BATCHES).backward()  # DDP takes the mean over workers
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0 or step == config["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                save(data, folder)  # on all workers
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**content, "step": step}, Path(folder, "run.pt"))
                kept = Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step, "loss": loss.item()}, checkpoint=kept)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True)
    parser.add_argument("--storage", required=True, help="a folder or bucket that all nodes see")
    parser.add_argument("--name", default="run", help="of the run; the same to go on with it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(arguments)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"files": args.files, "steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=100),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    main()
