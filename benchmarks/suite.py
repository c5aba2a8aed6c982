"""Everything, side by side, in one run.

    python -m benchmarks [--quick | --full | --check] [--install] [--jobs NAME ...] [--only NAME ...]

Run from the repository's root. Makes its own data, runs each contestant in a process of its own, in turn with
the others, and writes a table (results.md), all figures (results.json) and pictures below build/benchmarks.
See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.contestants import ENTRIES, ENVIRONMENTS
from benchmarks.corpus import make
from benchmarks.jobs import JOBS, job
from benchmarks.one import CONVERT
from benchmarks.processes import pss
from benchmarks.report import write
from benchmarks.settings import SETTINGS, Settings

__all__ = ["ROOT", "Suite"]

ROOT = Path(__file__).parent.parent
#: Seconds between two looks at a process's memory.
LOOK = 0.1


class Suite:
    """The cells of the chosen jobs and contestants.

    Args:
        size: a key of ``SETTINGS``.
        folder: for data, environments and results.
        jobs, only: names; all if empty.
        repeats: instead of those of the settings.
        entries: the contestants of each job, instead of those that it names.
    """

    def __init__(
        self,
        size: str,
        folder: Path,
        jobs: list[str],
        only: list[str],
        repeats: int | None = None,
        entries: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.size = size
        self.settings: Settings = SETTINGS[size]
        self.repeats = repeats or self.settings.repeats
        self.environments = folder / "environments"
        self.data = folder / f"data-{size}"
        self.results = folder / f"results-{size}"
        names = [name for name in JOBS if not jobs or name in jobs]
        self.cells: dict[str, dict[str, Any]] = {
            name: {
                entry: {"runs": [], "cannot": None, "spent": 0.0}
                for entry in (
                    entries[name]
                    if entries is not None
                    else job(name).QUICK
                    if size == "quick" and not only
                    else job(name).ENTRIES
                )
                if not only or entry in only
            }
            for name in names
        }
        self.converting: dict[str, float] = {}

    def run(self) -> None:
        start = time.time()
        make(self.data, self.settings.sizes, self.tell)
        for number in range(self.repeats):
            for name, cells in self.cells.items():
                for entry, cell in cells.items():
                    if self.wanted(name, entry, cell):
                        where = f"{number + 1} of {self.repeats}: {name}, {entry}"
                        self.tell(f"{where}, {time.time() - start:.0f} s")
                        self.fill(name, entry, cell, number)
            self.save(start)
        self.tell("")
        write(self.results)

    def wanted(self, name: str, entry: str, cell: dict[str, Any]) -> bool:
        if cell["cannot"] is not None or (job(name).ONCE and cell["runs"]):
            return False
        if ENTRIES[entry].group != "peer":
            return True
        return bool(cell["spent"] < self.settings.cell)

    def fill(self, name: str, entry: str, cell: dict[str, Any], number: int) -> None:
        """Run a cell once."""
        task = job(name)
        begun = time.perf_counter()
        missing = self.missing(entry) or self.convert(entry, task.TEXT)
        found = (
            {"cannot": missing}
            if missing
            else self.process(entry, task.MEMORY, name=name, round=number)
        )
        cell["spent"] += time.perf_counter() - begun
        if "cannot" in found:
            cell["cannot"] = found["cannot"]
        else:
            cell["runs"].append(found)

    def missing(self, entry: str) -> str | None:
        name = ENTRIES[entry].environment
        if environments.python_of(self.environments, name) is None:
            return "not installed; python -m benchmarks --install"
        return None

    def convert(self, entry: str, text: bool) -> str | None:
        """Let it write its own format, once for these data."""
        if not ENTRIES[entry].converts:
            return None
        made = self.data / "converted" / f"{entry}-{'text' if text else 'ids'}.json"
        if not made.exists():
            made.parent.mkdir(exist_ok=True)
            begun = time.perf_counter()
            found = self.process(entry, False, name=CONVERT, round=0, text=text)
            if "cannot" in found:
                return f"converting: {found['cannot']}"
            made.write_text(json.dumps(time.perf_counter() - begun))
        self.converting[made.stem] = json.loads(made.read_text())
        return None

    def process(self, entry: str, memory: bool, **told: Any) -> dict[str, Any]:
        """One run in a process of its own; everything below it is ended with it."""
        python = environments.python_of(self.environments, ENTRIES[entry].environment)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            told |= {"entry": entry, "folder": str(self.data), "size": self.size, "out": str(out)}
            command = [str(python), "-m", "benchmarks.one", json.dumps(told)]
            environment = {**os.environ, "TMPDIR": folder, "HF_HUB_OFFLINE": "1"}
            with open(Path(folder, "log"), "w+") as log:
                child = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    env=environment,
                    start_new_session=True,
                )
                most, end = 0, time.monotonic() + self.settings.limit
                try:
                    while child.poll() is None and time.monotonic() < end:
                        if memory:
                            most = max(most, pss(child.pid))
                        time.sleep(LOOK if memory else 0.02)
                finally:
                    late = child.poll() is None
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)  # its workers too
                    child.wait()
                log.seek(0)
                said = log.read().strip().splitlines()
            if late:
                return {"cannot": f"did not end in {self.settings.limit:.0f} s"}
            if not out.exists() or not out.read_text():
                return {"cannot": said[-1][:160] if said else f"ended with {child.returncode}"}
            found: dict[str, Any] = json.loads(out.read_text())
            if "cannot" in found:
                self.tell(f"{entry}: {found['cannot']}\n")
            if most:
                found["memory"] = most
            return found

    def save(self, start: float) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        packages = ["torch", "pyarrow", "numpy", "tokenizers", "torchdata", "trainpipes"]
        machine = {
            "cores": os.cpu_count(),
            "cores given": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            "system": platform.platform(),
            "python": platform.python_version(),
            "load before": getattr(self, "load", ()),
            "packages": {name: version(name) for name in packages},
            "peers": {name: list(wanted.requires) for name, wanted in ENVIRONMENTS.items()},
        }
        held = {
            "size": self.size,
            "settings": asdict(self.settings),
            "made": json.loads((self.data / "made.json").read_text()),
            "minutes": (time.time() - start) / 60,
            "cpu minutes": sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60,
            "machine": machine,
            "converting": self.converting,
            "cells": self.cells,
        }
        (self.results / "results.json").write_text(json.dumps(held, indent=1))

    @staticmethod
    def tell(text: str) -> None:
        print(f"\r{text:<100}", end="", file=sys.stderr, flush=True)
