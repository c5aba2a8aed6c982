"""From results.json to results.md and pictures: ``python -m benchmarks.report FOLDER``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contestants import ENTRIES
from benchmarks.jobs import JOBS, job
from benchmarks.targets import PEERS, TARGETS, median

__all__ = ["write"]


def write(folder: Path) -> None:
    """Write the table, and pictures if matplotlib is there, beside results.json."""
    held = json.loads((folder / "results.json").read_text())
    (folder / "results.md").write_text("\n".join(lines(held)))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: pip install matplotlib", file=sys.stderr)
        return
    from benchmarks.pictures import draw

    draw(held["cells"], folder)


def lines(held: dict[str, Any]) -> Iterator[str]:
    cells, machine, made = held["cells"], held["machine"], held["made"]
    ids, text = made["ids"], made["text"]
    load = machine["load before"]
    yield f"# {held['size'].capitalize()} run\n"
    yield (
        f"{machine['cores given'] or machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
        + f"; load before the run {load[0]:.1f}; {held['minutes']:.0f} minutes."
    )
    yield (
        f"\nToken ids: {ids['rows']:,} rows of {ids['tokens'] / ids['rows']:.0f} tokens. Text: "
        f"{text['rows']:,} rows of {text['tokens'] / text['rows']:.0f} tokens. Shuffle buffer "
        f"{held['settings']['sizes']['buffer']:,} rows, batches of 32. Medians; the number of runs is in "
        "brackets where it is not the same for all.\n"
    )
    yield "## Targets\n"
    yield "| what | must | stretch | measured | |\n|---|---|---|---|---|"
    for target in TARGETS:
        found = target.ratio(cells)
        sign = "<=" if target.most else ">="
        bounds = f"{sign} {target.shown(target.must)} | {target.shown(target.stretch)}"
        yield f"| {target.what} | {bounds} | {target.shown(found)} | {target.verdict(found)} |"
    for name in JOBS:
        if cells.get(name):
            yield from table(name, cells[name], cells)
    if held["converting"]:
        yield "\n## Conversion to formats of their own\n"
        yield "| | seconds |\n|---|---|"
        for name, seconds in held["converting"].items():
            entry, _, kind = name.rpartition("-")
            yield f"| {ENTRIES[entry].title}, {kind} | {seconds:.0f} |"
    yield ""


def table(name: str, cells: dict[str, Any], every: dict[str, Any]) -> Iterator[str]:
    task = job(name)
    yield f"\n## {task.TITLE}\n"
    compared = task.COLUMNS[0][0] == "rate"
    heads = [head for _, head, _ in task.COLUMNS] + (
        ["against the fastest peer"] if compared else []
    )
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    usual = max((len(cell["runs"]) for cell in cells.values()), default=0)
    best = max((median(every, name, e, "rate") or 0 for e in cells if e in PEERS), default=0)
    for entry, cell in cells.items():
        count = len(cell["runs"])
        mark = f" ({count})" if 0 < count != usual else ""
        if cell["cannot"] is not None and not count:
            yield f"| {ENTRIES[entry].title} | {cell['cannot']} |" + " |" * (len(heads) - 1)
            continue
        row = [shown(every, name, entry, key, form) for key, _, form in task.COLUMNS]
        rate = median(every, name, entry, "rate")
        if compared:
            row.append(f"{rate / best:.2f}" if rate and best else "")
        yield f"| {ENTRIES[entry].title}{mark} | {' | '.join(row)} |"


def shown(cells: dict[str, Any], name: str, entry: str, key: str, form: str) -> str:
    """A cell of a table: the median, or what was said."""
    value = median(cells, name, entry, key)
    if value is None:
        runs = cells[name][entry]["runs"]
        said = [run[key] for run in runs if key in run]
        return str(said[0]) if said else ""
    if form == "ms":
        return f"{value * 1e3:,.0f}"
    if form == "MB":
        return f"{value / 1e6:,.0f}"
    return format(value, form)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
