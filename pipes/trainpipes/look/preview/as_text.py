"""Items as text for a terminal: what is learnt in colour and underlined, or in brackets where there are no
colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from unicodedata import east_asian_width

from trainpipes.look.preview.facts import Facts
from trainpipes.look.preview.item_view import ItemView, TokenCounts
from trainpipes.look.preview.pieces import Piece, RowOfTokens

__all__ = ["LAYOUTS", "legend", "share_line", "text_of"]

#: Escapes of a terminal: on, off.
LEARNT, DIM, BOLD = ("\x1b[4;32m", "\x1b[0m"), ("\x1b[2m", "\x1b[0m"), ("\x1b[1m", "\x1b[0m")
#: Columns of the names of a table, at most.
NAME, TYPE = 32, 24
#: What each layout says of a token that is learnt.
LAYOUTS = {
    "aligned": "labels stand at their tokens; the model shifts them",
    "shifted": "the label at t is the token at t + 1",
    "masked": "the label at t is what was hidden there",
    "classes": "the label at t is a class of the token there",
    "own": "the targets are a text of their own",
    "mask": "a mask says which tokens are learnt",
}


def text_of(view: ItemView, width: int, color: bool) -> str:
    """An item in lines of at most so many columns, as far as that goes."""
    rows = "" if view.rows is None else f", {view.rows:,} row{'s' * (view.rows != 1)}"
    head = _styled(view.title, BOLD, color) + f"  {view.kind}{rows}"
    lines = [head, *_table(view.values, width - 2)]
    if view.more:
        lines.append("…  and more values")
    lines += [share_line(counts) for counts in view.counts]
    lines += [f"note: {note}" for note in view.notes]
    lines += _texts(view, width - 2, color)
    for inner in view.inner:
        lines += text_of(inner, width - 2, color).splitlines()
    if view.inner and view.rows is not None and view.rows > len(view.inner):
        lines.append(f"… and {view.rows - len(view.inner):,} more rows")
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def legend(views: Sequence[ItemView], color: bool) -> str:
    """One line that says what the marks mean, of those that are there; nothing where there are none."""
    pieces = [p for view in _all(views) for row in view.texts for p in row.pieces]
    kinds = {piece.kind for piece in pieces}
    parts = []
    if "learnt" in kinds:
        parts.append(f"{_piece(Piece('learnt', 'text'), color)} learnt: a target of the loss")
    if any(piece.truth is not None for piece in pieces):
        parts.append(f"{_piece(Piece('learnt', 'a', truth='b'), color)} b is to be guessed at a")
    if "document" in kinds:
        parts.append(f"{_piece(Piece('document'), color).strip()} another document begins")
    if "left_out" in kinds:
        parts.append(f"{_piece(Piece('left_out', tokens=9), color)} tokens that are not printed")
    if "padding" in kinds:
        parts.append(f"{_piece(Piece('padding', tokens=9), color)} padding, not printed")
    return "   ".join(parts)


def _all(views: Sequence[ItemView]) -> Iterator[ItemView]:
    for view in views:
        yield view
        yield from _all(view.inner)


def share_line(counts: TokenCounts) -> str:
    """How much of a column of tokens is learnt, and how much is padding."""
    parts = []
    if counts.learnt is not None:
        share = f" ({counts.learnt / counts.tokens:.1%})" if counts.tokens else ""
        parts.append(f"{counts.learnt:,} of {counts.tokens:,} tokens learnt{share}")
    else:
        parts.append(f"{counts.tokens:,} tokens")
    if counts.padding:
        share = f"{counts.padding / counts.cells:.1%}"
        parts.append(f"padding {counts.padding:,} of {counts.cells:,} cells ({share})")
    if counts.layout:
        parts.append(LAYOUTS[counts.layout])
    return f"{counts.name}: {'; '.join(parts)}"


def _table(values: Sequence[Facts], width: int) -> list[str]:
    cells = []
    for value in values:
        shape = "" if value.shape is None else f"[{', '.join(f'{n:,}' for n in value.shape)}]"
        span = "" if value.low is None else f"{value.low} to {value.high}"
        text = value.text if not span else f"{span}  {value.text or ''}"
        cells.append((value.name or "·", value.type, shape, text or ""))
    if not cells:
        return []
    sizes = [
        min(max(len(cell[k]) for cell in cells), most) for k, most in enumerate((NAME, 40, 24))
    ]
    lines = []
    for name, kind, shape, text in cells:
        start = f"{name:{sizes[0]}}  {kind:{sizes[1]}}  {shape:{sizes[2]}}"
        first, *more = _wrapped(text, max(20, width - len(start) - 2)) or [""]
        lines.append(f"{start}  {first}".rstrip())
        lines += [" " * (len(start) + 2) + line for line in more]
    return lines


def _texts(view: ItemView, width: int, color: bool) -> list[str]:
    lines = []
    several = len(view.counts) > 1
    width_of_names = max((len(one.name) for one in view.texts), default=0)
    for row, group in groupby(view.texts, lambda one: one.row):
        title = f"row {row}  " if view.rows is not None else ""
        for one in group:
            name = f"{one.name:{width_of_names}}  "
            start = f"{title}{name}" if several else title or name
            lines += _row(one, start, width, color)
            title = " " * len(title)
    shown = len({one.row for one in view.texts})
    if view.texts and view.rows is not None and view.rows > shown:
        lines.append(f"… and {view.rows - shown:,} more rows")
    return lines


def _row(one: RowOfTokens, start: str, width: int, color: bool) -> list[str]:
    """A row's pieces, wrapped."""
    room = max(20, width - len(start))
    lines = [""]
    left = room
    for piece in one.pieces:
        for text in _wrapped(_plain(piece, color), room, left):
            if left < room and _columns(text) > left:
                lines.append("")
                left = room
            lines[-1] += _marked(piece, text, color)
            left -= _columns(text)
            if left <= 0:
                lines.append("")
                left = room
    lines = [line for line in lines if line] or [""]
    return [f"{start if k == 0 else ' ' * len(start)}{line}" for k, line in enumerate(lines)]


def _plain(piece: Piece, color: bool) -> str:
    """A piece as it is without colours."""
    if piece.kind == "learnt":
        text = piece.text if piece.truth is None else f"{piece.text}→{piece.truth}"
        return text if color else f"⟦{text}⟧"
    if piece.kind == "document":
        return " ║ "
    if piece.kind == "left_out":
        return f"…{piece.tokens:,}…"
    return f"‹{piece.tokens:,} padding›" if piece.kind == "padding" else piece.text


def _marked(piece: Piece, text: str, color: bool) -> str:
    return _styled(text, {"learnt": LEARNT, "plain": ("", "")}.get(piece.kind, DIM), color)


def _piece(piece: Piece, color: bool) -> str:
    text = "…9…" if piece.kind == "left_out" else _plain(piece, color)
    return _marked(piece, text, color)


def _styled(text: str, style: tuple[str, str], color: bool) -> str:
    return f"{style[0]}{text}{style[1]}" if color and style[0] else text


def _columns(text: str) -> int:
    """Columns of a terminal that a text takes, about."""
    return len(text) + sum(east_asian_width(c) in "WF" for c in text)


def _wrapped(text: str, width: int, first: int | None = None) -> list[str]:
    """A text cut into lines, after a space where there is one near the end."""
    found: list[str] = []
    room = width if first is None else first
    while text:
        if _columns(text) <= room:
            return [*found, text]
        size = room if text.isascii() else max(1, _fits(text, room))
        space = text.rfind(" ", size // 2, size + 1)
        end = space + 1 if space >= 0 else size
        if room < width and space < 0 and room < 12:
            room = width  # a few columns are left: better begin a line
            continue
        found.append(text[:end])
        text, room = text[end:], width
    return found


def _fits(text: str, room: int) -> int:
    """Characters of a text that fit in so many columns."""
    columns = 0
    for k, c in enumerate(text):
        columns += 1 + (east_asian_width(c) in "WF")
        if columns > room:
            return k
    return len(text)
