"""Items for a notebook: tables, text with what is learnt marked, and small pictures."""

from __future__ import annotations

from html import escape

from trainpipes.look.preview.as_text import share_line
from trainpipes.look.preview.item_view import ItemView
from trainpipes.look.preview.pieces import Piece

__all__ = ["LEGEND", "html_of"]

#: Colours that can be read on a light and on a dark page.
LEARNT = "text-decoration:underline;background:rgba(46,160,67,.25)"
DIM = "opacity:.7"
TEXT = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;text-align:left"
LEGEND = f'<p><span style="{LEARNT}">text</span> learnt: a target of the loss</p>'


def html_of(view: ItemView) -> str:
    """An item."""
    rows = "" if view.rows is None else f", {view.rows:,} row{'s' * (view.rows != 1)}"
    parts = [f"<p><b>{escape(view.title)}</b> {escape(view.kind)}{rows}</p>"]
    if view.values:
        parts.append(_table(view))
    parts += [f"<p>{escape(share_line(counts))}</p>" for counts in view.counts]
    parts += [f"<p><b>{escape(note)}</b></p>" for note in view.notes]
    lines = [
        f'<tr><th>{one.row}</th><th>{escape(one.name)}</th><td style="{TEXT}">'
        f"{''.join(map(_piece, one.pieces))}</td></tr>"
        for one in view.texts
    ]
    if lines:
        parts.append(f"<table>{''.join(lines)}</table>")
    parts += [html_of(inner) for inner in view.inner]
    return f"<div>{''.join(parts)}</div>"


def _table(view: ItemView) -> str:
    lines = []
    for value in view.values:
        shape = "" if value.shape is None else f"[{', '.join(f'{n:,}' for n in value.shape)}]"
        span = "" if value.low is None else f"{value.low} to {value.high} "
        small = "".join(
            f'<img src="data:image/png;base64,{picture}" alt="{escape(value.name)}"/> '
            for picture in view.pictures.get(value.name, ())
        )
        cells = [escape(value.name), escape(value.type), shape]
        text = f'<td style="{TEXT}">{span}{escape(value.text or "")}{small}</td>'
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{text}</tr>")
    more = "<tr><td>…</td></tr>" if view.more else ""
    head = "<tr><th>name</th><th>type</th><th>shape</th><th></th></tr>"
    return f"<table>{head}{''.join(lines)}{more}</table>"


def _piece(piece: Piece) -> str:
    if piece.kind == "plain":
        return escape(piece.text)
    if piece.kind == "learnt":
        truth = "" if piece.truth is None else f"→<b>{escape(piece.truth)}</b>"
        return f'<span style="{LEARNT}">{escape(piece.text)}{truth}</span>'
    text = {
        "document": " ║ ",
        "left_out": f"…{piece.tokens:,}…",
        "padding": f"‹{piece.tokens:,} padding›",
    }[piece.kind]
    return f'<span style="{DIM}">{text}</span>'
