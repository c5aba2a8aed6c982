"""What a verdict is made of: facts that are known before a run, and what was counted in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainpipes._internal.activity import WAITING
from trainpipes._internal.activity_sampler import Counts


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage: ``text`` as in the chain; whether it calls a function of the user's, and in
    the thread that iterates; its ``workers``, and whether these are processes."""

    text: str
    name: str
    calls: bool = False
    in_caller: bool = False
    workers: int = 0
    processes: bool = False
    tokenizes: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of a run before it: ``threads`` and ``workers`` of the loader, ``plain`` for torch's
    DataLoader; the files and rows that are read; ``lengths_by``, ``pairs``: see the function."""

    stages: tuple[StageFacts, ...] = ()
    threads: int = 2
    workers: int = 0
    plain: bool = False
    cores: int = 2
    shards: int = 1
    ranks: int = 1
    local: bool = True
    kept_bytes: bool = False
    prefetch_bytes: int = 0
    file_bytes: int = 0
    group_rows: int = 0
    largest_group: int = 0
    window_bytes: int = 0
    memory_bytes: int = 0
    lengths_by: str = ""
    pairs: bool = False

    @property
    def opener(self) -> StageFacts:
        return next((s for s in self.stages if s.name.startswith(("read_", "from_"))), NO_STAGE)

    def has(self, *names: str) -> bool:
        return any(stage.name in names for stage in self.stages)


NO_STAGE = StageFacts("", "")


@dataclass(frozen=True)
class Measured:
    """What was counted in a run.

    Attributes:
        seconds, waited: of the run; of these, those in which the loop waited.
        first, start: when the first batch came; when the loop first waited less than half of the time.
        counts, workers: of this process, and of all workers of the Loader together.
        children: seconds of CPU of other processes that this one has started.
        others: cores that the rest of the machine took.
        cells, padding: of batches that were looked at.
        sizes: how many of these had so many cells.
    """

    seconds: float
    waited: float
    first: float = 0.0
    start: float = 0.0
    counts: Counts = field(default_factory=Counts)
    workers: Counts = field(default_factory=Counts)
    children: float = 0.0
    others: float = 0.0
    cells: int = 0
    padding: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def steady(self) -> float:
        """The share of waiting after the first batch."""
        rest = self.seconds - self.first
        return max(0.0, self.waited - self.first) / rest if rest > 0 else self.waiting

    @property
    def trainer(self) -> float:
        return max(0.0, self.seconds - self.waited)

    @property
    def padded(self) -> float:
        return self.padding / self.cells if self.cells else 0.0

    def waiting_for_longest(self, ranks: int) -> float:
        """The part of a step's time in which its ranks, on average, wait for the batch of most cells: each is
        drawn from the batches that were looked at, and takes as long as it has cells.

        >>> round(Measured(1.0, 0.0, sizes={100: 1, 300: 1}).waiting_for_longest(2), 3)
        0.2
        """
        cells = np.array(sorted(self.sizes), dtype=np.float64)
        seen = np.array([self.sizes[int(size)] for size in cells], dtype=np.float64)
        no_more = (np.cumsum(seen) / seen.sum()) ** ranks  # no batch of the step has more cells
        longest = float((cells * np.diff(no_more, prepend=0)).sum())
        return 1 - float((cells * seen).sum() / seen.sum()) / longest

    def of(self, group: str, *whats: str) -> tuple[float, float]:
        """Seconds, and seconds of CPU, of a group of threads in some of what they do; all work if none are
        named. In the processes that make batches: workers, if there are any."""
        times = (self.workers if self.workers.times else self.counts).times.get(group, {})
        chosen = [v for k, v in times.items() if (k in whats if whats else k not in WAITING)]
        return sum(v[0] for v in chosen), sum(v[1] for v in chosen)

    @property
    def totals(self) -> dict[str, int]:
        """What all processes counted of requests and caches."""
        totals = dict(self.counts.totals)
        for name, number in self.workers.totals.items():
            totals[name] = totals.get(name, 0) + number
        return totals

    @property
    def late(self) -> float:
        return self.counts.late / max(1, self.counts.samples)
