"""Whether what is promised holds.

    python -m benchmarks --check [--install]

Some ten minutes on 2 cores. Runs what the promises need (``promises.py``) at a small size, the suite's
contestants in turn with each other, and prints what is promised where, the bound, what was found, and whether
that is enough. Ends with 1 if a promise is not kept, or cannot be measured here. Of other libraries only
``datasets`` and ``webdataset`` take part; ``--install`` installs them, each in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import trainpipes
import trainpipes_recipes
from benchmarks import environments
from benchmarks.alone import ALONE, NEEDS
from benchmarks.contestants import ENTRIES
from benchmarks.jobs import JOBS, job
from benchmarks.promises import PROMISES
from benchmarks.suite import ROOT, Suite
from benchmarks.targets import Cells, Target

__all__ = ["NOISE", "check", "lines", "needed", "verdict"]

#: How much worse than its bound a figure may be found: medians of the same code differ by that.
NOISE = 0.08
BELOW, UNKNOWN = "BELOW", "not measured"


def needed(promises: Iterable[Target]) -> tuple[dict[str, list[str]], list[str]]:
    """The contestants of each job that the promises need, of those that need no installing; and the
    measurements beside the suite."""
    asked = {cell[:2] for promise in promises for cell in (*promise.above, *promise.below)}
    # What is resumed was saved by a whole epoch.
    asked |= {("whole_epoch", entry) for name, entry in asked if name == "resume"}
    jobs = {
        name: [
            entry
            for entry in job(name).ENTRIES
            if (name, entry) in asked and ENTRIES[entry].environment is None
        ]
        for name in JOBS
    }
    alone = [name for name in ALONE if (name, "ours") in asked]
    return {name: entries for name, entries in jobs.items() if entries}, alone


def verdict(promise: Target, found: float | None) -> str:
    """Whether a promise is kept, in words."""
    if found is None:
        return UNKNOWN
    if promise.reaches(found, promise.must):
        return "ok"
    bound = promise.must * (1 + NOISE if promise.most else 1 - NOISE)
    return "ok, within the noise" if promise.reaches(found, bound) else BELOW


def lines(cells: Cells, promises: Iterable[Target] = PROMISES) -> Iterator[str]:
    """The table."""
    yield "| promise | where | must | measured | |"
    yield "|---|---|---|---|---|"
    for promise in promises:
        found = promise.ratio(cells)
        sign = "<=" if promise.most else ">="
        bound = f"{sign} {promise.shown(promise.must)}"
        said = verdict(promise, found)
        yield f"| {promise.what} | {promise.where} | {bound} | {promise.shown(found)} | {said} |"


def check(folder: Path, size: str = "check", promises: tuple[Target, ...] = PROMISES) -> int:
    """Measure, print the table, and say how many promises are not kept, or cannot be measured here.

    Args:
        folder: for data and results.
        size: a key of ``SETTINGS``.
        promises: what to look at.
    """
    jobs, names = needed(promises)
    load = os.getloadavg()
    suite = Suite(size, folder, list(jobs), [], entries=jobs)
    suite.load = load
    suite.run()
    cells: Cells = dict(suite.cells)
    for number, name in enumerate(names):
        Suite.tell(f"{number + 1} of {len(names)}: {name}")
        cells[name] = {"ours": measured(name, size == "tiny", suite.environments)}
    Suite.tell("")
    cannot = list(reasons(cells))
    table = list(lines(cells, promises))
    below, unknown = (
        sum(line.endswith(f"| {word} |") for line in table) for word in (BELOW, UNKNOWN)
    )
    said = f"load before {load[0]:.1f}; {below} below what is promised, {unknown} not measured"
    text = "\n".join([*table, "", *cannot, said])
    (suite.results / "promises.md").write_text(text + "\n")
    print(f"\n{text}\n\n{suite.results}/promises.md")
    return below + unknown


def measured(name: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """The cell of a measurement beside the suite.

    Args:
        name: of it.
        tiny: whether it is to be as small as can be.
        folder: the environments.
    """
    python = environments.python_of(folder, NEEDS.get(name))
    if python is None:
        return {
            "runs": [],
            "cannot": f"needs {NEEDS[name]}; python -m benchmarks --check --install",
        }
    command = [python, "-m", "benchmarks.alone", name, *(["--tiny"] if tiny else [])]
    roots = (trainpipes.__file__, trainpipes_recipes.__file__)
    places = [*(str(Path(root).parents[1]) for root in roots), os.environ.get("PYTHONPATH", "")]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return {"runs": [], "cannot": said[-1][:160]}
    return {"runs": [json.loads(done.stdout.strip().splitlines()[-1])], "cannot": None}


def reasons(cells: Cells) -> Iterator[str]:
    """Why contestants have no figure."""
    for name, entries in cells.items():
        for entry, cell in entries.items():
            if cell["cannot"] is not None:
                yield f"{name}, {ENTRIES[entry].title}: {cell['cannot']}"
