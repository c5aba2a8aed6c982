"""Run a training script and log hashes of batches, and losses, to compare it with another run:
``python -m trainpipes_recipes.logged train_sft --output runs/one ...``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from trainpipes.testing import digest

__all__ = ["Step", "differences", "main", "read_log"]


@dataclass(frozen=True)
class Step:
    number: int
    batch: str
    loss: float


def read_log(path: Path) -> list[Step]:
    """The steps of a log; of one that came again after a kill, the last."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a kill may have cut it
            step = Step(**json.loads(line))
            found[step.number] = step
    return list(found.values())


def differences(reference: Sequence[Step], other: Sequence[Step]) -> list[int]:
    """The places, from 1, where two runs differ in any bit.

    >>> a, b = Step(1, "a", 3.0), Step(2, "b", 2.0)
    >>> differences([a, b], [a, b]), differences([a, b], [a, a]), differences([a, b], [a])
    ([], [2], [2])
    """
    pairs = enumerate(zip_longest(reference, other), start=1)
    return [place for place, (one, two) in pairs if one != two]


def main(arguments: Sequence[str]) -> None:
    script, *options = arguments
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = Path(options[options.index("--output") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / (f"log-{rank}.jsonl" if rank else "log.jsonl"), "a", buffering=1) as log:
        log.write("\n")

        def write(step: int, batches: Any, loss: torch.Tensor) -> None:
            line = {"number": step, "batch": digest(list(batches)), "loss": loss.item()}
            log.write(json.dumps(line) + "\n")

        importlib.import_module(f"trainpipes_recipes.{script}").main(options, write)


if __name__ == "__main__":
    main(sys.argv[1:])
