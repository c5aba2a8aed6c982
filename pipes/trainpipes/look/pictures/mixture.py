"""The shares of a mix's sources over the draws: ``pipe.mixture().plot()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainpipes.look.pictures.figures import COLOURS, GREY, INK, axes_for, titled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainpipes.look.forecast.mixture_shares import MixtureShares

__all__ = ["draw"]

#: Stretches that the draws are cut into, and the rows of one, at least.
MOST_STRETCHES, LEAST_ROWS = 80, 25
#: Characters of a source's name.
MOST_NAME = 28


def draw(shares: MixtureShares, ax: Axes | None) -> Figure:
    """See ``MixtureShares.plot``."""
    figure, ax = axes_for(ax, "mixture().plot()", (8, 4.6))
    total = int(shares.sizes.sum())
    stretches = int(np.clip(len(shares.sources) // LEAST_ROWS, 1, MOST_STRETCHES))
    # In the middle of a row stands which stretch it is in.
    middle = np.cumsum(shares.sizes) - shares.sizes / 2
    stretch = np.minimum((middle * stretches / max(1, total)).astype(np.int64), stretches - 1)
    drawn = np.zeros((len(shares.names), stretches))
    np.add.at(drawn, (shares.sources, stretch), shares.sizes)
    drawn /= np.maximum(1, drawn.sum(axis=0))
    edges = np.linspace(0, max(1, total), stretches + 1)

    order = np.argsort(-np.array(shares.shares), kind="stable")
    alone = order if len(order) <= len(COLOURS) else order[: len(COLOURS) - 1]
    groups = [([int(i)], shares.names[i], c) for i, c in zip(alone, COLOURS, strict=False)]
    if len(alone) < len(order):
        rest = order[len(alone) :].tolist()
        groups.append((rest, f"{len(rest)} others", GREY))
    floor, target = np.zeros(stretches), np.zeros(len(shares.steps))
    starts = [min(start, total) for start, _ in shares.steps]
    for members, name, colour in groups:
        top = floor + drawn[members].sum(axis=0)
        said = sum(shares.shares[i] for i in members)
        goal = sum(shares.targets[i] for i in members)
        name = name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"
        # A name that begins with _ would be left out of a legend; a $ would be taken for a formula.
        label = f"{name}: {said:.1%} (target {goal:.1%})".replace("$", r"\$")
        ax.stairs(top, edges, baseline=floor, fill=True, color=colour, lw=0, label=f" {label}")
        floor = top
        target = target + np.array([sum(step[i] for i in members) for _, step in shares.steps])
        if members is not groups[-1][0]:
            ax.step(
                [*starts, max(1, total)], [*target, target[-1]], where="post", color=INK,
                linestyle=(0, (4, 3)), linewidth=1,
            )  # fmt: skip
    ax.set_xlim(0, max(1, total))
    ax.set_ylim(0, 1)
    whole_ticks(ax.xaxis)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    ax.set_xlabel(f"{shares.unit} drawn from the mix, over all shards")
    ax.set_ylabel(f"share of the {shares.unit}")
    ax.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, reverse=True,
        handlelength=1.2,
    )  # fmt: skip
    off = max((abs(a - b) for a, b in zip(shares.shares, shares.targets, strict=True)), default=0)
    many = f"{len(shares.names)} source{'s' * (len(shares.names) != 1)}"
    titled(
        ax,
        f"Shares of {many}, at most {off:.1%} off",
        [f"{len(shares.sources):,} rows. Dashed: the targets between sources, as the weights say"],
    )
    return figure
