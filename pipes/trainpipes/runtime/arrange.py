"""Which stage of a chain stands where, or why the chain does not make a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainpipes.errors import ConfigError
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
        place: on finished batches, in the process that trains.
        skip_rows: rows in file order left out at the start of an epoch.
        stop_rows: the row in file order before which an epoch ends.
        skip_batches: micro-batches left out at the start of an epoch.
        stop_batches: the micro-batch before which an epoch ends.
        rolling: whether rows go on into the next epoch before they are batched.
        counted: places in ``after`` and stages by which items are counted so far.
    """

    file_stages: list[Stage] = field(default_factory=list)
    before: list[Stage] = field(default_factory=list)
    after: list[Stage] = field(default_factory=list)
    shuffle: Stage | None = None
    shard: Stage | None = None
    batch: Stage | None = None
    repeat: Stage | None = None
    place: list[Stage] = field(default_factory=list)
    skip_rows: int = 0
    stop_rows: int | None = None
    skip_batches: int = 0
    stop_batches: int | None = None
    rolling: bool = False
    counted: list[tuple[int, Stage]] = field(default_factory=list)


def arrange(stages: Sequence[Stage]) -> Arranged:
    """Sort the stages of a chain into the parts of a plan.

    Raises:
        ConfigError: they do not make a pipeline; says which stage, and where it can stand.
    """
    plan = Arranged()
    if not stages or stages[0].role not in ("files", "source"):
        raise ConfigError(
            "a pipeline starts with rows: list_files(...), from_dataset(...), from_arrow(...), "
            f"from_tensors(...) or from_iterable(...), got {stages[0] if stages else 'no stage'}"
        )
    reader = next((n for n, s in enumerate(stages) if s.role == "reader"), 0)
    plan.file_stages = list(stages[:reader])
    for stage in plan.file_stages[1:]:
        if stage.role not in ("shuffle", "shard") and stage.name != "filter":
            raise ConfigError(
                f"{stage} cannot stand on file paths; put it after {stages[reader].name}()"
            )
    for stage in plan.file_stages:
        if stage.role == "shard":
            plan.shard = once(plan.shard, stage)
    for stage in stages[reader + 1 :]:
        _arrange_one(plan, stage)
    if plan.shuffle is not None and getattr(stages[0], "orders_rows", False):
        raise ConfigError(
            f"{stages[0]} orders the rows itself, and so does {plan.shuffle}: leave one out"
        )
    _move_up(plan)
    late = stages[0].late()
    if late is not None:
        (plan.before or plan.after).insert(0, late)
    shards = 1 if plan.shard is None else plan.shard.options["num_shards"]
    if any(s.role in ("take", "skip") for s in plan.after) and shards > 1:
        found = next(s for s in plan.after if s.role in ("take", "skip"))
        raise ConfigError(
            f"{found} of a sharded pipeline stands directly after the source (rows in file order) "
            "or after batch() (micro-batches): elsewhere each shard would count for itself"
        )
    for stage in plan.after:
        if stage.role in ("take", "skip"):
            stage.rolls = plan.rolling
    return plan


def _arrange_one(plan: Arranged, stage: Stage) -> None:
    role = stage.role
    if role == "shuffle":
        if plan.batch is not None:
            raise ConfigError(f"{stage} orders rows: put it before batch()")
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
        plan.rolling = plan.repeat is not None
        for place, counted in reversed(plan.counted):  # they counted rows, not micro-batches
            plan.after.insert(place, counted)
        plan.counted, plan.skip_batches, plan.stop_batches = [], 0, None
        plan.after.append(stage)
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


def _move_up(plan: Arranged) -> None:
    """Let stages that treat each row by itself and keep them all wait until rows are dealt: what
    comes out is the same, and a consumer works on its own rows only."""
    if plan.shuffle is None:
        return
    last = max((n for n, s in enumerate(plan.before) if not s.keeps_rows), default=-1)
    plan.before, moved = plan.before[: last + 1], plan.before[last + 1 :]
    plan.after = moved + plan.after
    plan.counted = [(place + len(moved), stage) for place, stage in plan.counted]


def _arrange_count(plan: Arranged, stage: Stage) -> None:
    """A take or skip: of rows in file order, of micro-batches, or on the way."""
    count = int(stage.options["count"])
    above = plan.after
    if plan.repeat is not None:
        raise ConfigError(f"{stage} after repeat() would count over epochs: put it before repeat()")
    in_file_order = plan.batch is None and plan.shuffle is None
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
