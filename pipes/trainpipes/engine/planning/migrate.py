"""Adapts a saved state to a pipeline that differs in options that may change.

Batch size: each row comes at most once in the current epoch; from m on there is one new sequence,
the same on any topology. Each span leaves over at most the epoch's first batch size and the largest
later one.

Pack length: changes where an epoch begins.

Filter: rows that are still to come; the others stay where they were if nothing behind the filter counts rows
but ``batch``. Else it changes where an epoch begins.

Version of a table: changes where an epoch begins, and all that its files hold with it.

Mix: see ``MixingSource.migrate``.

Data: sizes and contents of files, whose names and rows are as they were.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainpipes._internal.checks import wrong
from trainpipes.columns.run import innermost, levels
from trainpipes.engine.planning.chain import Chain, MixingSource
from trainpipes.engine.planning.layouts import Counts, Layouts
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import StateError, shown
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RegroupStage
from trainpipes.order.layout import Layout, StreamLayout
from trainpipes.state.cursor import shard_key
from trainpipes.state.format import (
    BatchSizes,
    Position,
    Saved,
    fitting,
    named_difference,
    read,
    render,
    said,
    take_over,
)

#: What ``load_state_dict(state, allow_changes=...)`` may name.
ALLOWED = ("batch_size", "data", "filter", "mix", "pack_length", "version")


def position_of(state: Any, plan: Plan) -> Position:
    saved = read(state)
    reweighed = saved.reweighed
    identity = plan.reweighed(reweighed).identity
    try:
        position = fitting(saved, identity, plan.chain.num_shards, plan.inputs.file_name)
    except StateError as error:
        raise _refusal(saved, plan) or error from None
    position.reweighed = reweighed
    if plan.counted:
        most = plan.resized(position.sizes).counts.batches_in_pass
        # Ranks that end at different steps count the last step as a whole.
        if position.m > (most + plan.chain.num_shards - 1 if plan.chain.uneven else most):
            raise StateError(
                f"batches: epoch {position.pass_number} of this pipeline has {most}, and the state was saved "
                f"after {position.m}; load it as it was saved"
            )
    return position


def _refusal(saved: Saved, plan: Plan) -> StateError | None:
    """Why the first difference cannot change where a state stands, though it may elsewhere."""
    before, now = json.loads(saved.pipeline), json.loads(plan.identity)
    found = named_difference(before, now)
    change = None if found is None else _CHANGES.get(found[0])
    if change is not None and [s["stage"] for s in before["stages"]] == [
        s["stage"] for s in now["stages"]
    ]:
        try:
            change(before, saved.position, plan)
        except StateError as error:
            return error
    return None


def at_start(state: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The state of an epoch's start as ``plan`` would have it, with any files of the epoch before."""
    saved = read(state)
    identity = json.loads(saved.pipeline)
    identity["data"] = json.loads(plan.identity)["data"]
    position = replace(saved.position, cursors={}, extra={})
    return render(position, json.dumps(identity, separators=(",", ":")))


def checked_changes(allow_changes: Any) -> Collection[str]:
    """What a state may differ in; raises ConfigError for anything else."""
    several = isinstance(allow_changes, list | tuple | set | frozenset)
    if not several or not all(isinstance(n, str) and n in ALLOWED for n in allow_changes):
        way = "all else must be as it was saved"
        raise wrong("allow_changes", f"a list of some of {list(ALLOWED)}", allow_changes, way)
    return allow_changes  # type: ignore[no-any-return]


def migrate(state: dict[str, Any], plan: Plan, allow_changes: Collection[str]) -> dict[str, Any]:
    """The state as ``plan`` would have it, if it differs only in ``allow_changes``.

    Raises:
        StateError: it cannot change where the state stands.
    """
    saved = read(state)
    position = saved.position
    if position.num_shards != plan.chain.num_shards:
        return state
    identity = json.loads(saved.pipeline)
    if "data" in allow_changes:
        take_over(identity["data"], json.loads(plan.identity)["data"])
    if "version" in allow_changes:
        _reversion(identity, position, plan)
    if "mix" in allow_changes and isinstance(plan.chain.opener, MixingSource):
        plan.chain.opener.migrate(identity, json.loads(plan.identity), position)
    if "filter" in allow_changes:
        _refilter(identity, position, plan)
    if "pack_length" in allow_changes:
        _repack(identity, position, plan)
    if "batch_size" in allow_changes:
        _rebatch(identity, position, plan)
    return render(position, json.dumps(identity, separators=(",", ":")))


def _pairs(identity: dict[str, Any], plan: Plan, name: str) -> list[tuple[dict[str, Any], Any]]:
    """The stages of a name in a state, each with that of ``plan``, if there are as many."""
    both = identity["stages"], json.loads(plan.identity)["stages"]
    before, now = ([stage for stage in stages if stage["stage"] == name] for stages in both)
    return list(zip(before, now, strict=True)) if len(before) == len(now) else []


# What filters keep


def _refilter(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    filters = [stage for stage in plan.chain.stages if stage.name == "filter"]
    for stage, (before, now) in zip(filters, _pairs(identity, plan, "filter"), strict=False):
        old, new = before.get("predicate"), now["predicate"]
        begun = not all(
            _begins_epoch(cursor, shard, position.pass_number, plan)
            for shard, cursor in position.cursors.items()
        )
        if old != new and begun and _counted_behind(stage, plan.chain):
            raise StateError(
                f"stages/filter/predicate: saved {said(old)}, now {said(new)}; within an epoch it may change "
                "only where filter() stands after sharding_filter() and shuffle(), and before batch() of a "
                f"fixed size (batches = {position.m}): load the state of an epoch's start or end, or put "
                "filter() there in the next run"
            )
        before["predicate"] = new


def _counted_behind(stage: Stage, chain: Chain) -> bool:
    """Whether a position counts rows that this filter has passed."""
    if stage not in chain.after or chain.batch is None or not chain.batch.batch_size:
        return True
    behind = chain.after[chain.after.index(stage) + 1 :]
    return any(isinstance(s, RegroupStage) and s is not chain.batch for s in behind)


# The length of packed rows


def _repack(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    packs = _pairs(identity, plan, "pack")
    lengths = [(before.get("max_length"), now["max_length"]) for before, now in packs]
    changed = [(before, now) for before, now in lengths if before != now]
    for shard, cursor in position.cursors.items():
        if changed and not _begins_epoch(cursor, shard, position.pass_number, plan):
            old, new = shown(changed[0][0]), changed[0][1]
            raise StateError(
                f"pack/max_length: saved {old}, now {new}; it may change only between epochs, and "
                f"{shard_key(shard)} is within epoch {innermost(cursor)['epoch']} (batches = {position.m}): "
                f"load the state of an epoch's start or end, or continue with max_length={old} until then; "
                f"with repeat() and no end, keep {old} or start a new run"
            )
    for before, now in packs:
        before["max_length"] = now["max_length"]


def _begins_epoch(cursor: dict[str, Any], shard: int, pass_number: int, plan: Plan) -> bool:
    if cursor.get("ended"):
        return True
    place = innermost(cursor)
    if any(level.get("row") for level in (*levels(cursor), place)):
        return False
    if not place.get("window"):
        return True
    epoch, layout = place["epoch"], plan.layouts.of(place["epoch"])
    span = plan.counts.slot(shard, epoch, plan.chain.first_epoch(pass_number)).span
    return isinstance(layout, Layout) and bool(place["window"] >= layout.num_windows(span))


# The versions of tables


def _reversion(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    for before, now in _tables(identity["data"], json.loads(plan.identity)["data"]):
        old, new = before.get("version"), now["version"]
        if old != new and position.m:
            raise StateError(
                f"data/version: saved {said(old)}, now {said(new)}; it may change only between epochs, and "
                f"the state is within epoch {position.pass_number} (batches = {position.m}): read version "
                f"{said(old)} until then, load the state of an epoch's start, or start a new run"
            )
        before.clear()
        before.update(now)


def _tables(saved: Any, present: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What a state and a pipeline say of the same tables."""
    if isinstance(saved, dict) and isinstance(present, dict):
        if "table" in saved and saved["table"] == present.get("table"):
            yield saved, present
            return
        for key in saved:
            yield from _tables(saved[key], present.get(key))
    elif isinstance(saved, list) and isinstance(present, list):
        for old, new in zip(saved, present, strict=False):
            yield from _tables(old, new)


# The size of batches


def _rebatch(identity: dict[str, Any], position: Position, plan: Plan) -> None:
    pairs = [pair for pair in _pairs(identity, plan, "batch") if "batch_size" in pair[0]]
    if not pairs or "batch_size" not in pairs[0][1]:  # it counts tokens
        return
    before, now = pairs[0]
    old, new = before["batch_size"], now["batch_size"]
    if old == new:
        return
    before["batch_size"] = new
    within = StateError(
        f"batch/batch_size: saved {old}, now {new}; in this pipeline it cannot change within an epoch, as "
        "the number of batches does not say how many rows are used up: load the state of an epoch's start, "
        f"or continue with batch_size={old} until then"
    )
    chain, sized = plan.chain, plan.chain.of_batch_size(old)
    if isinstance(plan.layouts.usual, StreamLayout) and not chain.mixes:
        # An unshuffled stream's windows are as long as its batches.
        length, rows = Layouts(plan.inputs, sized).usual.window_rows, plan.layouts.usual.window_rows
        for place in map(innermost, position.cursors.values() if length != rows else ()):
            row = place["window"] * length + place["row"]
            if row and chain.num_shards > 1:  # rows are dealt window by window
                raise within
            place["window"], place["row"] = divmod(row, rows)
    if not plan.layouts.whole:
        return
    position.sizes = sizes = _sizes(position, plan, sized)
    if plan.counted:
        position.cursors = {}
    elif chain.num_shards > 1 and sizes is not None:
        raise within


def _sizes(position: Position, plan: Plan, old: Chain) -> BatchSizes | None:
    """The batch sizes of a position's epoch, with the new size from there on."""
    chain, m = plan.chain, position.m
    first, was, size = chain.first_epoch(position.pass_number), old.batch_size, chain.batch_size
    sizes = position.sizes or BatchSizes(first, 0, ((0, was),))
    counts = Counts(Layouts(plan.inputs, old, sizes))
    epoch = counts.epoch_of(m, first)
    if epoch > sizes.epoch:  # where epochs follow each other in a pass
        sizes = BatchSizes(epoch, counts.epoch_start(epoch, first), ((0, was),))
    if m == sizes.start:
        return BatchSizes(sizes.epoch, m, ((0, size),)) if m else None
    passed = m - sizes.start + (0 if chain.rolling else chain.skip_batches)
    return replace(sizes, sizes=(*sizes.sizes, (passed, size)))


#: What may change only where a state stands right, by its path in an identity.
_CHANGES = {
    "stages/batch/batch_size": _rebatch,
    "stages/filter/predicate": _refilter,
    "stages/pack/max_length": _repack,
    "data/version": _reversion,
}
