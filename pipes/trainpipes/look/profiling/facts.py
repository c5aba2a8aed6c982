"""Inputs of a verdict: facts that are known before a run, and the counts of the run."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainpipes._internal.activity import WAITING, Counts
from trainpipes._internal.pool import default_threads
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.loader_workers import calls_python
from trainpipes.engine.record import Record, is_pipeline_or_loader
from trainpipes.engine.shards.shard_rows import Memory
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import stages_within
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.stages.tokenizing import TokenizedBy, Tokenizes, lengths_by


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
        children: seconds of CPU of other processes that this process has started.
        others: of the cores that this process may use, those that other programs took.
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
        named, in this process and in workers."""
        times = [c.times.get(group, {}).items() for c in (self.counts, self.workers)]
        named = (v for some in times for v in some)
        chosen = [v for k, v in named if (k in whats if whats else k not in WAITING)]
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


def facts_of(
    plan: Plan,
    ranks: int,
    threads: int | None,
    workers: int,
    plain: bool = False,
) -> Facts:
    """The facts of a plan, run with so many threads or workers; ``plain``: of torch's DataLoader."""
    chain = plan.chain
    stages = tuple(map(_of_stage, stages_within(chain.stages)))
    if not plain and not calls_python(plan):
        workers = 0
    if threads is None:
        threads = 0 if plain else default_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about: dict[str, Any] = {
        "threads": threads,
        "workers": workers,
        "plain": plain,
        "cores": cores or 1,
    }
    about |= {"shards": chain.num_shards, "ranks": ranks}
    about["lengths_by"], about["pairs"] = lengths_by(chain.stages)
    windows = Memory(plan, ranks).held if chain.shuffle else 0
    about |= {"window_bytes": windows, "memory_bytes": free_memory()}
    source = plan.inputs.source if plan.inputs.is_open else None
    if isinstance(source, FileBlocks):
        lengths, files = source.lengths, source.files
        about |= {
            "local": source.is_local,
            "kept_bytes": files.cache is not None,
            "prefetch_bytes": files.prefetch_bytes,
            "file_bytes": int(np.maximum(source.sizes, 0).sum()),
            "group_rows": int(np.median(lengths)) if len(lengths) else 0,
            "largest_group": int(lengths.max(initial=0)),
        }
    return Facts(stages, **about)


def _of_stage(stage: Stage) -> StageFacts:
    workers = int(getattr(stage, "num_workers", 0) or 0)
    return StageFacts(
        str(stage), stage.name, stage._calls_function, stage._runs_user_code, workers,
        workers > 0 and getattr(stage, "method", "process") == "process",
        isinstance(stage, Tokenizes) and not isinstance(stage, TokenizedBy),
    )  # fmt: skip


def free_memory() -> int:
    """Bytes of memory that this process has or can still get; 0 if unknown."""
    free = []
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo") as lines:
            about = dict(line.split(":", 1) for line in lines)
        free.append(int(about["MemAvailable"].split()[0]) * 1024)
    with (
        suppress(OSError, ValueError),
        open("/sys/fs/cgroup/memory.max") as most,
        open("/sys/fs/cgroup/memory.current") as now,
    ):
        free.append(int(most.read()) - int(now.read()))
    with suppress(OSError, AttributeError), open("/proc/self/statm") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident + min(free) if free else 0
    return 0


def busy_seconds() -> float | None:
    """Seconds of CPU that all programs have taken on the cores of this process; None if unknown."""
    with suppress(OSError, ValueError, AttributeError), open("/proc/stat") as lines:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        of_cores = [line.split()[1:8] for line in lines if line.split(None, 1)[0] in cores]
        # user, nice, system, idle, iowait, irq, softirq
        ticks = sum(int(times[n]) for times in of_cores for n in (0, 1, 2, 5, 6))
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has taken so far; 0 if it is gone, or this is not Linux."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def parts_of(loader: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The pipeline of a loader, the object whose waiting is counted, and how it runs. (None, None, {}) for
    others.
    """
    seen = 0
    while loader is not None and seen < 8:
        if is_pipeline_or_loader(loader):
            pipeline = loader if isinstance(loader, Record) else loader.pipeline
            return pipeline, loader._iteration, loader._iteration.how
        inner = getattr(loader, "dataset", None) if hasattr(loader, "num_workers") else None
        if isinstance(inner, Record):
            return inner, None, {"threads": 0, "workers": loader.num_workers, "plain": True}
        names = ("loader", "base_dataloader", "dataloader")
        loader = next(
            (vars(loader)[n] for n in names if n in getattr(loader, "__dict__", {})), None
        )
        seen += 1
    return None, None, {}
