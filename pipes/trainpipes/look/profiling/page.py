"""A profile as a page to look at: one file, which asks for no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trainpipes.look.profiling.curves import area, bars, layers_of

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
    called: Mapping[str, str],
    lengths: Counter[int],
    shuffle: str,
    rows: str,
) -> str:
    """The page, as HTML.

    Args:
        lines: the text of the profile, as label and text.
        series: the run over time; see ``Profile.series``.
        called: what groups of threads are called.
        lengths: how many rows of batches have so many tokens.
        shuffle: how well rows are mixed, as text, or "".
        rows: the first rows, as HTML within ``pre``, or "".
    """
    verdict = next((text for label, text in lines if label == "verdict"), "A run")
    body = [f"<h1>{escape(verdict)}</h1>", _table(lines), *_over_time(series, called)]
    if lengths:
        body += ["<h2>Tokens of a row</h2>", bars("Tokens of a row", _binned(lengths), "")]
    if shuffle:
        body += ["<h2>How well rows are shuffled</h2>", f"<pre>{escape(shuffle)}</pre>"]
    if rows:
        body += ["<h2>The first rows of the next epoch</h2>", f"<pre>{rows}</pre>"]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # without it browsers ask for one
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


def _over_time(series: Sequence[Mapping[str, Any]], called: Mapping[str, str]) -> Iterator[str]:
    ends = [point["seconds"] for point in series]
    if not ends:
        return
    waited = {"waiting for data": [100 * point["waited"] for point in series]}
    yield "<h2>Part of the time that the loop waited for data</h2>"
    yield area("Part of the time that the loop waited for data", ends, waited, "%")
    for group in called:
        busy = [point["busy"].get(group, {}) for point in series]
        if any(busy):
            title = f"What {called[group]} did: threads at work"
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
