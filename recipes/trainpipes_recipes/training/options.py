"""The command line that all training scripts have."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch

__all__ = ["FIXED", "fixed", "options", "text_options", "vocabulary_size"]

#: What must be the same after a resume, besides what the loader looks after.
FIXED = ("width", "layers", "heads", "max_length", "vocabulary_size", "seed", "lr")


def options(script: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes: files, steps, checkpoints, workers, seed, device.

    Args:
        script: its module in this package.
        doc: its docstring, whose first paragraph is shown by ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m trainpipes_recipes.{script}",
        description=inspect.cleandoc(doc or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--batch-size", type=int, default=8, help="rows in a batch of one rank")
    add("--buffer-size", type=int, default=40_960, help="rows that the shuffle mixes, at least")
    add("--steps", type=int, default=1000, help="optimiser steps in all, before and after resumes")
    add("--lr", type=float, default=1e-3, help="learning rate")
    runs = Path("checkpoints", script.removeprefix("train_"))
    add("--checkpoint-dir", type=Path, default=runs, help="checkpoint and log")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add(
        "--resume",
        choices=("auto", "never", "must"),
        default="auto",
        help="go on from the last checkpoint: if there is one, never, or stop without one",
    )
    add("--num-workers", type=int, default=0, help="worker processes that make batches")
    add("--seed", type=int, default=0, help="seed of the order of rows and of the model's weights")
    add("--threads", type=int, default=0, help="torch's threads; 0 to leave them as they are")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    return parser


def text_options(script: str, doc: str | None, *, max_length: int = 256) -> argparse.ArgumentParser:
    """``options``, and what scripts take that train a transformer on text: tokenizer, lengths, size."""
    parser = options(script, doc)
    add = parser.add_argument
    add("--tokenizer", default="bytes", help='a tokenizer.json, or "bytes", which needs none')
    add("--vocabulary-size", type=int, help="token ids; those of the tokenizer if left out")
    add("--max-length", type=int, default=max_length, help="the most tokens of a row")
    add("--width", type=int, default=128, help="size of a position's vector")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads of a block")
    return parser


def fixed(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that must be the same after a resume."""
    return {name: value for name, value in vars(args).items() if name in FIXED}


def vocabulary_size(args: argparse.Namespace) -> int:
    """How many token ids there are: ``--vocabulary-size``, or those of the tokenizer."""
    if args.vocabulary_size:
        return int(args.vocabulary_size)
    if args.tokenizer == "bytes":
        from trainpipes.tokenizers.bytes import VOCABULARY

        return VOCABULARY
    path = Path(args.tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix == ".json" and path.is_file():
        from tokenizers import Tokenizer

        ids: list[int] = list(Tokenizer.from_file(str(path)).get_vocab().values())
        return max(ids) + 1
    raise SystemExit(
        f"how many ids {args.tokenizer} has cannot be told from here: pass --vocabulary-size"
    )
