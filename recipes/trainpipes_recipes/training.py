"""What the training scripts share: their options, ranks, and checkpoints that a resume goes on from.

To make a script your own, copy it with this file.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import trainpipes as tp

CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if CUDA else "cpu")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOG_EVERY, WARMUP, CLIP, BF16 = 10, 0.05, 1.0, CUDA  # steps; part of all steps; norm of gradients


def count(text: str) -> int:
    """A number of an option, from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def parser_of(
    output: str, lr: float, batch_size: int, model: bool = True
) -> argparse.ArgumentParser:
    """The options of all scripts, with these defaults; ``model``: whether one is named."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    if model:
        add("--model", required=True, help="name on the Hugging Face hub, or a folder")
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--output", type=Path, default=Path(output), help="for checkpoints; all ranks share it")
    add("--steps", type=count, default=1000, help="optimizer steps, before and after resumes")
    add("--batch-size", type=count, default=batch_size, help="rows of a rank at a time")
    add("--num-workers", type=int, default=0, help="processes that call functions")
    add("--lr", type=float, default=lr, help="learning rate after the warm-up")
    add("--save-every", type=count, default=200, help="steps")
    add("--keep", type=count, default=2, help="checkpoints that stay")
    return parser


def start() -> None:
    """Join the other ranks, and draw the same random weights as they do."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if RANKS > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)


def model_of(kind: Any, args: argparse.Namespace, **options: Any) -> Any:
    """The model that ``--model`` names, or one of its config with random weights."""
    from transformers import AutoConfig

    if args.scratch:
        return kind.from_config(AutoConfig.from_pretrained(args.model, **options))
    return kind.from_pretrained(args.model, dtype=torch.float32, **options)


class Training:
    """A model, its optimizer and its data, from the newest checkpoint on.

    Args:
        find_unused: whether a rank's batch may leave parameters unused, which ranks wait for otherwise.
        options: of AdamW.

    Attributes:
        model: on the device.
        parallel: the same for all ranks.
        loader: of the batches.
        step: steps done.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: Any,
        pipe: tp.Pipeline,
        find_unused: bool = False,
        **options: Any,
    ) -> None:
        self.args, self.model = args, model.to(DEVICE).train()
        self.loader = tp.Loader(pipe.to(DEVICE), num_workers=args.num_workers, pin_memory=CUDA)
        self.parallel = model
        if RANKS > 1:
            self.parallel = DistributedDataParallel(model, find_unused_parameters=find_unused)
        self.optimizer = torch.optim.AdamW(model.parameters(), args.lr, **options)
        warmup = int(WARMUP * args.steps)
        rate = partial(share_of_rate, warmup, args.steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.schedule = schedule
        self.parts = {
            "model": model, "optimizer": self.optimizer, "schedule": schedule, "loader": self.loader
        }  # fmt: skip
        self.step = resume(args.output, self.parts)
        self.norms = torch.zeros((), device=DEVICE)  # the sum of all, looked at now and then

    def batches(self, count: int = 1) -> Iterator[list[Any]]:
        """So many batches for each step, until the last one."""
        batches = iter(self.loader)
        while self.step < self.args.steps:
            torch.manual_seed(RANKS * self.step + RANK)  # of dropout: a resume draws the same
            self.step += 1
            yield [next(batches) for _ in range(count)]

    def backward(self, batches: Sequence[Any], loss_of: Callable[[Any, Any], Tensor]) -> Tensor:
        """Accumulate the gradients of a step's batches; gives the sum of their losses."""
        total = torch.zeros((), device=DEVICE)
        for number, batch in enumerate(batches, start=1):
            waits = RANKS > 1 and number < len(batches)  # ranks exchange gradients at the last one
            with self.parallel.no_sync() if waits else nullcontext():
                loss = loss_of(self.parallel, batch)
                loss.backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        self.norms += torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if self.logs or self.saves:
            require_finite(self.norms, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    @property
    def logs(self) -> bool:
        return self.step % LOG_EVERY == 0

    @property
    def saves(self) -> bool:
        return bool(self.step % self.args.save_every == 0 or self.step == self.args.steps)

    def save(self) -> None:
        save(self.args.output, self.step, self.parts, self.args.keep)

    def end(self) -> None:
        if RANK == 0:
            self.model.save_pretrained(self.args.output / "model")
        if RANKS > 1:
            # It may hold the group last, and wait for gloo's threads for ever (torch 2.13).
            del self.parallel.logger, self.parallel.reducer
            dist.destroy_process_group()


def require_finite(norm: Tensor, step: int) -> None:
    """Raise if gradients were not finite, which the weights would not be then: alike on all ranks."""
    if not norm.isfinite():
        way = "go on from the last checkpoint with a lower --lr, or without the rows that cause it"
        raise FloatingPointError(
            f"gradients must be finite, got a norm of {norm.item()} by step {step}; {way}"
        )


def share_of_rate(warmup: int, steps: int, step: int) -> float:
    """Of the learning rate, in a step: it grows for some steps, and falls by a cosine until the last one."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def mean_loss(run: Training, micro: Sequence[Any]) -> Tensor:
    """Gradients of the mean loss over all targets of a step; gives this rank's part of it."""
    targets = over_ranks(torch.stack([*map(targets_of, micro)]).sum()).clamp(min=1)
    # DistributedDataParallel takes the mean of ranks.
    return run.backward(micro, lambda *given: loss_sum(*given) * RANKS / targets) / RANKS


def targets_of(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] >= 0).sum()


def loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    """The sum of all targets' losses: logits at t against the label at t + 1."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=BF16):
        # With a cache transformers would let packed rows see each other.
        logits = model(**inputs, use_cache=False).logits
    scores, wanted = logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(scores, wanted, reduction="sum")


def over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all ranks."""
    if RANKS > 1:
        dist.all_reduce(tensor)
    return tensor


def sums() -> Tensor:
    """Room for a total and a count, float64 ``[2]``: float32 loses ones from 2**24 on."""
    return torch.zeros(2, dtype=torch.float64, device=DEVICE)


def mean_over_ranks(sums: Tensor) -> float:
    """The total by the count of all ranks.

    Raises:
        DataError: nothing was counted.
    """
    total, count = over_ranks(sums).tolist()
    if not count:
        way = "look at what holds them out, or at the filter of the files to evaluate on"
        raise tp.DataError(f"evaluating: no rank has a row with a target: {way}")
    return float(total / count)


def save(folder: Path, step: int, parts: dict[str, Any], keep: int) -> None:
    """One file for all ranks, whole or not there."""
    states = {
        name: part.full_state_dict() if isinstance(part, tp.Loader) else part.state_dict()
        for name, part in parts.items()
    }
    if RANK == 0:
        torch.save({**states, "step": step}, folder / "new")
        os.replace(folder / "new", folder / f"step-{step:08}.pt")
        for old in sorted(folder.glob("step-*.pt"))[:-keep]:
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
