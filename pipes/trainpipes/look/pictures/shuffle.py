"""Where rows come against where they stand: ``shuffle_quality(pipe).plot()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainpipes.look.pictures.figures import BLUE, GREY, axes_for, titled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainpipes.look.shuffle_quality import ShuffleQuality

__all__ = ["draw"]

#: Files between which lines are drawn, at most; more would be a grey area.
MOST_FILES = 40


def draw(quality: ShuffleQuality, ax: Axes | None) -> Figure:
    """See ``ShuffleQuality.plot``."""
    figure, ax = axes_for(ax, "shuffle_quality(...).plot()", (6.4, 6.2))
    place, number = quality.places
    shown = len(place)
    lengths = quality.file_lengths[quality.file_lengths > 0]
    if 1 < len(lengths) <= MOST_FILES:
        for edge in np.cumsum(lengths)[:-1].tolist():
            ax.axhline(edge - 0.5, color=GREY, linewidth=0.6, zorder=0)
    size = float(np.clip(2500 / max(1, shown), 0.6, 30))
    # As one image in a file of shapes: thousands of points would make it large.
    ax.scatter(place, number, s=size, color=BLUE, linewidths=0, rasterized=shown > 500)
    total = max(1, int(lengths.sum()))
    ax.set_xlim(-0.5, max(1, quality.rows) - 0.5)
    ax.set_ylim(-0.5, total - 0.5)
    ax.set_xlabel("place in the order in which rows come")
    ax.set_ylabel("number of the row in the files" + _lines_said(len(lengths)))
    whole_ticks(ax.xaxis, ax.yaxis)
    n = max(1, quality.rows)
    files = f"{quality.files:,} file{'s' * (quality.files != 1)}"
    what = f"{quality.rows:,} row{'s' * (quality.rows != 1)} of {files}"
    drawn = "" if shown == quality.rows else f"; {shown:,} of them drawn"
    titled(
        ax,
        _verdict(quality),
        [
            f"{what}{drawn}. In brackets: a random order",
            f"rank correlation {quality.rank_correlation:.3f} (0 ± {n**-0.5:.3f}), "
            f"displacement {quality.displacement:.3f} (0.333)",
            f"files in a batch {quality.files_per_batch:.1f} ({quality.random_files_per_batch:.1f}), "
            f"spread of a file {quality.file_spread:.2f} (1.00)",
        ],
    )
    return figure


def _lines_said(files: int) -> str:
    return "; lines are between files" if 1 < files <= MOST_FILES else ""


def _verdict(quality: ShuffleQuality) -> str:
    if quality.rows < 2:
        return "Too few rows to be shuffled"
    if quality.neighbours_kept == 1 and abs(quality.rank_correlation) > 0.999:
        return "File order" if quality.rank_correlation > 0 else "File order, backwards"
    near = abs(quality.displacement - 1 / 3) < 0.02 + quality.rows**-0.5
    if near and quality.file_spread > 0.95 and quality.neighbours_kept < 0.01 + 4 / quality.rows:
        return "Shuffled as a random order is"
    if quality.displacement < 0.05:
        return "Shuffled, but rows stay near their place"
    return "Shuffled, less evenly than a random order"
