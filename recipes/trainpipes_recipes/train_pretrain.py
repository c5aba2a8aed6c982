"""Pretrain a causal language model on documents, packed into rows of one length.

    python -m trainpipes_recipes.train_pretrain --model Qwen/Qwen3-0.6B --files 'my/*.parquet' --steps 9000
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_pretrain --model my-config --files 'my/*.parquet'

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

import trainpipes as tp

CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if CUDA else "cpu")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOG_EVERY, WARMUP, CLIP, BF16 = 10, 0.05, 1.0, CUDA  # steps; part of all steps; norm of gradients


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="name or folder of a config; weights start at random")
    add("--tokenizer", help="name, folder or tokenizer.json; the model's if left out")
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--output", type=Path, default=Path("runs/pretrain"), help="checkpoints of all ranks")
    add("--steps", type=int, default=1000, help="optimizer steps, before and after resumes")
    add("--batch-size", type=int, default=8, help="rows of a rank at a time")
    add("--accumulate", type=int, default=1, help="batches of a rank in a step")
    add("--max-length", type=int, default=2048, help="tokens of a row")
    add("--num-workers", type=int, default=0, help="processes that make batches")
    add("--lr", type=float, default=3e-4, help="learning rate after the warm-up")
    add("--save-every", type=int, default=200, help="steps")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--attention", default="sdpa", help="or flash_attention_2, or flex_attention")
    args = parser.parse_args(arguments)
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if RANKS > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")

    shape = {"max_length": args.max_length, "batch_size": args.batch_size}
    pipe = tp.recipe("pretrain", args.files, args.tokenizer or args.model, **shape)  # has no end
    loader = tp.Loader(pipe.to(DEVICE), num_workers=args.num_workers, pin_memory=CUDA)

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=args.attention).to(DEVICE)
    parallel = DistributedDataParallel(model) if RANKS > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)
    schedule = get_scheduler("cosine", optimizer, int(WARMUP * args.steps), args.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}

    step = resume(args.output, parts)
    batches = iter(loader)
    tokens = args.batch_size * args.max_length * args.accumulate * RANKS  # of a step
    began, waited, logged = time.perf_counter(), loader.wait_seconds, step
    while step < args.steps:
        torch.manual_seed(RANKS * step + RANK)  # of dropout, so that a resume draws the same
        step += 1
        micro = [next(batches) for _ in range(args.accumulate)]
        loss = torch.zeros((), device=DEVICE)
        for number, batch in enumerate(micro, start=1):
            waits = RANKS > 1 and number < len(micro)  # ranks exchange gradients at the last one
            with parallel.no_sync() if waits else nullcontext():
                part = loss_of(parallel, batch) / len(micro)
                part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step, micro, loss)
        if step % LOG_EVERY == 0:
            if RANKS > 1:
                dist.all_reduce(loss)
            mean = loss.item() / RANKS
            seconds, idle = time.perf_counter() - began, loader.wait_seconds - waited
            rate = f"{tokens * (step - logged) / seconds:,.0f} tokens/s"
            report(f"step {step}: loss {mean:.4f}, {rate}, {idle / seconds:.1%} waiting for data")
            began, waited, logged = time.perf_counter(), loader.wait_seconds, step
        if step % args.save_every == 0 or step == args.steps:
            save(args, step, parts)
    if RANK == 0:
        model.save_pretrained(args.output / "model")
    if RANKS > 1:
        dist.destroy_process_group()


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """The mean loss of a packed batch whose documents do not see each other, by ``position_ids`` or
    with flash attention by ``cu_seqlens``.
    """
    starts, longest = batch["cu_seqlens"], batch["max_seqlen"]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=BF16):
        logits = model(
            batch["input_ids"], position_ids=batch["position_ids"], use_cache=False,
            cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest,
        ).logits  # fmt: skip
    found, wanted = logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    loss: Tensor = F.cross_entropy(found, wanted, reduction="sum")
    loss /= (wanted >= 0).sum().clamp(min=1)
    return loss


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
