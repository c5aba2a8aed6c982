"""A chain as Mermaid text, https://mermaid.js.org: a box for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from trainpipes.kinds.options import show
from trainpipes.kinds.stage import Stage
from trainpipes.pipeline import Pipeline

#: Characters of a line in a box, and lines.
MOST_WIDE, MOST_LINES = 44, 4
#: What Mermaid would take for its own, in a text.
ESCAPED = {ord(c): f"#{ord(c)};" for c in '#"<>&`\\'}


def mermaid(pipeline: Pipeline) -> str:
    nodes: list[str] = []
    edges: list[str] = []
    last = _draw(pipeline, nodes, edges)
    edges.append(f'    {last} --> training(["training loop"])')
    return "\n".join(["flowchart TB", *nodes, *edges])


def written(stage: Stage) -> str:
    """A stage with its options in one line; of the pipelines that it joins, how many."""
    text = repr(stage)
    if joined := _pipelines(stage):
        options = {k: v for k, v in stage.options.items() if v is not None and not _joined(v)}
        given = [f"{name}={show(value)}" for name, value in options.items()]
        text = f"{stage.name}({', '.join([f'{len(joined)} pipelines', *given])})"
    return _legible(text)


def _pipelines(stage: Stage) -> list[tuple[str, Pipeline]]:
    return [one for value in stage.options.values() for one in _joined(value)]


def _joined(value: Any) -> list[tuple[str, Pipeline]]:
    named = list(value.items()) if isinstance(value, Mapping) else []
    if isinstance(value, tuple | list):
        named = [("", one) for one in value]
    return [(str(name), one) for name, one in named if isinstance(one, Pipeline)]


def _legible(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _draw(pipeline: Pipeline, nodes: list[str], edges: list[str]) -> str:
    last = ""
    for stage in pipeline.stages:
        ends = [("", last)] if last else []
        ends += [(name, _draw(one, nodes, edges)) for name, one in _pipelines(stage)]
        lines = wrap(written(stage), MOST_WIDE, max_lines=MOST_LINES, placeholder=" …")
        last = f"stage{len(nodes) + 1}"
        nodes.append(f'    {last}["{"<br/>".join(line.translate(ESCAPED) for line in lines)}"]')
        for name, end in ends:
            label = f'|"{_legible(name).translate(ESCAPED)}"|' if name else ""
            edges.append(f"    {end} -->{label} {last}")
    return last
