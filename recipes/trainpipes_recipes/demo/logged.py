"""Run a training script and log hashes of batches, and losses, to compare it with another run:
``python -m trainpipes_recipes.demo.logged train_sft --output runs/one ...``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from trainpipes.testing import digest

__all__ = ["Comparison", "Log", "Step", "compare", "read_log"]


@dataclass(frozen=True)
class Step:
    number: int
    batch: str
    loss: float


class Log:
    """The steps of a run."""

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
    """The steps of a log, without a last line that was cut short."""
    found = [json.loads(line) for line in _whole_lines(path)]
    return [Step(line["step"], line["batch"], line["loss"]) for line in found]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one


@dataclass(frozen=True)
class Comparison:
    """How a run differs from a reference: the steps in both logs, and the places, from 1, that
    differ in any bit.
    """

    compared: int
    differs: tuple[int, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        return self.compared > 0 and not self.differs

    def __str__(self) -> str:
        first = f" (first at {self.differs[0]})" if self.differs else ""
        return f"{self.compared} batches compared: {len(self.differs)} lost, repeated or changed{first}"


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Comparison:
    """How ``other`` differs from ``reference``.

    >>> a, b = Step(1, "a", 3.0), Step(2, "b", 2.0)
    >>> compare([a, b], [a, b]).identical
    True
    >>> print(compare([a, b], [a, a]))
    2 batches compared: 1 lost, repeated or changed (first at 2)
    """
    pairs = enumerate(zip_longest(reference, other), start=1)
    differs = tuple(place for place, (one, two) in pairs if one != two)
    return Comparison(min(len(reference), len(other)), differs)


def main(arguments: Sequence[str]) -> None:
    script, *options = arguments
    output = Path(options[options.index("--output") + 1])
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train = importlib.import_module(f"trainpipes_recipes.{script}").main
    train(options, Log(output / (f"log-{rank}.jsonl" if rank else "log.jsonl")))


if __name__ == "__main__":
    main(sys.argv[1:])
