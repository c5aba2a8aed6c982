"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import CHECK, FULL, QUICK, TINY, Sizes

__all__ = ["SETTINGS", "Settings", "Spec"]


@dataclass(frozen=True)
class Settings:
    """One size of the suite.

    Args:
        sizes: of the data.
        repeats: runs of each cell, in turn with the others; their median is shown.
        seconds, most: that a race lasts: an epoch and ``seconds`` at least; ``most`` for a peer whose
            epoch takes longer.
        check: batches that are compared after a resume.
        steps: of the trainer.
        cell: seconds after which a cell of a peer gets no more runs.
        limit: seconds after which a run is ended.
    """

    sizes: Sizes
    repeats: int
    seconds: float
    most: float
    check: int
    steps: int
    cell: float
    limit: float


SETTINGS = {
    "full": Settings(FULL, 5, seconds=4.0, most=4.0, check=640, steps=20_000, cell=25, limit=240),
    "quick": Settings(QUICK, 3, seconds=0.3, most=1.0, check=300, steps=1_500, cell=12, limit=120),
    "check": Settings(CHECK, 5, seconds=1.5, most=1.5, check=64, steps=3_000, cell=20, limit=120),
    "tiny": Settings(TINY, 1, seconds=0.01, most=0.1, check=10, steps=20, cell=5, limit=60),
}


@dataclass(frozen=True)
class Spec:
    """What a job is told beside its contestant.

    Args:
        settings: the size.
        round: which repeat, from 0.
        states: a file for the states of this contestant.
        peer: whether it is one of the others.
    """

    settings: Settings
    round: int
    states: Path
    peer: bool = False
