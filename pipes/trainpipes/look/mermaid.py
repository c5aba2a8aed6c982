"""A chain as Mermaid text: https://mermaid.js.org. Boxes are stages with their options; lines say what flows,
and how much of it in an epoch where that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from trainpipes.kinds.options import same, show
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage import Stage
from trainpipes.look.lengths import Flow, flows, rows_of
from trainpipes.look.record import without_secrets
from trainpipes.pipeline import Pipeline

#: Branches that are drawn with their boxes; of more, each is one box.
MOST_BRANCHES = 4
#: Characters of a line of options, and lines of them; lines of a box that stands for a whole pipeline.
MOST_WIDE, MOST_LINES, MOST_ON_CARD = 44, 3, 8
#: Options that are told also where they are left at their defaults; and those that never are: a drawing says
#: them in another way, or they may be secret.
ALWAYS = {"sharding_filter": ("num_shards",), "shuffle": ("buffer_size", "seed"), "mix": ("stop",)}
ELSEWHERE = ("sources", "pipelines", "weights", "storage_options")
#: What Mermaid would take for its own, in a text.
ESCAPED = {ord(c): f"#{ord(c)};" for c in '#"<>&`\\'}


def mermaid(pipeline: Pipeline, counts: bool = True) -> str:
    drawing = _Drawing()
    plan = pipeline._iteration.plan
    source = plan.inputs.source if counts or plan.inputs.is_open else None
    last, flow = drawing.chain(pipeline, source)
    drawing.nodes.append('    training(["training loop"])')
    said = f"{flow}, epoch after epoch" if flow.endless else str(flow)
    if flow.count is not None:
        said += " in an epoch" + ", over all ranks" * (plan.chain.shard is not None)
    drawing.edge(last, "training", said)
    return "\n".join(["flowchart TB", *drawing.nodes, *drawing.edges])


def written(stage: Stage) -> str:
    """A stage's options as text, without secrets: those that were given, and those that matter anyway."""
    if type(stage).__repr__ is Stage.__repr__ or any(_pipelines(stage)):
        text = ", ".join(_given(stage))
    else:  # as it says itself, of what is in memory
        text = repr(stage).removeprefix(f"{stage.name}(").removesuffix(")")
    return _legible(str(without_secrets(text)))


class _Drawing:
    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.edges: list[str] = []
        self._count = 0

    def edge(self, first: str, second: str, label: str) -> None:
        self.edges.append(f'    {first} -->|"{label.translate(ESCAPED)}"| {second}')

    def chain(self, pipeline: Pipeline, source: RowSource | RowStream | None) -> tuple[str, Flow]:
        """Draw a chain; gives its last box, and what comes out of it."""
        passing = _passing(pipeline, source)
        last = ""
        for number, (stage, flow) in enumerate(zip(pipeline.stages, passing, strict=True)):
            own = self._stage(stage, flow, source)
            if last:
                self.edge(last, own, str(passing[number - 1]))
            last = own
        return last, passing[-1]

    def _stage(self, stage: Stage, flow: Flow, source: RowSource | RowStream | None) -> str:
        """Draw a box, and above it the pipelines that run into it."""
        inner = list(_pipelines(stage))
        sources = getattr(source, "sources", {})  # of a mix
        joined = [part.source for part in getattr(source, "joined_inputs", ())]
        shares = stage.first_and_last_shares() if hasattr(stage, "first_and_last_shares") else {}
        ends = []
        for number, (name, pipeline) in enumerate(inner):
            of = joined[number] if number < len(joined) else sources.get(name)
            share = " to ".join(dict.fromkeys(f"{part:.1%}" for part in shares.get(name, ())))
            if len(inner) > MOST_BRANCHES:
                end, flows_out = self._card(pipeline), _passing(pipeline, of)[-1]
            else:
                end, flows_out = self.chain(pipeline, of)
            count = "" if name and flows_out.count is None else str(flows_out)
            ends.append((end, ", ".join(part for part in (_legible(name), share, count) if part)))
        options = wrap(written(stage), MOST_WIDE, max_lines=MOST_LINES, placeholder=" …")
        own = self._node([stage.name, *options])
        for end, label in ends:
            self.edge(end, own, label or str(flow))
        return own

    def _card(self, pipeline: Pipeline) -> str:
        lines = [f"{stage.name}({written(stage)})" for stage in pipeline.stages]
        lines = [line if len(line) <= MOST_WIDE else f"{line[: MOST_WIDE - 1]}…" for line in lines]
        if len(lines) > MOST_ON_CARD:
            left = len(lines) - MOST_ON_CARD + 1
            lines[MOST_ON_CARD - 1 :] = [f"… {left} more stages"]
        return self._node(lines)

    def _node(self, lines: Sequence[str]) -> str:
        self._count += 1
        label = "<br/>".join(line.translate(ESCAPED) for line in lines)
        self.nodes.append(f'    stage{self._count}["{label}"]')
        return f"stage{self._count}"


def _passing(pipeline: Pipeline, source: RowSource | RowStream | None) -> list[Flow]:
    rows = None if source is None else rows_of(source)
    return list(flows(pipeline._iteration.plan, pipeline.stages, rows))


def _pipelines(stage: Stage) -> Iterator[tuple[str, Pipeline]]:
    """The pipelines that a stage is made of, by name where they have one."""
    for value in stage.options.values():
        if isinstance(value, Mapping):
            yield from ((str(k), one) for k, one in value.items() if isinstance(one, Pipeline))
        elif isinstance(value, tuple | list):
            yield from (("", one) for one in value if isinstance(one, Pipeline))


def _given(stage: Stage) -> Iterator[str]:
    """Options that were given, and those that matter anyway."""
    fields: Any = dataclasses.fields(stage)  # type: ignore[arg-type]
    always = ALWAYS.get(stage.name, ())
    for number, field in enumerate(fields):
        value = getattr(stage, field.name)
        given = not (type(value) is type(field.default) and same(value, field.default))
        if value is None or field.name in ELSEWHERE or not (given or field.name in always):
            continue
        plain = number == 0 and not field.kw_only and not isinstance(value, int)
        yield show(value) if plain else f"{field.name}={show(value)}"


def _legible(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
