"""A state of a pipeline that differed in what may change, made one of the pipeline at hand.

Of another batch size, what is promised: each row at most once in the epoch at hand, rows of each span in
the order they would have had, and one new sequence from m on, the same on any topology. Spans then no
longer end together: rows left over at that epoch's end are, for each span, at most the epoch's first batch
size and the largest later one.

Rows of another pack length begin where an epoch does: documents of one epoch are never packed to two
lengths, and what was delivered before is as it was.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trainpipes.cursor import is_count, shard_key
from trainpipes.errors import ConfigError, StateError
from trainpipes.identity import damaged, read_identity
from trainpipes.order import Layout, StreamLayout
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.planning.remix import remix
from trainpipes.runtime.run import innermost
from trainpipes.shown import shown
from trainpipes.state import BatchSizes, Position, read, render

__all__ = ["ALLOWED", "adapt"]

#: What ``load_state_dict(state, allow_changes=...)`` may name.
ALLOWED = ("batch_size", "mix", "pack_length", "schema")


def adapt(state: dict[str, Any], plan: Plan, allow_changes: Collection[str]) -> dict[str, Any]:
    """The state as ``plan`` would have it, if it differs only in what may change.

    Args:
        state: of a pipeline that differs in what may change, or of the same.
        plan: of the pipeline that loads it.
        allow_changes: what may differ.

    Raises:
        ConfigError: ``allow_changes`` names something else.
        StateError: it cannot change where the state stands.
    """
    if isinstance(allow_changes, str) or not all(name in ALLOWED for name in allow_changes):
        raise ConfigError(
            f"allow_changes is a list of some of {list(ALLOWED)}, got {shown(allow_changes)}; everything "
            "else must be as it was saved"
        )
    saved = read(state)
    saved.check_like(plan.identity)
    position = saved.position
    if position.num_shards != plan.num_shards:
        return state
    identity, position.notes = read_identity(saved.pipeline)
    if "schema" in allow_changes:
        position.notes.pop("schemas", None)
    if "mix" in allow_changes:
        remix(identity, position, plan)
    if "pack_length" in allow_changes:
        _repack(identity, position, plan)
    if "batch_size" in allow_changes:
        _rebatch(identity, position, plan)
    return render(position, json.dumps(identity, separators=(",", ":")))


def _repack(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    """Give a state the pack length of ``plan``."""
    packs = [s for s in identity["stages"] if s["stage"] == "pack"]
    chain: list[Any] = plan.stages
    now = [s.max_length for s in chain if s.role == "pack" and s.name == "pack"]
    changes = [
        (stage, length)
        for stage, length in zip(packs, now, strict=False)
        if stage.get("length") != length
    ]
    if not changes or len(packs) != len(now):
        return
    for shard, cursor in position.cursors.items():
        if not _begins_epoch(cursor, shard, position.epoch, plan):
            old, new = shown(changes[0][0].get("length")), changes[0][1]
            raise StateError(
                f"pack/length: saved {old}, now {new}; it can change where an epoch starts, and "
                f"{shard_key(shard)} stands within epoch {innermost(cursor)['epoch']} (m = {position.m}): "
                f"load the state of an epoch's start or end, or go on with max_length={old} until there; a "
                "run under repeat() without an end goes on with it, or is started anew"
            )
    for stage, length in changes:
        stage["length"] = length


def _begins_epoch(cursor: dict[str, Any], shard: int, number: int, plan: Plan) -> bool:
    """Whether a shard has used nothing of an epoch, or all of it, as far as its cursor tells."""
    if cursor.get("ended"):
        return True
    here, place = cursor, innermost(cursor)
    while "below" in here:
        if here.get("row"):
            return False
        here = here["below"]
    if place.get("row"):
        return False
    if not place.get("window"):
        return True
    layout = plan.layout_of(place["epoch"])
    if not isinstance(layout, Layout):
        return False
    slot = plan.slot(shard, place["epoch"], plan.first_epoch(number))
    return bool(place["window"] >= layout.num_windows(slot % layout.num_spans))


def _rebatch(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    """Give a state the batch size of ``plan``."""
    before = next((s for s in identity["stages"] if s["stage"] == "batch"), None)
    if plan.batch is None or before is None:
        return
    if "batch_size" not in before or not plan.batch.batch_size:  # it counts tokens
        return
    old, new = before["batch_size"], plan.batch_size
    if old == new:
        return
    if not is_count(old, 1):
        raise damaged(f"batch/batch_size is {shown(old)}")
    before["batch_size"] = new
    if isinstance(plan.layout, StreamLayout) and not plan.mixes:
        _rewindow(position, plan, old)
    if not plan.whole:
        return
    position.sizes = sizes = _sizes(position, plan, old)
    if plan.seekable:
        position.cursors = {}  # which told where the old size had led
    elif plan.num_shards > 1 and sizes is not None:
        raise _within_epoch(plan, old)


def _rewindow(position: Position, plan: Plan, old: int) -> None:
    """Give the cursors of a stream that is not shuffled the windows of ``plan``: they are as long as its
    micro-batches."""
    before, now = _of_size(plan, old).layout.window_rows, plan.layout.window_rows
    if before == now:
        return
    for cursor in position.cursors.values():
        place = innermost(cursor)
        row = place["window"] * before + place["row"]
        if row and plan.num_shards > 1:  # rows are dealt window by window
            raise _within_epoch(plan, old)
        place["window"], place["row"] = divmod(row, now)


def _within_epoch(plan: Plan, old: int) -> StateError:
    return StateError(
        f"batch/batch_size: saved {old}, now {plan.batch_size}; in this pipeline it cannot change within an "
        "epoch, since the rows that come next do not follow from the number of micro-batches: load the "
        "state of an epoch's start"
    )


def _sizes(position: Position, plan: Plan, old: int) -> BatchSizes | None:
    """The sizes of the epoch that the state stands in, the new one from there on."""
    m, first_epoch = position.m, plan.first_epoch(position.epoch)
    sizes = position.sizes or BatchSizes(first_epoch, 0, ((0, old),))
    if not plan.rolling and plan.repeat is not None and plan.known:
        sizes = _current(plan, sizes, old, first_epoch, m)
    if m == sizes.start:
        fresh = BatchSizes(sizes.epoch, m, ((0, plan.batch_size),))
        return fresh if m else None
    passed = m - sizes.start + (0 if plan.rolling else plan.skip_batches)
    return replace(sizes, sizes=(*sizes.sizes, (passed, plan.batch_size)))


def _current(plan: Plan, sizes: BatchSizes, old: int, first_epoch: int, m: int) -> BatchSizes:
    """The sizes of the epoch in which ``m`` lies, where epochs follow each other in one pass."""
    before = _of_size(plan, old).resized(sizes)
    epoch = before.epoch_of(m, first_epoch)
    if epoch == sizes.epoch:
        return sizes
    return BatchSizes(epoch, before.epoch_start(epoch, first_epoch), ((0, old),))


def _of_size(plan: Plan, size: int) -> Plan:
    """The plan with micro-batches of another size."""
    stages = [s.replaced(batch_size=size) if s is plan.batch else s.fresh() for s in plan.stages]
    return Plan(stages, plan.source, plan.schemas)
