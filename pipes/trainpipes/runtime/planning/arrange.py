"""Which stage of a chain stands where, or why the chain does not make a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainpipes.errors import ConfigError
from trainpipes.runtime.caching.holes import DropHoles
from trainpipes.runtime.kinds import CutStage, PlaceStage, Source
from trainpipes.runtime.planning.as_columns import with_columns
from trainpipes.runtime.reading.numbered import arrange_drawn
from trainpipes.runtime.stage import Stage

__all__ = ["Arranged", "arrange"]


@dataclass
class Arranged:
    """The stages of a chain, sorted by what they are to its plan.

    Attributes:
        file_stages: on file paths, before they are read.
        before: on rows, before the shuffle.
        after: on rows after they are dealt, and above.
        shuffle: the one that orders rows.
        shard: the one that deals them.
        batch: the one that cuts micro-batches.
        repeat: the one that goes on with the next epoch.
        cache: the one that keeps rows.
        cached: how many of ``before`` are below it; None where nothing is kept.
        place: on finished batches, in the process that trains.
        skip_rows: rows in file order left out at the start of an epoch.
        stop_rows: the row in file order before which an epoch ends.
        skip_batches: micro-batches left out at the start of an epoch.
        stop_batches: the micro-batch before which an epoch ends.
        rolling: whether rows go on into the next epoch before they are batched.
        mixes: whether the rows are of several pipelines.
        counted: places in ``after`` and stages by which items are counted so far.
    """

    file_stages: list[Stage] = field(default_factory=list)
    before: list[Stage] = field(default_factory=list)
    after: list[Stage] = field(default_factory=list)
    shuffle: Any = None
    shard: Any = None
    batch: Any = None
    repeat: Any = None
    cache: Any = None
    cached: int | None = None
    place: list[PlaceStage] = field(default_factory=list)
    skip_rows: int = 0
    stop_rows: int | None = None
    skip_batches: int = 0
    stop_batches: int | None = None
    rolling: bool = False
    mixes: bool = False
    counted: list[tuple[int, Stage]] = field(default_factory=list)


def arrange(stages: Sequence[Any]) -> Arranged:
    """Sort the stages of a chain into the parts of a plan.

    Raises:
        ConfigError: they do not make a pipeline; says which stage, and where it can stand.
    """
    plan = Arranged(mixes=bool(stages) and getattr(stages[0], "mixes", False))
    if not stages or stages[0].role not in ("files", "source"):
        raise ConfigError(
            "a pipeline starts with rows: list_files(...), from_dataset(...), from_arrow(...), "
            f"from_tensors(...) or from_iterable(...), got {stages[0] if stages else 'no stage'}"
        )
    reader = next((n for n, s in enumerate(stages) if s.role == "reader"), 0)
    plan.file_stages = list(stages[:reader])
    for stage in plan.file_stages[1:]:
        by_file = stage.role in ("shuffle", "shard") or stage.name == "filter"
        if not by_file or getattr(stage, "order", None) is not None:
            raise ConfigError(
                f"{stage} cannot stand on file paths; put it after {stages[reader].name}()"
            )
    for stage in plan.file_stages:
        if stage.role == "shard":
            plan.shard = once(plan.shard, stage)
    for stage in with_columns(stages[reader:])[1:]:
        _arrange_one(plan, stage)
    if plan.shuffle is not None and getattr(stages[0], "orders_rows", False):
        raise ConfigError(
            f"{stages[0]} orders the rows itself, and so does {plan.shuffle}: leave one out"
        )
    if plan.mixes:
        _check_mixed(plan, stages[0])
    if plan.cache is not None and not stages[reader].has_blocks:
        raise ConfigError(
            f"{plan.cache} keeps Arrow rows block by block, as read_parquet() and from_arrow() give them, "
            f"and {stages[reader]} does not: leave it out, or write the rows to Parquet files first"
        )
    if plan.batch is not None and getattr(stages[0], "makes_batches", False):
        raise ConfigError(f"{stages[0]} makes the batches: leave out {plan.batch}")
    if getattr(plan.shuffle, "order", None) is not None:
        arrange_drawn(plan, stages[reader])
    _move_up(plan)
    first = stages[0]
    late = first.late() if isinstance(first, Source) else None
    if late is not None:
        (plan.before or plan.after).insert(0, late)
    shards = 1 if plan.shard is None else plan.shard.num_shards
    if any(s.role in ("take", "skip") for s in plan.after) and shards > 1:
        found = next(s for s in plan.after if s.role in ("take", "skip"))
        raise ConfigError(
            f"{found} of a sharded pipeline stands directly after the source (rows in file order) "
            "or after batch() (micro-batches): elsewhere each shard would count for itself"
        )
    return plan


def _check_mixed(plan: Arranged, mix: Stage) -> None:
    """What cannot stand above a mix."""
    for stage in (plan.shuffle, plan.cache):
        if stage is not None:
            raise ConfigError(
                f"{stage} stands above mix(), where rows come in the order in which they are mixed: give "
                f"each source its own, mix({{'name': source.{stage.name}(...), ...}})"
            )
    endless = getattr(mix, "endless", False)
    if endless and plan.repeat is not None and plan.repeat.times is not None:
        raise ConfigError(
            f'{plan.repeat} counts epochs, and mix(stop="repeat") has no end: leave one out'
        )


def _arrange_one(plan: Arranged, stage: Any) -> None:
    role = stage.role
    if role == "shuffle":
        if plan.batch is not None:
            raise ConfigError(f"{stage} orders rows: put it before batch()")
        packed = next((s for s in plan.after if s.role == "pack"), None)
        if packed is not None:
            raise ConfigError(
                f"{packed} makes rows of rows in the order in which they are dealt"
                + (", and mixes them itself" if packed.name == "pack" else "")
                + ": put shuffle() before it"
            )
        if plan.shuffle is not None and plan.shuffle.name != stage.name:
            raise ConfigError(f"{plan.shuffle} orders the rows, and so does {stage}: leave one out")
        plan.shuffle = once(plan.shuffle, stage)
        plan.before, plan.after = plan.before + plan.after, []
        if any(s.role in ("take", "skip") for s in plan.before):
            raise ConfigError(
                "take() and skip() before a shuffle stand directly after the source, where rows "
                "are counted in file order; here a stage that drops rows stands between"
            )
    elif role == "shard":
        plan.shard = once(plan.shard, stage)
    elif role == "batch":
        plan.batch = once(plan.batch, stage)
        _recut(plan)
        plan.after.append(stage)
    elif role == "pack":
        if plan.batch is not None:
            raise ConfigError(f"{stage} makes rows of rows: put it before {plan.batch.name}()")
        _recut(plan)
        plan.after.append(stage)
    elif role == "cache":
        _arrange_cache(plan, stage)
    elif role == "repeat":
        plan.repeat = once(plan.repeat, stage)
    elif role in ("take", "skip"):
        _arrange_count(plan, stage)
    elif role == "place":
        plan.place.append(stage)
    elif role in ("rows", "finish"):
        plan.after.append(stage)
    else:
        raise ConfigError(f"{stage} starts a pipeline; it cannot stand above another stage")


def _recut(plan: Arranged) -> None:
    """Make way for a stage that cuts what comes from below anew."""
    plan.rolling = plan.repeat is not None
    for place, counted in reversed(plan.counted):  # they counted rows, not what comes out now
        plan.after.insert(place, counted)
    plan.counted, plan.skip_batches, plan.stop_batches = [], 0, None


def _arrange_cache(plan: Arranged, stage: Any) -> None:
    """A cache: of what the stages on rows below it make of a block, whatever the epoch."""
    if plan.shuffle is not None:
        raise ConfigError(
            f"{stage} stands after {plan.shuffle}, where rows come in another order every epoch: put it "
            "before shuffle(), with the stages before it whose work is to be kept: "
            ".tokenize(...).cache().shuffle(...)"
        )
    above = plan.batch or plan.repeat
    if above is None:
        # What makes rows of several rows has a place of its own.
        above = next((s for s in plan.after if s.role != "rows" or isinstance(s, CutStage)), None)
    if above is not None:
        raise ConfigError(
            f"{stage} keeps rows as they are read, block by block: put it before {above.name}()"
        )
    for below in plan.after:
        if below.by_epoch:
            raise ConfigError(
                f"{below} gives other rows in every epoch, and {stage} would keep those of one: put "
                f"cache() before {below.name}()"
            )
    plan.cache = once(plan.cache, stage)
    plan.cached = len(plan.after) if stage.on else None


def _move_up(plan: Arranged) -> None:
    """Let stages that treat each row by itself and keep them all wait until rows are dealt: what
    comes out is the same, and a consumer works on its own rows only. What is below a cache is done for
    whole blocks, and where it drops rows, the dealing is to count them still."""
    cached = plan.cached or 0
    if plan.shuffle is None:
        plan.before, plan.after = plan.after[:cached], plan.after[cached:]
        if not all(stage.keeps_rows for stage in plan.before):
            plan.after.insert(0, DropHoles())
        return
    last = max((n for n, s in enumerate(plan.before) if not s.keeps_rows), default=-1)
    last = max(last, cached - 1)
    plan.before, moved = plan.before[: last + 1], plan.before[last + 1 :]
    plan.after = moved + plan.after
    plan.counted = [(place + len(moved), stage) for place, stage in plan.counted]


def _arrange_count(plan: Arranged, stage: Any) -> None:
    """A take or skip: of rows in file order, of micro-batches, or on the way."""
    count = int(stage.count)
    above = plan.after
    if plan.repeat is not None:
        raise ConfigError(f"{stage} after repeat() would count over epochs: put it before repeat()")
    in_file_order = plan.batch is None and plan.shuffle is None and not plan.mixes
    if in_file_order and all(s.keeps_rows and s.role == "rows" for s in above):
        if stage.role == "skip":
            plan.skip_rows += count
        else:
            stop = plan.skip_rows + count
            plan.stop_rows = stop if plan.stop_rows is None else min(plan.stop_rows, stop)
        return
    items = above if plan.batch is None else above[above.index(plan.batch) :]
    counted = all(s.keeps_rows for s in items)
    if counted and (plan.batch is not None or plan.shuffle is not None):
        if plan.batch is None:
            plan.counted.append((len(above), stage))
        if stage.role == "skip":
            plan.skip_batches += count
        else:
            stop = plan.skip_batches + count
            plan.stop_batches = stop if plan.stop_batches is None else min(plan.stop_batches, stop)
        return
    plan.after.append(stage)


def once(found: Stage | None, stage: Stage) -> Stage:
    if found is not None:
        raise ConfigError(f"a pipeline has one {stage.name}(), got {found} and {stage}")
    return stage
