"""The documents of packed rows: ``pipe.packing().plot()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainpipes.look.pictures.figures import COLOURS, EMPTY, axes_for, titled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainpipes.look.forecast.packed_rows import PackedRows

__all__ = ["draw"]

MOST_ROWS = 100
#: Documents whose edges can be seen, in one row.
MOST_EDGES = 60


def draw(packed: PackedRows, ax: Axes | None) -> Figure:
    """See ``PackedRows.plot``."""
    rows = packed.lengths[:MOST_ROWS]
    figure, ax = axes_for(ax, "packing().plot()", (8, 1.9 + min(5.6, 0.16 * len(rows))))
    ax.barh(range(len(rows)), packed.max_length, height=0.86, color=EMPTY, label="empty")
    left: list[list[float]] = [[] for _ in COLOURS]
    wide: list[list[float]] = [[] for _ in COLOURS]
    high: list[list[int]] = [[] for _ in COLOURS]
    for number, lengths in enumerate(rows):
        starts = np.cumsum(lengths) - lengths
        for place, (start, length) in enumerate(
            zip(starts.tolist(), lengths.tolist(), strict=True)
        ):
            # Neighbours in a row differ, and so do the first ones of neighbouring rows.
            which = (place + 3 * number) % len(COLOURS)
            left[which].append(start)
            wide[which].append(length)
            high[which].append(number)
    edge = 0.5 if max(map(len, rows), default=0) <= MOST_EDGES else 0
    for colour, lefts, widths, numbers in zip(COLOURS, left, wide, high, strict=True):
        ax.barh(
            numbers, widths, left=lefts, height=0.86, color=colour, edgecolor="white",
            linewidth=edge,
        )  # fmt: skip
    ax.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    ax.set_xlim(0, max(1, packed.max_length))
    whole_ticks(ax.xaxis, ax.yaxis)
    ax.set_xlabel("tokens of a row: one colour a document, grey is empty")
    ax.set_ylabel("packed row")
    each = packed.documents / max(1, packed.rows)
    drawn = "" if len(rows) == packed.rows else f"; the first {len(rows)} drawn"
    titled(
        ax,
        f"{packed.share:.1%} of packed rows is empty",
        [
            f"{packed.rows:,} row{'s' * (packed.rows != 1)} of {packed.max_length:,} tokens, "
            f"{each:.1f} documents in each{drawn}"
        ],
    )
    return figure
