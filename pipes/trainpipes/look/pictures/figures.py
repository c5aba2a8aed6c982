"""A Matplotlib figure, or the axes given; and the colours of all pictures.

Figures are made without ``pyplot``: nothing is kept open, no display is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from trainpipes._internal.extra import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "COLOURS", "EMPTY", "GREY", "INK", "ORANGE", "axes_for", "titled", "whole_ticks"]

#: Colours that people who do not see all of them can tell apart (Okabe and Ito, "Color Universal Design").
BLUE, ORANGE = "#0072B2", "#E69F00"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
#: Of what is left over, of lines that guide the eye, and of text.
EMPTY, GREY, INK = "#E5E7EB", "#9CA3AF", "#1F2937"


def axes_for(ax: Axes | None, what: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """The axes given and their figure, or new ones.

    Args:
        ax: axes, or None.
        what: is drawn, for the message if Matplotlib is missing.
        size: of a new figure, in inches.
    """
    need("matplotlib", what)
    if ax is None:
        figure = _figure_class()(figsize=size, layout="constrained")
        ax = figure.add_subplot()
    else:
        figure = ax.get_figure(root=True)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def titled(ax: Axes, title: str, lines: Sequence[str] = ()) -> None:
    """Say what is seen, and below it, smaller, in figures."""
    ax.set_title("\n".join(lines), loc="left", fontsize=9, color=INK)
    ax.annotate(
        title, (0, 1), (0, 6 + 12.5 * len(lines)), xycoords="axes fraction",
        textcoords="offset points", fontsize=12, fontweight="bold", color=INK, va="bottom",
    )  # fmt: skip


def whole_ticks(*axes: Any) -> None:
    """Have axes count in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        axis.set_major_formatter("{x:,.0f}")


@cache
def _figure_class() -> Any:
    """Figures that notebooks show also where ``%matplotlib inline`` was not said."""
    from matplotlib.figure import Figure

    def as_png(figure: Any) -> bytes:
        file = BytesIO()
        figure.savefig(file, format="png", dpi=110)
        return file.getvalue()

    return type("Picture", (Figure,), {"_repr_png_": as_png})
