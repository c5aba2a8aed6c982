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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainpipes.testing import digest

__all__ = ["Step", "main", "read_log"]


class Step(NamedTuple):
    number: int
    batch: str
    loss: float


def read_log(path: Path) -> list[Step]:
    """The steps of a log; of one that came again after a kill, the last."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a kill may have cut it
            step = Step(*json.loads(line))
            found[step.number] = step
    return list(found.values())


def main(arguments: Sequence[str]) -> None:
    script, *options = arguments
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = Path(options[options.index("--output") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    with open(folder / ("log.jsonl" if rank == "0" else f"log-{rank}.jsonl"), "a", 1) as log:
        log.write("\n")

        def write(step: int, batches: Any, loss: torch.Tensor) -> None:
            log.write(json.dumps([step, digest(list(batches)), loss.item()]) + "\n")

        importlib.import_module(f"trainpipes_recipes.{script}").main(options, write)


if __name__ == "__main__":
    main(sys.argv[1:])
