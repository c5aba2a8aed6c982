"""What flows between the stages of a chain, and how much of it, as far as that is known for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainpipes.engine.layout import count_batches
from trainpipes.engine.planning.plan import Plan
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage import Stage
from trainpipes.stages.tokenizing import Tokenizes

__all__ = ["Flow", "flows", "rows_of"]


@dataclass(frozen=True)
class Flow:
    """What comes out of a stage in an epoch.

    Attributes:
        what: in the plural, as in "rows".
        count: how many; None where that is not known.
        about: whether that is so on average only.
        endless: whether epochs follow each other without an end.
    """

    what: str
    count: int | None = None
    about: bool = False
    endless: bool = False

    def __str__(self) -> str:
        if self.count is None:
            return self.what
        what = self.what
        if self.count == 1:
            first, _, rest = what.partition(" of ")
            first = first.removesuffix("es") if first == "batches" else first.removesuffix("s")
            what = f"{first} of {rest}" if rest else first
        return f"{'about ' * self.about}{self.count:,} {what}"


def rows_of(source: RowSource | RowStream) -> int | None:
    """The rows of a source that is open; None where they are not counted."""
    return int(source.lengths.sum()) if isinstance(source, RowSource) else source.length


def flows(plan: Plan, stages: Sequence[Stage], rows: int | None) -> Iterator[Flow]:
    """What comes out of each stage. Files are counted only where none are read: paths are the rows then.

    Args:
        plan: of these stages.
        stages: as they are written.
        rows: of the source; None where that is not known, or not to be asked.
    """
    flow = Flow("files")
    reads = any(stage.role in ("reader", "source") for stage in stages)
    for stage in stages:
        if stage.role in ("reader", "source"):
            what = "batches" if getattr(stage, "makes_batches", False) else "rows"
            known = None if stage.options.get("filter") is not None else rows
            flow = Flow(what, known, endless=bool(getattr(stage, "endless", False)))
        elif stage.role == "files":
            flow = Flow("files", None if reads else rows)
        elif flow.what != "files" or not reads:
            flow = _after(flow, stage, plan)
        yield flow


def _after(flow: Flow, stage: Stage, plan: Plan) -> Flow:
    """What a stage makes of what comes to it."""
    count = flow.count
    if stage.role == "batch":
        size, tokens = stage.options["batch_size"], stage.options["max_tokens"]
        what = f"batches of {size:,}" if size else f"batches of at most {tokens:,} tokens"
        if size is None or count is None or not stage.keeps_rows:
            return Flow(what, endless=flow.endless)
        dropping = bool(stage.options.get("drop_last"))
        return replace(flow, what=what, count=count_batches(count, size, dropping))
    if stage.role == "pack":  # or what else makes rows of others
        length = stage.options.get("max_length")
        return Flow(f"rows of {length:,} tokens" if length else "rows", endless=flow.endless)
    if stage.role == "repeat":
        times = stage.options["times"]
        if times is None:
            return replace(flow, count=None, about=False, endless=True)
        return replace(flow, count=None if count is None else count * times)
    if stage.role in ("take", "skip"):
        n = int(stage.options["count"])
        if count is None or flow.endless:
            return flow
        return replace(flow, count=min(count, n) if stage.role == "take" else max(0, count - n))
    if stage.role == "shuffle" and plan.chain.drawn is not None and count is not None:
        return replace(flow, count=plan.inputs.epoch_rows)
    if isinstance(stage, Tokenizes):
        flow = replace(flow, what="token rows")
    if stage.keeps_rows:
        return flow
    if stage.share is None or count is None:
        return replace(flow, count=None, about=False)
    return replace(flow, count=round(count * stage.share), about=True)
