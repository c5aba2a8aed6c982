"""``merge_states``: one state for all ranks from the states of each rank or worker.

States of a counted pipeline have no cursors: those of ranks are all alike, and those of a DataLoader's
workers, who take turns, differ in m. States with cursors are put together shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from trainpipes._internal.shown import cut, shown
from trainpipes.errors import StateError
from trainpipes.state.cursor import check_delivered, shard_key
from trainpipes.state.foreign import refusal
from trainpipes.state.format import Position, Saved, read, render
from trainpipes.state.identity import named_difference, read_identity
from trainpipes.state.left_out_batches import KEY

__all__ = ["merge_states", "states_within"]

#: Shards that are missing, of which it is told whose they are.
MOST_NAMED = 4096
_MERGE = "merge_states([{}, ...])"


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state that any topology can load, from the states of all ranks, in any order.

    Where batches are counted (nothing filters, packs or mixes rows), one rank's state is that already; of a
    ``StatefulDataLoader`` with workers, this makes it of theirs.

    Args:
        states: of ``Loader``s, of pipelines, or of ``StatefulDataLoader``s, one a rank, saved after
            the same step.

    Returns:
        A state that is whole: with the cursor of each shard, where it has any.

    Raises:
        StateError: the states are of different runs or steps, a shard or worker comes twice, or one is
            missing: names them, and the ranks that have them.
    """
    if not isinstance(states, Iterable):
        raise StateError(
            f"merge_states(states) takes the states of all ranks, got {type(states).__name__}"
        )
    texts = [part for state in states for part in states_within(state)]
    if not texts:
        raise StateError("merge_states(states) takes the states of all ranks, got none")
    parts = []
    for number, text in enumerate(texts):
        try:
            parts.append(read(text))
        except StateError as error:
            raise StateError(f"state {number}: {error}") from None
    positions = [part.position for part in parts]
    _same(positions, "epoch")
    _same(positions, "num_shards")
    _same_pipeline(parts)
    first, checked = positions[0], all(part.has_checksum for part in parts)
    if not any(position.cursors for position in positions):
        _end_turns(positions)
        _same(positions, "m")
        return render(replace(first, extra={}), parts[0].pipeline, has_checksum=checked)
    m = max(position.m for position in positions)
    owner: dict[int, int] = {}
    for number, position in enumerate(positions):
        for shard in position.cursors:
            if shard in owner:
                raise StateError(
                    f"{shard_key(shard)}: is in state {owner[shard]} and in state {number}; merge one "
                    "state of each rank"
                )
            owner[shard] = number
    _complete(owner, first.num_shards, len(parts))
    cursors = {shard: positions[number].cursors[shard] for shard, number in sorted(owner.items())}
    for shard, cursor in cursors.items():
        try:
            check_delivered(shard, cursor, m, first.num_shards)
        except StateError as error:
            raise StateError(f"state {owner[shard]}: {error}{_own_ways(positions)}") from None
    whole = replace(first, m=m, cursors=cursors, extra={})
    return render(whole, parts[0].pipeline, has_checksum=checked)


def _same(positions: list[Position], key: str) -> None:
    first = getattr(positions[0], key)
    for number, position in enumerate(positions):
        found = getattr(position, key)
        if found != first:
            raise StateError(
                f"{key}: state 0 has {first}, state {number} has {found}; merge states that one run saved "
                "after the same step"
            )


def _end_turns(positions: list[Position]) -> None:
    """Let each state of a DataLoader's worker, which has no cursors, stand where its workers stand together.

    From ``origin`` on they take turns: worker w has the steps w, w + num_workers, …, of as many micro-batches
    each as there are ranks. A worker's m is that after its own last step.

    Raises:
        StateError: that of a worker is missing, or is of another step.
    """
    loaders: dict[tuple[int, int], list[tuple[int, Position]]] = {}
    for position in positions:
        turn = json.loads(position.extra.get("turn", "{}"))
        if turn.get("num_workers", 1) > 1:
            key = turn["origin"], turn["num_workers"]
            loaders.setdefault(key, []).append((turn["worker"], position))
    for (origin, count), loader in loaders.items():
        found = {worker: position.m for worker, position in loader}
        if len(found) < count:
            lost = next(worker for worker in range(count) if worker not in found)
            raise StateError(
                f"the state of worker {lost} of {count} is missing: merge the whole state of the "
                "StatefulDataLoader"
            )
        last = max(found, key=lambda worker: found[worker])
        m = found[last]
        ranks = m - found[(last - 1) % count]  # whose step was the one before
        steps = (m - origin) // max(1, ranks)
        for worker, position in loader:
            turns = -(-(steps - worker) // count) if steps > worker else 0
            due = origin + ((turns - 1) * count + worker + 1) * ranks if turns else origin
            if position.m != due:
                raise StateError(
                    f"m: worker {worker} of {count} has {position.m}, and to fit the other workers "
                    f"it must have {due}; "
                    "merge the whole state of a StatefulDataLoader, as it was saved"
                )
            position.m = m


def _same_pipeline(parts: list[Saved]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.position.sizes != first.position.sizes:
            raise StateError(
                f"batch_sizes: state {number} and state 0 differ; merge states of one run"
            )
        if part.pipeline == first.pipeline:
            continue
        first.check_like(part.pipeline)
        part.check_like(first.pipeline)
        (before, notes), (now, own) = read_identity(first.pipeline), read_identity(part.pipeline)
        if notes.get(KEY) != own.get(KEY):
            raise StateError(
                f"{KEY}: state 0 leaves out {shown(notes.get(KEY))}, state {number} {shown(own.get(KEY))}; "
                "give Loader(skip_batches) the same list on every rank"
            )
        found = named_difference(before, now)
        if found is not None:
            path, old, new = found
            raise StateError(
                f"{cut(path)}: state 0 has {shown(old)}, state {number} has {shown(new)}; merge states of "
                "one run"
            )


def _own_ways(positions: list[Position]) -> str:
    """What else may be the matter with states of a DataLoader's workers."""
    turns = [position.extra.get("turn") for position in positions]
    if not any(turn and json.loads(turn)["num_workers"] > 1 for turn in turns):
        return ""
    return (
        ". Or one worker's rows ended before the others', and their states no longer fit together: "
        "load the state into a StatefulDataLoader with as many workers, or use trainpipes.Loader"
    )


def _complete(there: Collection[int], num_shards: int, parts: int) -> None:
    count = num_shards - len(there)
    if not count:
        return
    missing = list(islice((s for s in range(num_shards) if s not in there), MOST_NAMED))
    ranks = ""
    for world in range(parts + 1, num_shards + 1) if count == len(missing) else ():
        if num_shards % world:
            continue
        lost = {s % world for s in missing}
        if count == len(lost) * num_shards // world and world - len(lost) <= parts:
            ranks = f", those of rank{'s' * (len(lost) > 1)} {shown(sorted(lost))} of {world}"
            break
    raise StateError(
        f"the positions of shards {shown(missing)} are missing{ranks}: merge the states of all "
        "ranks, or save "
        "with torch.distributed.checkpoint, or with loader.gather_state() on all ranks"
    )


def states_within(state: Any) -> list[Mapping[str, Any]]:
    """Our states in a state of a ``StatefulDataLoader``; any other as it is.

    Raises:
        StateError: it holds none, or was taken between two snapshots.
    """
    if not isinstance(state, Mapping):
        raise refusal(state, _MERGE)
    if "_snapshot" in state:
        late = state.get("_steps_since_snapshot", 0)
        if late:
            raise StateError(
                f"this StatefulDataLoader's state was taken {shown(late)} batches after its last "
                "snapshot, and holds only that older position: use snapshot_every_n_steps=1, "
                "or load it into a "
                "StatefulDataLoader with as many workers"
            )
        workers = _inside(state, "_snapshot", "_worker_snapshots")
        names = sorted(workers, key=str) if isinstance(workers, Mapping) else []
        found = [_inside(workers, n, "fetcher_state", "dataset_iter_state") for n in names] or [
            None
        ]
    elif "fetcher_state" in state:
        found = [_inside(state, "fetcher_state", "dataset_iter_state")]
    else:
        found = [state]
    for part in found:
        if not isinstance(part, Mapping) or "trainpipes" not in part:
            raise refusal(state, _MERGE)
    return found


def _inside(state: Any, *path: str) -> Any:
    """What stands at a path of keys, None if nothing does."""
    for key in path:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state
