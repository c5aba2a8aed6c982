"""Rows of micro-batches, and what of them is padding: ``pipe.padding().plot()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainpipes.look.pictures.figures import BLUE, ORANGE, axes_for, titled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainpipes.look.forecast.padding_share import PaddingShare

__all__ = ["draw"]

#: Micro-batches that are drawn, and rows of each.
MOST_BATCHES, MOST_ROWS = 24, 256
#: Between two micro-batches, as a part of one.
SPACE = 0.12


def draw(share: PaddingShare, ax: Axes | None) -> Figure:
    """See ``PaddingShare.plot``."""
    figure, ax = axes_for(ax, "padding().plot()", (8, 4.4))
    count = min(share.batches, MOST_BATCHES)
    chosen = np.unique(np.linspace(0, max(0, share.batches - 1), count).astype(np.int64)).tolist()
    for place, number in enumerate(chosen):
        held = np.sort(share.lengths[number])[::-1]
        if len(held) > MOST_ROWS:
            held = held[np.linspace(0, len(held) - 1, MOST_ROWS).astype(np.int64)]
        edges = place + np.linspace(SPACE / 2, 1 - SPACE / 2, len(held) + 1)
        full = np.full(len(held), share.widths[number])
        said: dict[str, Any] = {} if place else {"label": "padding"}
        ax.stairs(full, edges, baseline=held, fill=True, color=ORANGE, alpha=0.55, lw=0, **said)
        said = {} if place else {"label": "tokens"}
        ax.stairs(held, edges, fill=True, color=BLUE, lw=0, **said)
    ax.set_xlim(0, max(1, len(chosen)))
    step = max(1, -(-len(chosen) // 12))
    ax.set_xticks([p + 0.5 for p in range(0, len(chosen), step)], chosen[::step])
    ax.tick_params(axis="x", length=0)
    whole_ticks(ax.yaxis)
    ax.set_xlabel("micro-batch; its rows side by side, the longest first")
    ax.set_ylabel("tokens of a row")
    if chosen:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    many = f"{share.batches:,} micro-batch{'es' * (share.batches != 1)}"
    drawn = "" if len(chosen) == share.batches else f"; {len(chosen)} of them drawn, evenly taken"
    titled(
        ax,
        f"{share.share:.1%} of what a model computes is padding" if share.batches else "No batches",
        [f"{share.padding:,} of {share.cells:,} cells in {many}{drawn}"],
    )
    return figure
