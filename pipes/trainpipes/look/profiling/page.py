"""How a profile is shown: as text, and as a page of curves and bars, a file which asks for no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trainpipes._internal.activity import ITERATES, WAITING
from trainpipes.errors import amount, cut
from trainpipes.look.profiling.facts import Facts, Measured
from trainpipes.look.profiling.verdict import verdict

#: Stages of a group that a text shows, from this share of its time on, and characters of each.
MOST_SHOWN, LEAST_SHOWN, MOST_WIDE = 6, 0.005, 60
#: Batches whose cells say how those of the ranks differ.
LEAST_BATCHES = 8
#: The groups of threads, by their names in a text.
CALLED = {
    ITERATES: "the thread that iterates", "threads": "threads", "map": "threads of map()",
    "requests": "threads for requests", "workers": "workers",
}  # fmt: skip


def text_lines(facts: Facts, m: Measured) -> Iterator[tuple[str, str]]:
    """The text of a profile: labels, and their texts."""
    decided = verdict(facts, m)
    whose = "the trainer" if decided.bound in ("trainer", "padding") else "the pipeline"
    says = f"{whose} bounds this run"
    if whose == "the trainer" and m.first > 0.5 * m.seconds:
        says = "most of it before the first batch, so that a longer run says more"
    yield "waiting", f"{m.waiting:.0%} of {m.seconds:,.1f} s: {says}"
    label = "busy"
    groups = [*m.counts.times.items(), ("workers", m.workers.times.get(ITERATES, {}))]
    for group in CALLED:
        times = dict(groups).get(group, {})
        number = (
            facts.workers
            if group == "workers"
            else m.counts.threads.get(group) or facts.threads or 1
        )
        if text := _busy(times, m.seconds):
            called = CALLED[group].replace("s", "", 1) if number == 1 else CALLED[group]
            of = CALLED[group] if group == ITERATES else f"{number} {called}"
            yield label, f"{of}: {text}"
            label = ""
    cores = (m.counts.cpu + (m.workers.cpu or m.children)) / max(m.seconds, 1e-9)
    others = f", other programs {m.others:.1f}" if m.others >= 0.1 else ""
    yield "cores", f"{cores:.1f} of {facts.cores}{others}"
    totals = m.totals
    if totals.get("requests"):
        hits = f", {totals.get('chunk hits', 0):,} of {totals.get('chunks', 0):,} chunks from cache_dir"
        said = f"{amount(totals.get('bytes', 0))} in {totals['requests']:,} requests"
        yield "remote", said + hits * bool(totals.get("chunks"))
    if totals.get("cached"):
        yield (
            "cache",
            f"{totals.get('cache hits', 0):,} of {totals['cached']:,} blocks were kept",
        )
    if m.cells:
        yield "padding", f"{m.padded:.1%} of the cells"
    if text := _waiting_ranks(facts, m):
        yield "ranks", text
    yield "verdict", decided.text
    for label, change in zip(("change", "or"), decided.changes, strict=False):
        yield label, str(change)


def _waiting_ranks(facts: Facts, m: Measured) -> str:
    """How long ranks wait for each other, where the batches of a rank tell it: not where batches of a step
    are made alike, and not in file order, in which those of a step may be.
    """
    batches = sum(m.sizes.values())
    alike = facts.has("balance", "bucket_by_length") or not facts.has("shuffle")
    if facts.ranks < 2 or batches < LEAST_BATCHES or alike:
        return ""
    return (
        f"{m.waiting_for_longest(facts.ranks):.0%} of a step of {facts.ranks:,} ranks is waiting for its "
        f"longest batch, by the cells of {batches:,} batches; stats(world_size={facts.ranks}) counts steps"
    )


def _busy(times: dict[str, list[float]], seconds: float) -> str:
    """Threads at work, on average, by stage."""
    shares = {label: sums[0] / max(seconds, 1e-9) for label, sums in times.items()}
    shown = sorted(shares, key=lambda label: (label in WAITING, -shares[label]))
    parts = [
        f"{cut(label, MOST_WIDE)} {shares[label]:.2f}"
        for label in shown
        if shares[label] >= LEAST_SHOWN
    ]
    return ", ".join(parts[:MOST_SHOWN])


#: Width and height of a picture, and the room for numbers at its left and below it.
WIDE, HIGH, LEFT, BELOW = 640, 180, 44, 22
#: Colors that the style sheet has: ``c0`` to ``c6``; the last color is for all others.
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


#: Bars of lengths, at most.
MOST_BARS = 32
STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --page: #ffffff; --line: #d1d5db; --soft: #4b5563; }
.c0 { --c: #0072b2 } .c1 { --c: #e69f00 } .c2 { --c: #009e73 } .c3 { --c: #cc79a7 }
.c4 { --c: #56b4e9 } .c5 { --c: #d55e00 } .c6 { --c: #9ca3af }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f1f5f9; --page: #14181f; --line: #374151; --soft: #cbd5e1; }
  .c0 { --c: #56b4e9 } .c4 { --c: #2f81f7 }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse } th { text-align: left; vertical-align: top; padding-right: 1rem }
td { overflow-wrap: anywhere }
svg { display: block; width: 100%; height: auto; margin: .5rem 0 }
svg text { fill: var(--soft); font-size: 12px } .grid { stroke: var(--line) }
polygon, rect { fill: var(--c) }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 0; padding: 0;
  font-size: .9rem; overflow-wrap: anywhere }
.legend span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; background: var(--c) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .75rem; font-size: .85rem;
  background: color-mix(in srgb, var(--line) 30%, var(--page)) }
mark { background: color-mix(in srgb, #009e73 30%, var(--page)); color: var(--ink) }
"""


def page(
    lines: Sequence[tuple[str, str]],
    series: Sequence[Mapping[str, Any]],
    lengths: Counter[int],
    shuffle: str,
    rows: str,
) -> str:
    """The page, as HTML.

    Args:
        lines: the text of the profile, as label and text.
        series: the run over time; see ``Profile.series``.
        lengths: how many rows of batches have so many tokens.
        shuffle: how well rows are mixed, as text, or "".
        rows: the first rows, as HTML within ``pre``, or "".
    """
    headline = next((text for label, text in lines if label == "verdict"), "A run")
    body = [f"<h1>{escape(headline)}</h1>", _table(lines), *_over_time(series)]
    if lengths:
        body += ["<h2>Tokens of a row</h2>", bars("Tokens of a row", _binned(lengths), "")]
    if shuffle:
        body += ["<h2>How well rows are shuffled</h2>", f"<pre>{escape(shuffle)}</pre>"]
    if rows:
        body += ["<h2>The first rows of the next epoch</h2>", f"<pre>{rows}</pre>"]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # without it browsers ask for an icon
    )
    inner = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>What bounds this run</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n{inner}\n</main></body>\n</html>\n"
    )


def _table(lines: Sequence[tuple[str, str]]) -> str:
    rows = (
        f"<tr><th scope='row'>{escape(label)}</th><td>{escape(text)}</td></tr>" if label
        else f"<tr><td></td><td>{escape(text)}</td></tr>"
        for label, text in lines
    )  # fmt: skip
    return f"<table>{''.join(rows)}</table>"


def _over_time(series: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ends = [point["seconds"] for point in series]
    if not ends:
        return
    waited = {"waiting for data": [100 * point["waited"] for point in series]}
    title = "Part of the time that the loop waited for data"
    yield f"<h2>{title}</h2>"
    yield area(title, ends, waited, "%")
    for group, called in CALLED.items():
        busy = [point["busy"].get(group, {}) for point in series]
        if any(busy):
            title = f"What {called} did: threads at work"
            yield f"<h2>{escape(title)}</h2>"
            yield area(title, ends, layers_of(busy), "")


def _binned(lengths: Counter[int]) -> list[tuple[str, float]]:
    """Rows by length, in at most so many steps of equal width."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // MOST_BARS))
    sums = [0.0] * (-(-(high - low + 1) // width))
    for length, count in lengths.items():
        sums[(length - low) // width] += count
    return [(f"{low + n * width:,}", count) for n, count in enumerate(sums)]
