"""Run a training script and log a hash of each batch and each loss, to compare it with another run.

python -m trainpipes_recipes.demo.logged train_sft --model ... --output runs/one
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainpipes.testing import digest

__all__ = ["Comparison", "Log", "Step", "compare", "read_log"]


@dataclass(frozen=True)
class Step:
    """One line of a log."""

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
    """The steps of a log; a last line that was cut short is left out."""
    found = [json.loads(line) for line in _whole_lines(path)]
    return [Step(line["step"], line["batch"], line["loss"]) for line in found]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one


@dataclass(frozen=True)
class Comparison:
    """How a run differs from a reference."""

    compared: int
    lost: tuple[int, ...] = ()
    more: tuple[int, ...] = ()
    differs: tuple[int, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        return self.compared > 0 and not (self.lost or self.more or self.differs)

    def __str__(self) -> str:
        found = {"lost": self.lost, "repeated or changed": self.more, "different": self.differs}
        parts = [
            f"{len(places)} {what}" + (f" (first at {places[0]})" if places else "")
            for what, places in found.items()
        ]
        return f"{self.compared} batches compared: " + ", ".join(parts)


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Comparison:
    """How ``other`` differs from ``reference``.

    >>> a, b, c = Step(1, "a", 3.0), Step(2, "b", 2.0), Step(3, "c", 1.0)
    >>> compare([a, b, c], [a, b, c]).identical
    True
    >>> print(compare([a, b], [a, a]))
    2 batches compared: 1 lost (first at 2), 1 repeated or changed (first at 2), 1 different (first at 2)
    """
    pairs = list(enumerate(zip(reference, other, strict=False), start=1))
    differs = tuple(place for place, (one, two) in pairs if one != two)
    return Comparison(len(pairs), _beyond(reference, other), _beyond(other, reference), differs)


def _beyond(steps: Sequence[Step], others: Sequence[Step]) -> tuple[int, ...]:
    """Places of batches that come more often than in ``others``."""
    left, places = Counter(step.batch for step in others), []
    for place, step in enumerate(steps, start=1):
        if left[step.batch] > 0:
            left[step.batch] -= 1
        else:
            places.append(place)
    return tuple(places)


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
