"""A chain as an SVG: boxes from top to bottom, branches side by side, a frame around what each rank does.

It has a background of its own, and colours for light and for dark schemes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trainpipes.look.pictures.chain import Box, Chain
from trainpipes.look.pictures.text_width import mono_width, text_width

__all__ = ["svg"]

#: Sizes of letters, in pixels: of names, of options, of what flows.
NAME, OPTIONS, FLOW = 14, 12, 12
#: Around text in a box, between boxes, between branches, around the whole.
INNER, GAP, BETWEEN, MARGIN = 12, 44, 28, 20
#: Cards beside each other.
CARDS_WIDE = 3

STYLE = """
.tp-back{fill:#fff}.tp-box{fill:#eef4fb;stroke:#0072b2}.tp-end{fill:#fdf1dd;stroke:#b87400}
.tp-frame{fill:none;stroke:#6b7280;stroke-dasharray:6 4}
.tp-name{fill:#10243a;font:600 14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.tp-options{fill:#33475b;font:12px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.tp-flow{fill:#4b5563;font:12px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.tp-line{fill:none;stroke:#6b7280;stroke-width:1.5}.tp-head{fill:#6b7280}
@media (prefers-color-scheme:dark){
.tp-back{fill:#14181f}.tp-box{fill:#1b2a3a;stroke:#56b4e9}.tp-end{fill:#372a14;stroke:#e69f00}
.tp-name{fill:#f1f5f9}.tp-options{fill:#cbd5e1}.tp-flow{fill:#c3cad4}
.tp-frame,.tp-line{stroke:#9aa4b2}.tp-head{fill:#9aa4b2}}
""".strip()


def svg(chain: Chain) -> str:
    """The SVG of a chain."""
    part = _column(chain, ending=True)
    width, height = part.width + 2 * MARGIN, part.height + 2 * MARGIN
    names = escape(", ".join(box.name for box in chain.boxes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="max-width:100%" role="img">\n'
        f"<title>A pipeline: {names}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="tp-back" width="100%" height="100%" rx="8"/>\n'
        f"{part.at(MARGIN, MARGIN)}\n</svg>"
    )


@dataclass(frozen=True)
class _Part:
    """Something drawn.

    Attributes:
        width, height: of all of it.
        middle: where lines enter at its top, and leave at its bottom.
        body: its elements.
    """

    width: float
    height: float
    middle: float
    body: str

    def at(self, x: float, y: float) -> str:
        return f'<g transform="translate({x:.1f} {y:.1f})">\n{self.body}\n</g>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text class="tp-{kind}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text, quote=False)}</text>'
    )


def _box(name: str, lines: Sequence[str], kind: str = "box") -> _Part:
    widths = [mono_width(name, NAME), *(mono_width(line, OPTIONS) for line in lines)]
    width = max(150, max(widths) + 2 * INNER)
    height = 2 * INNER + NAME + 17 * len(lines)
    body = [
        f'<rect class="tp-{kind}" width="{width:.1f}" height="{height:.1f}" rx="6"/>',
        _text("name", width / 2, INNER + NAME - 2, name, "middle"),
    ]
    for number, line in enumerate(lines):
        body.append(_text("options", width / 2, INNER + NAME + 16 + 17 * number, line, "middle"))
    return _Part(width, height, width / 2, "\n".join(body))


def _arrow(points: Sequence[tuple[float, float]], head: bool = True) -> str:
    x, y = points[-1]
    ends = [*points[:-1], (x, y - 6 * head)]
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in ends)
    line = f'<path class="tp-line" d="{path}"/>'
    if head:
        line += f'<path class="tp-head" d="M{x - 5:.1f} {y - 8:.1f}h10l-5 8z"/>'
    return line


def _column(chain: Chain, ending: bool = False) -> _Part:
    """A chain from top to bottom.

    Args:
        chain: its boxes.
        ending: whether the training loop stands at its end.
    """
    parts = [_joined(box) for box in chain.boxes]
    labels = [str(box.flow) for box in chain.boxes]
    if ending:
        parts.append(_box("training loop", (), "end"))
        labels[-1] = chain.result
    else:
        labels.pop()
    framed = chain.dealt if ending else 0
    # What is said of a line stands to its right.
    rights = [part.width - part.middle for part in parts]
    for number, label in enumerate(labels):
        rights[number] = max(rights[number], text_width(label, FLOW) + 10)
    lefts = [part.middle for part in parts]
    if framed:
        rights[framed] = max(rights[framed], text_width(chain.dealt_to, FLOW) + 10)
        # The last label before the frame is not in it.
        inner = max(lefts[framed:]) + INNER, max(rights[framed:]) + INNER
        lefts.append(inner[0])
        rights.append(inner[1])
    middle = max(lefts)
    body: list[str] = []
    y = 0.0
    for number, part in enumerate(parts):
        if number:
            gap = GAP + 30 * (number == framed)
            body.append(_arrow([(middle, y), (middle, y + gap)]))
            body.append(_text("flow", middle + 10, y + 25, labels[number - 1]))
            if number == framed:
                frame = y + 40
                body.append(_text("flow", middle + 10, frame + 20, chain.dealt_to))
            y += gap
        body.append(part.at(middle - part.middle, y))
        y += part.height
    if framed:
        y += INNER
        body.append(
            f'<rect class="tp-frame" x="{middle - inner[0]:.1f}" y="{frame:.1f}" '
            f'width="{sum(inner):.1f}" height="{y - frame:.1f}" rx="8"/>'
        )
    return _Part(middle + max(rights), y, middle, "\n".join(body))


def _joined(box: Box) -> _Part:
    """A box with what runs into it above it."""
    own = _box(box.name, box.lines)
    if not box.branches:
        return own
    return _below_cards(box, own) if box.crowded else _below_branches(box, own)


def _below_branches(box: Box, own: _Part) -> _Part:
    columns = [_column(branch.chain) for branch in box.branches]
    # Each column is as wide as what is said of it.
    lefts, rights = [c.middle for c in columns], []
    for column, branch in zip(columns, box.branches, strict=True):
        label = text_width(branch.label, FLOW) + 10
        rights.append(max(column.width - column.middle, label))
    tallest = max(column.height for column in columns)
    body, middles, x = [], [], 0.0
    for column, left, right in zip(columns, lefts, rights, strict=True):
        body.append(column.at(x, tallest - column.height))
        middles.append(x + left)
        x += left + right + BETWEEN
    width = x - BETWEEN
    middle = (middles[0] + middles[-1]) / 2
    shift = max(0.0, own.middle - middle)  # where the box is wider than what is above it
    bus, top = tallest + GAP - 14, tallest + GAP + 10
    for x, branch in zip(middles, box.branches, strict=True):
        body.append(_arrow([(x, tallest), (x, bus), (middle, bus)], head=False))
        body.append(_text("flow", x + 10, tallest + 18, branch.label))
    body.append(_arrow([(middle, bus), (middle, top)]))
    body.append(own.at(middle - own.middle, top))
    width = max(width, middle + own.width - own.middle)
    inner = _Part(width, top + own.height, middle, "\n".join(body))
    return _Part(width + shift, inner.height, middle + shift, inner.at(shift, 0))


def _below_cards(box: Box, own: _Part) -> _Part:
    cards = [_box(branch.label, branch.card) for branch in box.branches]
    across = max(card.width for card in cards)
    rows = [cards[n : n + CARDS_WIDE] for n in range(0, len(cards), CARDS_WIDE)]
    width = max(CARDS_WIDE * (across + 12) - 12 + 2 * INNER, own.width)
    y, body = 30.0, []
    for row in rows:
        for number, card in enumerate(row):
            x = INNER + number * (across + 12) + (across - card.width) / 2
            body.append(card.at(x, y))
        y += max(card.height for card in row) + 12
    body.insert(0, f'<rect class="tp-frame" width="{width:.1f}" height="{y:.1f}" rx="8"/>')
    body.append(_text("flow", INNER, 19, f"{len(cards)} pipelines"))
    body.append(_arrow([(width / 2, y), (width / 2, y + GAP)]))
    body.append(own.at(width / 2 - own.middle, y + GAP))
    return _Part(width, y + GAP + own.height, width / 2, "\n".join(body))
