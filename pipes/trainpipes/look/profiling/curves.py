"""Curves and bars as plain SVG, which a page holds as it is; its style sheet gives the colors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

#: Width and height of a picture, and the room for numbers at its left and below it.
WIDE, HIGH, LEFT, BELOW = 640, 180, 44, 22
#: Colors that the style sheet has: ``c0`` to ``c6``; the last one is for all others.
COLORS = 7


def layers_of(series: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The largest values by name over time, and the sum of all others.

    >>> layers_of([{"read": 1.0}, {"read": 0.5, "map": 0.25}])
    {'read': [1.0, 0.5], 'map': [0.0, 0.25]}
    """
    sums: dict[str, float] = {}
    for point in series:
        for name, value in point.items():
            sums[name] = sums.get(name, 0.0) + value
    names = sorted(sums, key=lambda name: -sums[name])
    shown = names if len(names) <= COLORS else names[: COLORS - 1]
    layers = {name: [point.get(name, 0.0) for point in series] for name in shown}
    if rest := set(names) - set(shown):
        layers["all others"] = [sum(point.get(name, 0.0) for name in rest) for point in series]
    return layers


def area(
    title: str, ends: Sequence[float], layers: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Layers on top of each other over time; ``ends``: of each step, seconds."""
    total = [sum(values) for values in zip(*layers.values(), strict=True)] or [0.0]
    top, last = _round_up(max(total)), max([*ends, 1e-9])
    edges = [0.0, *ends]
    xs = [LEFT + (WIDE - LEFT) * edge / last for edge in edges for _ in (0, 1)][1:-1]
    below = [0.0] * len(ends)
    parts = []
    for n, (name, values) in enumerate(layers.items()):
        above = [a + b for a, b in zip(below, values, strict=True)]
        line = [_point(x, y, top) for x, y in zip(xs, _twice(above), strict=True)]
        back = [_point(x, y, top) for x, y in zip(xs, _twice(below), strict=True)]
        points = " ".join([*line, *reversed(back)])
        parts.append(
            f'<polygon class="c{n}" points="{points}"><title>{escape(name)}</title></polygon>'
        )
        below = above
    marks = [(LEFT + (WIDE - LEFT) * k / 4, f"{last * k / 4:.3g} s") for k in range(5)]
    return _picture(title, parts, top, unit, marks) + _legend(list(layers))


def bars(title: str, counts: Sequence[tuple[str, float]], unit: str) -> str:
    """A bar for each label and count."""
    top = _round_up(max([count for _, count in counts] or [0.0]))
    step = (WIDE - LEFT) / max(1, len(counts))
    parts, marks = [], []
    for n, (label, count) in enumerate(counts):
        x, high = LEFT + n * step, HIGH * count / top
        box = f'x="{x + 1:.1f}" y="{HIGH - high:.1f}" width="{max(1.0, step - 2):.1f}" height="{high:.1f}"'
        text = escape(f"{label}: {count:,.0f}")
        parts.append(f'<rect class="c0" {box}><title>{text}</title></rect>')
        if n % max(1, len(counts) // 6) == 0:
            marks.append((x + step / 2, label))
    return _picture(title, parts, top, unit, marks)


def _picture(
    title: str, parts: Sequence[str], top: float, unit: str, marks: Sequence[tuple[float, str]]
) -> str:
    lines = []
    for k in range(3):
        y = HIGH - HIGH * k / 2
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE}" y1="{y:g}" y2="{y:g}"/>')
        text = f"{top * k / 2:.3g}{unit}"
        lines.append(f'<text x="{LEFT - 4}" y="{max(y + 4, 10):g}" text-anchor="end">{text}</text>')
    for x, text in marks:
        anchor = "start" if x <= LEFT else "end" if x >= WIDE else "middle"
        lines.append(
            f'<text x="{x:.1f}" y="{HIGH + 16}" text-anchor="{anchor}">{escape(text)}</text>'
        )
    inner = "\n".join([*parts, *lines])
    name = escape(title, quote=True)
    view = f"0 0 {WIDE} {HIGH + BELOW}"
    return f'<svg role="img" aria-label="{name}" viewBox="{view}">\n{inner}\n</svg>'


def _legend(names: Sequence[str]) -> str:
    items = (f'<li><span class="c{n}"></span>{escape(name)}</li>' for n, name in enumerate(names))
    return f"<ul class='legend'>{''.join(items)}</ul>" if len(names) > 1 else ""


def _point(x: float, y: float, top: float) -> str:
    return f"{x:.1f},{HIGH - HIGH * y / top:.1f}"


def _twice(values: Sequence[float]) -> Iterator[float]:
    for value in values:
        yield from (value, value)


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power < value:
        power *= 10
    while power >= value * 10:
        power /= 10
    return next(power * k / 10 for k in (1, 2, 2.5, 5, 10) if power * k / 10 >= value * (1 - 1e-9))
