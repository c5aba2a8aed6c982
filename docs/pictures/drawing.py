"""What the drawings of these pages are made of: boxes, words and arrows, in light and in dark colours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from unicodedata import combining, east_asian_width

__all__ = ["Drawing", "flow"]

#: Colours that are told apart in both schemes, also by most who see some colours alike (after Paul Tol).
LIGHT = ("#8fb4dc", "#f2a7ae", "#93cfa0", "#e3d68a", "#9fdcf0", "#d3a0c0")
DARK = ("#2f5f96", "#a04450", "#2c7a45", "#7d711f", "#1f7690", "#80406a")
SANS = 'system-ui,"Segoe UI",Helvetica,Arial,sans-serif'


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
#: Widths in DejaVu Sans (and Verdana, which has the same), in ems, rounded up: the usual font that is widest.
_WIDTHS = {
    **dict.fromkeys("ijl|':., ", 0.36),
    **dict.fromkeys('()[]{}frt-;!/\\"`*', 0.52),
    **dict.fromkeys("abcdeghknopqsuvxyz0123456789?_$JLTFES", 0.66),
    **dict.fromkeys("ABCDGHIKNOPQRUVXYZ&", 0.8),
    **dict.fromkeys("mwMW@%#+=<>~^…–—→", 1.01),
}
#: Of a character that takes one place, or two, in a font of equal widths; and of one that such fonts lack.
_ONE, _TWO, _OTHER = 0.603, 1.35, 1.5
#: Below it are Latin letters, which all fonts have.
_LATIN = "\u0180"


def text_width(text: str, size: float) -> float:
    """The most that a text takes in a sans-serif font of some size."""
    return size * sum(_WIDTHS.get(c) or _other(c) for c in text)


def mono_width(text: str, size: float) -> float:
    """The same in a font whose characters are all equally wide."""
    return size * sum(_ONE if c < _LATIN or c in "…–—→" else _other(c) for c in text)


def _other(char: str) -> float:
    if combining(char):
        return 0.0
    if char < _LATIN:
        return 1.1
    return _TWO if east_asian_width(char) in "WF" else _OTHER


def _style() -> str:
    """Rules of boxes and arrows, and of cells in colours."""
    own = [
        f".said{{fill:#10243a;font:13px {SANS}}}.strong{{fill:#10243a;font:600 13px {SANS}}}",
        f".small{{fill:#10243a;font:11px {SANS}}}.cell{{stroke:#fff}}",
        ".line{fill:none;stroke:#10243a;stroke-width:1.5}",
        ".faint{fill:none;stroke:#6b7280;stroke-dasharray:5 4}",
        *(f".c{n}{{fill:{colour}}}" for n, colour in enumerate(LIGHT)),
        "@media (prefers-color-scheme:dark){",
        ".said,.strong,.small{fill:#f1f5f9}.cell{stroke:#14181f}.line{stroke:#f1f5f9}.faint{stroke:#9aa4b2}",
        *(f".c{n}{{fill:{colour}}}" for n, colour in enumerate(DARK)),
        "}",
    ]
    return STYLE + "\n" + "\n".join(own)


class Drawing:
    """An SVG that is drawn piece by piece.

    Args:
        width, height: in pixels.
        title: what it shows, for who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._body: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str, round_by: float = 0) -> None:
        corners = f' rx="{round_by:g}"' if round_by else ""
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self._body.append(f'<rect class="{kind}" {place}{corners}/>')

    def text(
        self, x: float, y: float, words: object, kind: str = "said", anchor: str = "start"
    ) -> None:
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        shown = escape(str(words), quote=False)
        self._body.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{where}>{shown}</text>')

    def line(self, *points: tuple[float, float], kind: str = "tp-line") -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._body.append(f'<path class="{kind}" d="{path}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a head at its end, which comes from above, or from the left."""
        (x0, y0), (x, y) = points[-2:]
        across = abs(x - x0) > abs(y - y0)
        end = (x - 6, y) if across else (x, y - 6)
        self.line(*points[:-1], end)
        head = f"M{x - 8:g} {y - 5:g}v10l8 -5z" if across else f"M{x - 5:g} {y - 8:g}h10l-5 8z"
        self._body.append(f'<path class="tp-head" d="{head}"/>')

    @property
    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" style="max-width:100%" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_style()}</style>\n"
            '<rect class="tp-back" width="100%" height="100%" rx="8"/>\n'
            + "\n".join(self._body)
            + "\n</svg>\n"
        )


#: The height of the boxes of a flow; between them, from top to bottom and across; and around them.
TALL, GAP, BETWEEN, MARGIN = 50, 30, 36, 20


def flow(
    title: str,
    rows: Sequence[Sequence[tuple[str, str, str]]],
    arrows: Sequence[tuple[str, str]],
    optional: Collection[str] = (),
) -> str:
    """Boxes row by row, and arrows from one to the next below it.

    Args:
        title: what it shows.
        rows: boxes beside each other: a key, what happens, and where in the code.
        arrows: keys of two boxes.
        optional: keys of boxes that some are passed by without.
    """
    # Rows of as many boxes have columns in common.
    columns: dict[int, list[float]] = {}
    for row in rows:
        old = columns.get(len(row), [0] * len(row))
        columns[len(row)] = [max(one, _width(box)) for one, box in zip(old, row, strict=True)]
    sizes = [columns[len(row)] for row in rows]
    widths = [sum(row) + BETWEEN * (len(row) - 1) for row in sizes]
    width = max(widths) + 2 * MARGIN
    drawing = Drawing(width, len(rows) * (TALL + GAP) - GAP + 2 * MARGIN, title)
    middles: dict[str, tuple[float, float]] = {}
    for number, (row, across) in enumerate(zip(rows, sizes, strict=True)):
        x, y = round((width - widths[number]) / 2, 1), MARGIN + number * (TALL + GAP)
        for (key, what, where), w in zip(row, across, strict=True):
            drawing.box(x, y, w, TALL, "tp-frame" if key in optional else "tp-box", 6)
            drawing.text(x + w / 2, y + 21, what, "strong", "middle")
            drawing.text(x + w / 2, y + 38, where, "tp-options", "middle")
            middles[key] = x + w / 2, y
            x = round(x + w + BETWEEN, 1)
    for start, end in arrows:
        (x0, top), (x1, y1) = middles[start], middles[end]
        y0 = top + TALL
        bend = y1 - 16
        drawing.arrow(*[(x0, y0), *([(x0, bend), (x1, bend)] if x0 != x1 else []), (x1, y1)])
    return drawing.svg


def _width(box: tuple[str, str, str]) -> float:
    _, what, where = box
    return round(max(text_width(what, 14), mono_width(where, 12)) + 24)
