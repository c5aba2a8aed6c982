"""For people: one chain as code, what it gives, and the table of all."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from frozen import corpus
from frozen.chains import CHAINS, draw, short

__all__ = ["dump", "show", "table"]


def show(number: int, say: Callable[..., None], against: str | None = None) -> int:
    """Print a chain as code that runs, and what it gave and gives; 1 where that is something else."""
    from frozen import adapter

    chain = draw(number)
    say(f"# chain {number}: {short(chain)}\n")
    say(adapter.running(adapter.code(chain), chain["run"]))
    say(f"\n# read as {json.dumps(chain['run'])}")
    with corpus.small_data():
        result = corpus.run_one(number)
    written = corpus.read().get(number)
    say(f"# {result.kind}: {result.said}")
    say(f"# written down: {written.digest if written else 'nothing'}; now: {result.digest}")
    same = written is not None and written.digest == result.digest
    if written is not None and not same:
        say(f"# other: {changed(written.digest, result.digest)}")
    if against is not None:
        say(f"\n# items there (-) and here (+), of those that differ, in {against}")
        there, here = _dump_of(Path(against), number), _dump_of(corpus.FILE.parents[2], number)
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
    from frozen import running
    from frozen.digests import digest

    seen: dict[str, str] = {}

    def noted(item: object) -> str:
        found = digest(item)
        seen.setdefault(found, " ".join(repr(item).split()))
        return found

    running.digest = noted
    with corpus.small_data() as folder:
        outcome = running.run(draw(number), number)
    say(f"{outcome.kind}: {outcome.said}".replace(str(folder), "…"))
    for epoch, items in enumerate(outcome.items):
        for place, item in enumerate(items):
            say(f"epoch {epoch}, item {place}: {seen[item][:600]}".replace(str(folder), "…"))
    order = {item: place for place, item in enumerate(seen)}
    for leg, ranks in enumerate(outcome.legs):
        for rank, epochs in enumerate(ranks):
            got = [[order.get(item, item) for item in items] for items in epochs]
            say(f"leg {leg}, rank {rank}: {got}")


def table(lines: dict[int, corpus.Line]) -> str:
    """How the chains are distributed."""
    from frozen import adapter

    stages, sources, kinds = Counter[str](), Counter[str](), Counter[str]()
    options = Counter[str]()
    for number in range(CHAINS):
        chain = draw(number)
        words = adapter.words(chain)
        source = chain["source"][0]
        source = f"recipe {chain['source'][1]['name']}" if source == "recipe" else source
        sources[source] += 1
        for word in words - {chain["source"][0]}:
            stages[word] += 1
        run = chain["run"]
        kinds["several ranks"] += any(leg[0] > 1 for leg in run["legs"])
        kinds["other ranks after a resume"] += len({leg[0] for leg in run["legs"]}) > 1
        kinds["resumed"] += len(run["legs"]) > 1
        kinds["resumed at an epoch's end"] += any(leg[2] in ("last", "end") for leg in run["legs"])
        kinds["uncounted"] += run["uncounted"]
        kinds["without an end"] += run["limit"] is not None
        kinds["with worker processes"] += any(leg[1] for leg in run["legs"])
        kinds["ranks in processes"] += run["apart"]
        kinds["through Loader"] += run["reads"] == "loader"
        kinds[f"threads {run['threads']}"] += 1
        line = lines.get(number)
        kinds["refused"] += line is not None and line.text.startswith("refused")
        for name, given in [chain["source"], *chain["stages"]]:
            for option in given:
                if option and option != "parts":
                    options[f"{name}.{option}"] += 1
    found = []
    for title, counter in (
        ("kinds", kinds),
        ("sources", sources),
        ("also in chains", stages),
        ("options", options),
    ):
        row = ", ".join(f"{name} {count}" for name, count in counter.most_common())
        found.append(f"{title}: {row}")
    return "\n".join(found)
