"""What ranks have trained on, as they wrote it down: it is there after a kill, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainpipes.testing import digest

__all__ = ["Steps", "by_step", "digests_by_step", "in_order"]


class Steps:
    """The file in which a rank notes each batch that it trains on.

    Args:
        folder: of the run.
        rank: whose it is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"steps-{rank:02}.txt"
        self._path.touch()

    def trained_on(self, epoch: int, step: int, batch: Any) -> None:
        """Note a batch.

        Args:
            epoch: from 0, as the framework counts.
            step: the optimiser step that it is part of, from 0 over all epochs.
            batch: with ``input_ids``.
        """
        with self._path.open("a") as file:
            file.write(f"{epoch} {step} {digest(batch['input_ids'])}\n")


def digests_by_step(folder: Path) -> list[dict[tuple[int, int], list[str]]]:
    """For each rank: by (epoch, step) the digests of the batches that were trained on in it."""
    ranks = []
    for path in sorted(folder.glob("steps-*.txt")):
        found: dict[tuple[int, int], list[str]] = {}
        for line in path.read_text().split("\n")[:-1]:
            epoch, step, content = line.split()
            found.setdefault((int(epoch), int(step)), []).append(content)
        ranks.append(found)
    return ranks


def by_step(folder: Path) -> list[dict[int, list[str]]]:
    """For each rank, the digests of each step, whatever its epoch."""
    return [{step: d for (_, step), d in found.items()} for found in digests_by_step(folder)]


def in_order(ranks: Sequence[dict[tuple[int, int], list[str]]], epoch: int) -> list[str]:
    """The digests of one epoch in the order of m: the ranks take turns."""
    of_each = [
        [one for (of, _), contents in sorted(found.items()) if of == epoch for one in contents]
        for found in ranks
    ]
    return [content for turn in zip(*of_each, strict=True) for content in turn]
