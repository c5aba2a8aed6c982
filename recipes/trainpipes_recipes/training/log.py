"""``log.jsonl``: one JSON line a step, with its number, a hash of its batch and its loss."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from trainpipes.testing import digest
from trainpipes_recipes.training.progress import Progress
from trainpipes_recipes.training.ranks import Rank

__all__ = ["Log", "Step", "read_log"]


@dataclass(frozen=True)
class Step:
    """One line of a log.

    Args:
        number: of the step, from 1.
        batch: hash of all tensors of its batch.
        loss: before the step.
    """

    number: int
    batch: str
    loss: float


class Log:
    """Writes a run's steps, and tells how far it is. Rank 0 writes ``log.jsonl`` and speaks; the others
    write their own batches, to ``log-1.jsonl`` and so on.

    Args:
        args: of the command line: ``checkpoint_dir``, where the log is, and ``steps``.
        rank: this process.
        after: the last step that is done. Steps after it that the log holds were made by a run that was
            killed after its last checkpoint, and are taken out.
    """

    def __init__(self, args: argparse.Namespace, rank: Rank, *, after: int) -> None:
        folder: Path = args.checkpoint_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._steps: int = args.steps
        self._after = after
        self._started = time.monotonic()
        self._progress = Progress()
        if after:
            self.say(f"goes on after step {after}, from the checkpoint in {folder}")
        path = _path(folder, rank.number)
        _forget(path, after)
        if rank.number == 0:  # and those of ranks that were there before, and are not any more
            number = rank.ranks
            while _path(folder, number).exists():
                _forget(_path(folder, number), after)
                number += 1
        self._file = open(path, "a")  # noqa: SIM115

    def write(self, step: int, batch: Any, loss: Tensor) -> None:
        """One step, as it was made."""
        value = loss.item()
        self._file.write(json.dumps({"step": step, "batch": digest(batch), "loss": value}) + "\n")
        self._file.flush()
        if self._rank.number == 0:
            rate = (step - self._after) / (time.monotonic() - self._started)
            self._progress.show(
                f"step {step} of {self._steps}, loss {value:.3f}, {rate:.1f} steps/s"
            )

    def say(self, line: str) -> None:
        """A line that stays, of rank 0."""
        if self._rank.number == 0:
            self._progress.say(line)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            self.say(f"{self._steps} steps are done; checkpoint and log are in {self._folder}")


def read_log(path: Path) -> list[Step]:
    """The steps of a log; a last line that was cut short is left out."""
    return [
        Step(content["step"], content["batch"], content["loss"])
        for _, content in _whole_lines(path)
    ]


def _path(folder: Path, rank: int) -> Path:
    return folder / (f"log-{rank}.jsonl" if rank else "log.jsonl")


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # the last one may have been cut by a kill
            yield line, json.loads(line)


def _forget(path: Path, after: int) -> None:
    """Take the steps after one from a log."""
    if path.exists():
        kept = [line for line, content in _whole_lines(path) if content["step"] <= after]
        beside = path.with_suffix(".new")
        beside.write_text("".join(kept))
        os.replace(beside, path)
