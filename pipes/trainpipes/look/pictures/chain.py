"""The boxes of a drawing: the stages of a pipeline, with the branches that run into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from trainpipes.kinds.options import same, show
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage import Stage
from trainpipes.look.pictures.flows import Flow, flows, rows_of
from trainpipes.look.pictures.text_width import drawable
from trainpipes.look.plain_json import without_secrets
from trainpipes.pipeline import Pipeline

__all__ = ["Box", "Branch", "Chain", "chain_of"]

#: Branches that are drawn side by side, each with its boxes; of more, each is one card.
MOST_BRANCHES = 4
#: Lines of a card.
MOST_ON_CARD = 8

#: Characters of a line of options, and lines of them.
MOST_WIDE, MOST_LINES = 44, 3
#: Options that are drawn also where they are left at their defaults; and those that never are: a drawing says
#: them in another way, or they may be secret.
ALWAYS = {"sharding_filter": ("num_shards",), "shuffle": ("buffer_size", "seed"), "mix": ("stop",)}
ELSEWHERE = ("sources", "pipelines", "weights", "storage_options")
#: Sources that hold their rows in memory.
IN_MEMORY = ("from_arrow", "from_dataset", "from_tensors")


@dataclass(frozen=True)
class Branch:
    """A pipeline whose rows run into a box.

    Attributes:
        name: of the source in a mix; "" elsewhere.
        share: of the mix, in words; "" elsewhere.
        chain: its stages.
    """

    name: str
    share: str
    chain: Chain

    @property
    def label(self) -> str:
        """What is said of its rows, on the way to where they join the others."""
        flow = self.chain.boxes[-1].flow
        said = self.name, self.share, "" if self.name and flow.count is None else str(flow)
        return ", ".join(part for part in said if part)

    @property
    def card(self) -> tuple[str, ...]:
        """Its stages, a line each."""
        lines = [
            f"{box.name}({', '.join(box.lines)})" if box.lines else box.name
            for box in self.chain.boxes
        ]
        lines = [line if len(line) <= MOST_WIDE else f"{line[: MOST_WIDE - 1]}…" for line in lines]
        if len(lines) > MOST_ON_CARD:
            left = len(lines) - MOST_ON_CARD + 1
            lines[MOST_ON_CARD - 1 :] = [f"… {left} more stages"]
        return tuple(lines)


@dataclass(frozen=True)
class Box:
    """A stage.

    Attributes:
        name: of the stage.
        lines: its options, in a few short lines.
        flow: what comes out of it.
        branches: pipelines that it is made of.
    """

    name: str
    lines: tuple[str, ...]
    flow: Flow
    branches: tuple[Branch, ...] = ()

    @property
    def crowded(self) -> bool:
        """Whether its branches are too many to be drawn box by box."""
        return len(self.branches) > MOST_BRANCHES


@dataclass(frozen=True)
class Chain:
    """Boxes, first one first.

    Attributes:
        boxes: of the stages.
        shards: that rows are dealt to; 1 where they are not dealt.
        dealt: the first box after that.
    """

    boxes: tuple[Box, ...]
    shards: int = 1
    dealt: int = 0

    @property
    def dealt_to(self) -> str:
        """What is said of that which each rank does for itself."""
        return f"{self.shards} shard{'s' * (self.shards != 1)}, dealt to ranks and workers"

    @property
    def result(self) -> str:
        """What comes to the training loop."""
        flow = self.boxes[-1].flow
        if flow.endless:
            return f"{flow}, epoch after epoch"
        if flow.count is None:
            return str(flow)
        return f"{flow} in an epoch" + ", over all ranks" * bool(self.dealt)


def chain_of(
    pipeline: Pipeline, counts: bool, source: RowSource | RowStream | None = None
) -> Chain:
    """The boxes of a pipeline.

    Args:
        pipeline: what to draw.
        counts: whether files may be listed, and what else ``explain()`` reads, to count rows.
        source: its rows, where they are listed already.
    """
    plan = pipeline._session.plan
    stages = pipeline.stages
    if source is None and (counts or plan.inputs.is_open or _is_free(pipeline)):
        source = plan.inputs.source
    rows = None if source is None else rows_of(source)
    boxes = [
        Box(stage.name, _lines(stage), flow, tuple(_branches(stage, counts, source)))
        for stage, flow in zip(stages, flows(plan, stages, rows), strict=True)
    ]
    dealing = [n for n, stage in enumerate(stages) if stage.role == "shard"]
    if dealing:  # what is dealt is shuffled before, wherever that is written
        dealing += [
            n for n, s in enumerate(stages) if s.role == "shuffle" and boxes[n].flow.what != "files"
        ]
    dealt = max(dealing, default=-1) + 1
    return Chain(tuple(boxes), plan.chain.num_shards, dealt)


def _is_free(pipeline: Pipeline) -> bool:
    """Whether a pipeline's rows are counted without opening anything."""
    first = pipeline.stages[0]
    inner = [one for _, one in _pipelines(first)]
    return first.name in IN_MEMORY or (bool(inner) and all(map(_is_free, inner)))


def _pipelines(stage: Stage) -> Iterator[tuple[str, Pipeline]]:
    """The pipelines that a stage is made of, by name where they have one."""
    for value in stage.options.values():
        if isinstance(value, Mapping):
            yield from ((str(k), one) for k, one in value.items() if isinstance(one, Pipeline))
        elif isinstance(value, tuple | list):
            yield from (("", one) for one in value if isinstance(one, Pipeline))


def _branches(stage: Stage, counts: bool, source: RowSource | RowStream | None) -> Iterator[Branch]:
    inner = list(_pipelines(stage))
    if not inner:
        return
    sources = getattr(source, "sources", {})  # of a mix
    joined = [part.source for part in getattr(source, "joined_inputs", ())]
    shares = stage.first_and_last_shares() if hasattr(stage, "first_and_last_shares") else {}
    for number, (name, pipeline) in enumerate(inner):
        own = joined[number] if number < len(joined) else sources.get(name)
        said = " to ".join(dict.fromkeys(f"{share:.1%}" for share in shares.get(name, ())))
        yield Branch(drawable(name), said, chain_of(pipeline, counts, own))


def _lines(stage: Stage) -> tuple[str, ...]:
    """A stage's options, in a few short lines."""
    if type(stage).__repr__ is Stage.__repr__ or any(_pipelines(stage)):
        text = ", ".join(_written(stage))
    else:  # as it says itself, of what is in memory
        text = repr(stage).removeprefix(f"{stage.name}(").removesuffix(")")
    text = drawable(str(without_secrets(text)))
    return tuple(wrap(text, MOST_WIDE, max_lines=MOST_LINES, placeholder=" …"))


def _written(stage: Stage) -> Iterator[str]:
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
