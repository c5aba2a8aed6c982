"""Fine-tune a small causal transformer on prompt and response columns of Parquet files.

    python -m trainpipes_recipes.train_sft --files 'my/*.parquet' --tokenizer tokenizer.json --steps 500

Everything is here, top to bottom, in plain torch: model, checkpoints, training loop. A checkpoint holds
the model, the optimiser, torch's random state and the loader's position, and is written beside its
place and then renamed, so that a run can be killed at any moment. Started again with the same
``--checkpoint-dir`` it goes on from the last one, also with another ``--num-workers``. Each step is a
line in ``log.jsonl``: number, hash of the batch, loss.

The model is for trying things out: copy this file and put yours in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainpipes import Loader, TrainpipesError
from trainpipes.testing import digest
from trainpipes_recipes.progress import Progress
from trainpipes_recipes.sft import sft

__all__ = ["CausalTransformer", "main", "response_loss", "vocabulary_size"]


class CausalTransformer(nn.Module):
    """A decoder-only transformer: pre-norm, learnt positions, tied embeddings, no dropout.

    Args:
        vocabulary: token ids.
        max_length: T, positions.
        width: D, size of a position's vector.
        layers: blocks.
        heads: attention heads of each block.
    """

    def __init__(
        self, vocabulary: int, max_length: int, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[B, L]`` ids to ``[B, L, D]`` vectors. Padding is at the end, where no token before it
        attends to it, so that a causal model needs no attention mask."""
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        mixed = self.queries_keys_values(self.before_attention(x))
        q, k, v = mixed.view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, L, D/heads)
        x = x + self.attended(attended.transpose(1, 2).reshape(B, L, D))
        out: Tensor = x + self.perceptron(x)
        return out


def response_loss(model: CausalTransformer, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not -100; 0 if there is none.

    Logits are made of the positions that have a label only: they are most of the cost of a small
    model with a large vocabulary.
    """
    hidden = model(input_ids[:, :-1])
    target = labels[:, 1:]
    learnt = target != -100
    logits = hidden[learnt] @ model.tokens.weight.T
    total = F.cross_entropy(logits, target[learnt], reduction="sum")
    return total / learnt.sum().clamp(min=1)


def vocabulary_size(tokenizer: str) -> int:
    """How many token ids a tokenizer given by name or path has."""
    if tokenizer == "bytes":
        from trainpipes.tokenizers.bytes import VOCABULARY

        return VOCABULARY
    path = Path(tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix == ".json" and path.is_file():
        from tokenizers import Tokenizer

        ids: list[int] = list(Tokenizer.from_file(str(path)).get_vocab().values())
        return max(ids) + 1
    raise SystemExit(
        f"how many ids {tokenizer} has cannot be told from here: pass --vocabulary-size"
    )


class Checkpoints:
    """The last checkpoint of a run, and its log.

    Args:
        directory: where both are.
        settings: what must be the same after a resume.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.path = directory / "checkpoint.pt"
        self.log = directory / "log.jsonl"
        self._settings = settings
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, model: nn.Module, optimizer: Any, loader: Loader) -> None:
        """Replace the last checkpoint by one of now, at once or not at all."""
        content = {
            "step": step,
            "settings": self._settings,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "loader": loader.state_dict(),
        }
        beside = self.path.with_suffix(".new")
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def load(self, model: nn.Module, optimizer: Any, loader: Loader) -> int:
        """Go back to the last checkpoint.

        Returns:
            The step it was saved after.
        """
        content = torch.load(self.path, weights_only=True, map_location="cpu")
        for name, saved in content["settings"].items():
            if self._settings[name] != saved:
                raise SystemExit(
                    f"{self.path} is of a run with --{name.replace('_', '-')} {saved}, this one has "
                    f"{self._settings[name]}: use the same, or another --checkpoint-dir"
                )
        loader.load_state_dict(content["loader"])
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["random"])
        step = int(content["step"])
        self._forget_after(step)
        return step

    def _forget_after(self, step: int) -> None:
        """Take steps from the log that a killed run made after its last checkpoint."""
        kept = []
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        for line in lines:
            # The last line may have been cut by the kill.
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        beside = self.log.with_suffix(".new")
        beside.write_text("".join(kept))
        os.replace(beside, self.log)


def batches(loader: Loader) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch; each in another order."""
    while True:
        given = False
        for batch in loader:
            given = True
            yield batch
        if not given:
            raise SystemExit("an epoch has no batch: fewer rows than --batch-size?")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if device.type == "cpu":  # so that a resumed run has the same losses, to the last bit
        torch.use_deterministic_algorithms(True)
        # Costs a sixth of the time, and nothing here reads memory that it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    progress = Progress()

    pipe = sft(
        args.files[0] if len(args.files) == 1 else args.files,
        args.tokenizer,
        prompt=args.prompt,
        response=args.response,
        max_length=args.max_length,
        batch_size=args.batch_size,
        buffer_size=args.buffer_size,
        seed=args.seed,
    )
    loader = Loader(pipe, num_workers=args.num_workers, pin_memory=device.type == "cuda")

    model = CausalTransformer(
        args.vocabulary_size or vocabulary_size(args.tokenizer),
        args.max_length,
        args.width,
        args.layers,
        args.heads,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    parameters = sum(p.numel() for p in model.parameters())
    progress.say(f"{parameters:,} parameters, {len(loader):,} batches an epoch")

    names = ("width", "layers", "heads", "max_length", "seed", "lr")
    checkpoints = Checkpoints(args.checkpoint_dir, {name: getattr(args, name) for name in names})
    step = 0
    if args.resume == "must" and not checkpoints.path.exists():
        raise SystemExit(f"--resume must: there is no {checkpoints.path}")
    if args.resume != "never" and checkpoints.path.exists():
        step = checkpoints.load(model, optimizer, loader)
        progress.say(f"resumed after step {step} from {checkpoints.path}")

    started, first = time.monotonic(), step
    with open(checkpoints.log, "a" if step else "w") as log:
        for batch in batches(loader) if step < args.steps else ():
            step += 1
            input_ids = batch["input_ids"].to(device, non_blocking=True)
            labels = batch["labels"].to(device, non_blocking=True)
            loss = response_loss(model, input_ids, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

            value = loss.item()
            log.write(json.dumps({"step": step, "batch": digest(batch), "loss": value}) + "\n")
            log.flush()
            rate = (step - first) / (time.monotonic() - started)
            progress.show(f"step {step} of {args.steps}, loss {value:.3f}, {rate:.1f} steps/s")
            if step % args.checkpoint_every == 0 or step == args.steps:
                checkpoints.save(step, model, optimizer, loader)
            if step == args.steps:
                break
    progress.say(f"{step} steps; checkpoint and log in {args.checkpoint_dir}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainpipes_recipes.train_sft",
        description="Fine-tune a small causal transformer on prompt and response columns of Parquet "
        "files. Goes on from the last checkpoint if there is one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--files", nargs="+", required=True, help="Parquet files: paths, folders, globs or URLs")
    add("--tokenizer", default="bytes", help='a tokenizer.json, or "bytes", which needs none')
    add("--prompt", default="prompt", help="column that is given")
    add("--response", default="response", help="column that is learnt")
    add("--max-length", type=int, default=256, help="tokens of a row at most")
    add("--batch-size", type=int, default=8, help="rows in a batch")
    add("--buffer-size", type=int, default=40_960, help="rows that the shuffle mixes")
    add("--steps", type=int, default=1000, help="optimiser steps in all, over all starts")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--width", type=int, default=128, help="size of a position's vector")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads of a block")
    add("--vocabulary-size", type=int, help="token ids; asked of the tokenizer if left out")
    add("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="checkpoint and log")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add(
        "--resume",
        choices=("auto", "never", "must"),
        default="auto",
        help="go on from a checkpoint: if there is one, not at all, or else stop",
    )
    add("--num-workers", type=int, default=0, help="worker processes that make batches")
    add("--seed", type=int, default=0, help="of the order and of the model's start")
    add("--threads", type=int, default=0, help="torch's threads; 0 to leave them as they are")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except TrainpipesError as error:
        sys.exit(f"{type(error).__name__}: {error}")
