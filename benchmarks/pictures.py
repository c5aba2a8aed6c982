"""Pictures of the results, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

from benchmarks.contestants import ENTRIES
from benchmarks.jobs import job
from benchmarks.targets import median

__all__ = ["draw"]

COLOURS = {"trainpipes": "#c2410c", "peer": "#64748b", "limit": "#cbd5e1"}


def draw(cells: dict[str, Any], folder: Path) -> None:
    """A picture for each job that has runs."""
    for name, key, label, scale in (
        ("pretokenised", "rate", "rows/s", 1.0),
        ("text", "rate", "rows/s", 1.0),
        ("whole_epoch", "memory", "peak memory (PSS), MB", 1e-6),
        ("waiting", "share", "time waiting, % of the run", 100.0),
        ("waiting_slow", "share", "time waiting, % of the run", 100.0),
    ):
        held = {entry: median(cells, name, entry, key) for entry in cells.get(name, {})}
        known = {entry: value * scale for entry, value in held.items() if value is not None}
        if known:
            bars(known, job(name).TITLE, label, folder / f"{name}.png")
    if cells.get("resume"):
        resumes(cells, folder / "resume.png")


def bars(held: dict[str, float], title: str, label: str, path: Path) -> None:
    order = sorted(held, key=lambda entry: held[entry])
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.32 * len(order)), layout="constrained")
    drawn = axes.barh(
        [ENTRIES[entry].title for entry in order],
        [held[entry] for entry in order],
        color=[COLOURS[ENTRIES[entry].group] for entry in order],
    )
    texts = [f"{held[e]:,.0f}" if held[e] >= 100 else f"{held[e]:.2g}" for e in order]
    axes.bar_label(drawn, texts, padding=4, fontsize=8)
    axes.margins(x=0.12)
    axes.set(title=title, xlabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def resumes(cells: dict[str, Any], path: Path) -> None:
    """Milliseconds to the first batch over the place in the epoch."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for entry in cells["resume"]:
        keys = ["cold", "at 0.1", "at 0.5", "at 0.9"]
        held = [median(cells, "resume", entry, key) for key in keys]
        if all(held):
            group = ENTRIES[entry].group
            wide = 2.5 if group == "trainpipes" else 1.2
            values = [value * 1e3 for value in held if value]
            (line,) = axes.plot([0, 10, 50, 90], values, "o-", linewidth=wide, markersize=4)
            exact = cells["resume"][entry]["runs"][0].get("exact") == "yes"
            line.set_label(ENTRIES[entry].title + ("" if exact else " (other rows)"))
            line.set_linestyle("-" if exact else ":")
    axes.set(title="First batch after a resume", xlabel="% of the epoch", ylabel="ms", yscale="log")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
