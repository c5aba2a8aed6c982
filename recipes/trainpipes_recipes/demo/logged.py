"""Run a training script and log a hash of each batch and each loss, to compare it with another run.

    python -m trainpipes_recipes.demo.logged train_sft --model ... --output runs/one

Each rank writes "log.jsonl" of its own beside the checkpoints, rank 1 to "log-1.jsonl". torch computes alike
each time, on one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainpipes.testing import digest

__all__ = ["Log", "Step", "read_log"]


@dataclass(frozen=True)
class Step:
    """One line of a log.

    Args:
        number: of the step, from 1.
        batch: hash of all tensors of its batches.
        loss: before the step.
    """

    number: int
    batch: str
    loss: float


class Log:
    """The steps of a run. Those that are made again, as they came after a checkpoint, are replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def __call__(self, step: int, batches: Sequence[Any], loss: torch.Tensor) -> None:
        if not self._begun:
            kept = [line for line in _whole_lines(self._path) if json.loads(line)["step"] < step]
            beside = self._path.with_suffix(".new")
            beside.write_text("".join(kept))
            os.replace(beside, self._path)
            self._begun = True
        line = {"step": step, "batch": digest(list(batches)), "loss": loss.item()}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[Step]:
    """The steps of a log; a last line that was cut short is left out."""
    found = [json.loads(line) for line in _whole_lines(path)]
    return [Step(line["step"], line["batch"], line["loss"]) for line in found]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one


def main(arguments: Sequence[str]) -> None:
    """Run a script of this package, whose name comes first, with ``--output``."""
    script, *options = arguments
    output = Path(options[options.index("--output") + 1])
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train = importlib.import_module(f"trainpipes_recipes.{script}").main
    train(options, Log(output / (f"log-{rank}.jsonl" if rank else "log.jsonl")))


if __name__ == "__main__":
    main(sys.argv[1:])
