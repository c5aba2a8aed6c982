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

from trainpipes.cursor import check_delivered, shard_key
from trainpipes.errors import StateError
from trainpipes.identity import named_difference, read_identity
from trainpipes.shown import cut, shown
from trainpipes.state import Position, Saved, read, render

__all__ = ["merge_states", "states_within"]

#: Shards that are missing, of which it is told whose they are.
MOST_NAMED = 4096
_COMMON = ("trainpipes", "epoch", "m", "num_shards", "pipeline")


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
    first = positions[0]
    for key in ("epoch", "num_shards"):
        for number, position in enumerate(positions):
            if getattr(position, key) != getattr(first, key):
                raise StateError(
                    f"{key}: state 0 has {getattr(first, key)}, state {number} has "
                    f"{getattr(position, key)}; merge states that one run saved after the same step"
                )
    _same_pipeline(parts)
    checked = all(part.has_checksum for part in parts)
    if not any(position.cursors for position in positions):
        whole = replace(first, m=_common_m(positions), extra={})
        return render(whole, parts[0].pipeline, has_checksum=checked)
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


def _common_m(positions: list[Position]) -> int:
    """Where all ranks stand, by states without cursors.

    Raises:
        StateError: they stand at different steps, or that of a worker is missing.
    """
    workers: dict[tuple[int, int], dict[int, int]] = {}
    found: dict[str, int] = {}
    for number, position in enumerate(positions):
        turn = json.loads(position.extra.get("turn", "{}"))
        if turn.get("num_workers", 1) == 1:
            found[f"state {number}"] = position.m
            continue
        rank = workers.setdefault((turn["origin"], turn["num_workers"]), {})
        own = rank.setdefault(turn["worker"], position.m)
        _same_m(f"worker {turn['worker']} of one rank", own, "of another one", position.m)
    for (origin, count), rank in workers.items():
        found[f"{count} workers from m = {origin} on"] = _end_of_turns(origin, count, rank)
    (first, m), *others = found.items()
    for other, its in others:
        _same_m(first, m, other, its)
    return m


def _same_m(first: str, m: int, other: str, its: int) -> None:
    if m != its:
        raise StateError(
            f"m: {first} has {m}, {other} has {its}; merge states that one run saved after the same step"
        )


def _end_of_turns(origin: int, count: int, rank: dict[int, int]) -> int:
    """Where the workers of a rank stand together, by the m of each after its own last batch.

    From ``origin`` on they take turns: worker w has the steps w, w + count, …, each of as many
    micro-batches as there are ranks.
    """
    missing = sorted(set(range(count)) - rank.keys())
    if missing:
        raise StateError(
            f"the states of workers {shown(missing)} of {count} are missing: merge the whole state of the "
            "StatefulDataLoader"
        )
    last, m = max(rank.items(), key=lambda item: item[1])
    ranks = m - rank[(last - 1) % count]  # the worker before had the step before
    steps = (m - origin) // max(1, ranks)
    for worker in range(count):
        turns = -(-(steps - worker) // count) if steps > worker else 0
        due = origin + ((turns - 1) * count + worker + 1) * ranks if turns else origin
        if rank[worker] != due:
            raise StateError(
                f"m: worker {worker} of {count} has {rank[worker]}, and by the other workers it has "
                f"{due}; merge the whole state of a StatefulDataLoader, as it was saved"
            )
    return m


def _same_pipeline(parts: list[Saved]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.position.sizes != first.position.sizes:
            raise StateError(
                f"batch_sizes: state {number} has others than state 0; merge states of one run"
            )
        if part.pipeline == first.pipeline:
            continue
        first.check_like(part.pipeline)
        part.check_like(first.pipeline)
        found = named_difference(read_identity(first.pipeline)[0], read_identity(part.pipeline)[0])
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
        ". Or a shard has ended in the middle of an epoch, past which workers of a DataLoader get out of "
        "step: load the state into a StatefulDataLoader with as many workers, or use trainpipes.Loader"
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
        f"the cursors of shards {shown(missing)} are missing{ranks}: merge the states of all ranks, or save "
        "with torch.distributed.checkpoint, or with loader.gather_state() on all ranks"
    )


def states_within(state: Any) -> list[Mapping[str, Any]]:
    """Our states in a state of a ``StatefulDataLoader``; any other as it is.

    Raises:
        StateError: it holds none, or was taken between two snapshots.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state is the dict that state_dict() gave, got {type(state).__name__}")
    if "_snapshot" in state:
        late = state.get("_steps_since_snapshot", 0)
        if late:
            raise StateError(
                f"this StatefulDataLoader's state was taken {shown(late)} batches after its last snapshot, "
                "and holds no position for now: use snapshot_every_n_steps=1, or load it into a "
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
        if not isinstance(part, Mapping) or any(key not in part for key in _COMMON):
            own = part if isinstance(part, Mapping) else state
            keys = ", ".join(map(shown, list(own)[:4])) or "no keys"
            raise StateError(
                f"not a state of trainpipes: it lacks some of {', '.join(_COMMON)} (found {keys}); load "
                "what state_dict() gave, as it was"
            )
    return found


def _inside(state: Any, *path: str) -> Any:
    """What stands at a path of keys, None if nothing does."""
    for key in path:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state
