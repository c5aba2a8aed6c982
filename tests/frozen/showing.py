"""For people: one chain as code, and what it gives."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from frozen import adapter, chains, corpus, running
from frozen.digests import digest

__all__ = ["changed", "dump", "show"]


def show(number: int, say: Callable[..., None], against: str | None = None) -> int:
    """Print a chain as code that runs, and what it gave and gives; 1 where that is something else."""
    written = chains.read()[number]
    chain = written.chain
    say(f"# chain {number}: {chains.short(chain)}\n")
    say(adapter.running(adapter.code(chain), chain["run"]))
    say(f"\n# read as {json.dumps(chain['run'])}")
    with corpus.small_data():
        result = corpus.run_one(number)
    say(f"# {result.kind}: {result.said}")
    say(f"# written down: {written.digest}; now: {result.digest}")
    same = written.digest == result.digest
    if not same:
        say(f"# other: {changed(written.digest, result.digest)}")
    if against is not None:
        say(f"\n# items there (-) and here (+), of those that differ, in {against}")
        there, here = _dump_of(Path(against), number), _dump_of(chains.FILE.parents[2], number)
        lines = list(difflib.unified_diff(there, here, lineterm="", n=1))[2:]
        say("\n".join(lines[:80]) if lines else "# no difference")
    return int(not same)


def changed(before: str, after: str) -> str:
    """What a digest tells of what has changed."""
    if before[:8] != after[:8]:
        return "the run without a stop"
    return "the legs alone: order on ranks, epochs' ends or lengths"


def _dump_of(checkout: Path, number: int) -> list[str]:
    places = [str(checkout / "pipes"), str(checkout / "recipes")]
    command = [sys.executable, str(checkout / "tests/frozen"), "dump", str(number)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()


def dump(number: int, say: Callable[..., None]) -> None:
    """Print every item of the run without a stop, and which of them each rank of each leg got."""
    seen: dict[str, str] = {}

    def noted(item: object) -> str:
        found = digest(item)
        seen.setdefault(found, " ".join(repr(item).split()))
        return found

    running.digest = noted
    with corpus.small_data() as folder:
        outcome = running.run(chains.read()[number].chain, number)
    say(f"{outcome.kind}: {outcome.said}".replace(str(folder), "…"))
    for epoch, items in enumerate(outcome.items):
        for place, item in enumerate(items):
            say(f"epoch {epoch}, item {place}: {seen[item][:600]}".replace(str(folder), "…"))
    order = {item: place for place, item in enumerate(seen)}
    for leg, ranks in enumerate(outcome.legs):
        for rank, epochs in enumerate(ranks):
            got = [[order.get(item, item) for item in items] for items in epochs]
            say(f"leg {leg}, rank {rank}: {got}")
