"""An inspection as tables for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from trainpipes._internal.amount import amount
from trainpipes.look.inspection.as_text import (
    MOST_BAD,
    MOST_COLUMNS,
    head_lines,
    length_lines,
    near,
)
from trainpipes.look.inspection.cells import harmless
from trainpipes.look.inspection.inspection import Inspection, Lengths
from trainpipes.look.inspection.row_findings import percent

__all__ = ["as_html"]


def as_html(found: Inspection) -> str:
    """Tables of HTML without scripts; all that comes from files is escaped."""
    parts = [_table(None, [list(line) for line in head_lines(found)])]
    columns = [
        [
            c.name,
            c.type,
            "?" if c.nulls is None else percent(c.nulls),
            "" if c.bytes is None else amount(c.bytes),
            c.least or "",
            c.most or "",
        ]
        for c in found.columns[:MOST_COLUMNS]
    ]
    if columns:
        parts.append(_table(["column", "type", "nulls", "bytes", "least", "most"], columns))
    if len(found.columns) > MOST_COLUMNS:
        parts.append(_line(f"… {len(found.columns) - MOST_COLUMNS:,} more columns"))
    if found.shown:
        names = list(found.shown[0])[:MOST_COLUMNS]
        parts.append(_table(names, [[row.get(name, "") for name in names] for row in found.shown]))
    for lengths in found.lengths:
        parts.append(_histogram(lengths))
    for bad in found.unreadable[:MOST_BAD]:
        parts.append(_line(near(f"cannot be read: {bad.path}: {bad.reason}")))
    for one in found.findings:
        cure = f"<br><code>{escape(harmless(near(one.cure)))}</code>" if one.cure else ""
        said = escape(harmless(near(f"{one.level}: {one.text}")))
        parts.append(f"<p>{said}{cure}</p>")
    return f"<div>{''.join(parts)}</div>"


def _histogram(lengths: Lengths) -> str:
    most, total = max(lengths.counts), sum(lengths.counts)
    rows = "".join(
        f'<tr><td>{edge:,}</td><td style="text-align:left"><div style="background:#69c;height:1em;'
        f'width:{200 * count / most:.0f}px"></div></td><td>{percent(count / total)}</td></tr>'
        for edge, count in zip(lengths.edges, lengths.counts, strict=False)
    )
    names = " + ".join(lengths.columns)
    told = "".join(map(_line, length_lines(lengths)))
    return f"{_line(f'{lengths.unit} of {names}')}<table>{rows}</table>{told}"


def _line(text: str) -> str:
    return f"<p>{escape(harmless(text))}</p>"


def _table(heads: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    head = ""
    if heads is not None:
        head = "<tr>" + "".join(f"<th>{escape(harmless(name))}</th>" for name in heads) + "</tr>"
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(harmless(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{head}{body}</table>"
