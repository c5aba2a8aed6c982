"""Train a classifier of pictures, from random weights.

    python -m trainpipes_recipes.train_images --model microsoft/resnet-50 --files pets/train --classes 37
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_images --model my-config --files pets --classes 9

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForImageClassification, get_scheduler

import trainpipes as tp

CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if CUDA else "cpu")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOG_EVERY, WARMUP, CLIP, BF16 = 10, 0.05, 1.0, CUDA  # steps; part of all steps; norm of gradients


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="name or folder of a config")
    add("--classes", type=int, required=True, help="labels are below it")
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--eval-files", nargs="+", help="evaluate on these whenever a checkpoint is saved")
    add("--output", type=Path, default=Path("runs/images"), help="checkpoints of all ranks")
    add("--steps", type=int, default=1000, help="optimizer steps, before and after resumes")
    add("--batch-size", type=int, default=32, help="rows of a rank at a time")
    add("--size", type=int, default=224, help="pixels of a side")
    add("--num-workers", type=int, default=0, help="processes that make batches")
    add("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
    add("--save-every", type=int, default=200, help="steps")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    args = parser.parse_args(arguments)
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if RANKS > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")

    shape = {"size": args.size, "batch_size": args.batch_size}
    pipe = tp.recipe("images", args.files, **shape).repeat().to(DEVICE)
    loader = tp.Loader(pipe, num_workers=args.num_workers, pin_memory=CUDA)

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(args.model, num_labels=args.classes)
    model = AutoModelForImageClassification.from_config(config).to(DEVICE)
    parallel = DistributedDataParallel(model) if RANKS > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = get_scheduler("cosine", optimizer, int(WARMUP * args.steps), args.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}

    step = resume(args.output, parts)
    batches = iter(loader)
    while step < args.steps:
        torch.manual_seed(RANKS * step + RANK)  # of dropout, so that a resume draws the same
        step += 1
        batch = next(batches)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=BF16):
            logits = parallel(batch["images"]).logits
        loss = F.cross_entropy(logits.float(), batch["labels"], label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step, [batch], loss.detach())
        if step % LOG_EVERY == 0:
            report(f"step {step}: loss {over_ranks(loss.detach()).item() / RANKS:.4f}")
        if step % args.save_every == 0 or step == args.steps:
            if args.eval_files:
                held_out = tp.recipe("images", args.eval_files, train=False, **shape)
                report(f"step {step}: {evaluate(model, held_out.to(DEVICE)):.1%} are right")
            save(args, step, parts)
    if RANK == 0:
        model.save_pretrained(args.output / "model")
    if RANKS > 1:
        dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: Any, held_out: tp.Pipeline) -> float:
    """The part of all pictures of all ranks whose class is found."""
    model.eval()
    found = torch.zeros(2, device=DEVICE)
    for batch in tp.Loader(held_out):
        found[0] += (model(batch["images"]).logits.argmax(1) == batch["labels"]).sum()
        found[1] += len(batch["labels"])
    model.train()
    right, pictures = over_ranks(found).tolist()
    return float(right / max(1, pictures))


def over_ranks(tensor: Tensor) -> Tensor:
    if RANKS > 1:
        dist.all_reduce(tensor)
    return tensor


def save(args: argparse.Namespace, step: int, parts: dict[str, Any]) -> None:
    """One file for all ranks, whole or not there."""
    data = parts["loader"].full_state_dict()
    if RANK == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "loader": data, "step": step}, args.output / "new")
        os.replace(args.output / "new", args.output / f"step-{step:08}.pt")
        for old in sorted(args.output.glob("step-*.pt"))[: -args.keep]:
            old.unlink()


def resume(folder: Path, parts: dict[str, Any]) -> int:
    """Go back to the newest checkpoint, if any: the step after which it was saved."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = [max(folder.glob("step-*.pt"), default=None)]
    if RANKS > 1:
        dist.broadcast_object_list(newest)  # rank 0 says which
    if newest[0] is None:
        return 0
    states = torch.load(newest[0], map_location=DEVICE, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    report(f"goes on after step {states['step']}, from {newest[0]}")
    return int(states["step"])


def report(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
