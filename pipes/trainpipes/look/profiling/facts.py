"""What is known of a run before it: of the pipeline's stages, its files and its loader."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from trainpipes._internal.pool import default_threads
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record, is_pipeline_or_loader
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import stages_within
from trainpipes.look.profiling.measured import Facts, StageFacts
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.stages.tokenizing import TokenizedBy, Tokenizes, lengths_by


def facts_of(
    plan: Plan,
    ranks: int,
    window_bytes: int | None,
    threads: int | None,
    workers: int,
    plain: bool = False,
) -> Facts:
    """The facts of a plan, run with so many threads or workers; ``plain``: of torch's DataLoader."""
    chain = plan.chain
    stages = tuple(map(_of_stage, stages_within(chain.stages)))
    if threads is None:
        threads = 0 if workers or plain else default_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about: dict[str, Any] = {
        "threads": threads,
        "workers": workers,
        "plain": plain,
        "cores": cores or 1,
    }
    about |= {"shards": chain.num_shards, "ranks": ranks}
    about["lengths_by"], about["pairs"] = lengths_by(chain.stages)
    about |= {"window_bytes": window_bytes or 0, "memory_bytes": free_memory()}
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
        own = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return own + min(free) if free else 0
    return 0


def busy_seconds() -> float | None:
    """Seconds of CPU that all programs of the machine have taken, over all cores; None if unknown."""
    with suppress(OSError, ValueError, AttributeError), open("/proc/stat") as lines:
        user, nice, system, _, _, irq, softirq, *_ = map(int, lines.readline().split()[1:])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
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
