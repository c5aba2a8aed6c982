"""``merge_states``: one state for all shards from the states of all ranks or workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trainpipes.errors import StateError
from trainpipes.state import FORMAT, check_cursor, named_difference, read_identity, shard_key

__all__ = ["merge_states", "states_within"]

_COMMON = ("trainpipes", "epoch", "m", "num_shards", "pipeline")


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state that any topology can load, from the states of all ranks, in any order.

    Args:
        states: of ``Loader``s, of pipelines, or of ``StatefulDataLoader``s, one a rank, saved after
            the same step.

    Returns:
        A state with the cursor of each shard.

    Raises:
        StateError: the states are of different runs or steps, a shard comes twice, or one is
            missing: names them, and the ranks that have them.
    """
    parts = [part for state in states for part in states_within(state)]
    if not parts:
        raise StateError("merge_states(states) takes the states of all ranks, got none")
    first = parts[0]
    merged: dict[str, Any] = {"trainpipes": FORMAT}
    for key in ("epoch", "num_shards"):
        merged[key] = first[key]
        for number, part in enumerate(parts):
            if part[key] != first[key]:
                raise StateError(
                    f"{key}: state 0 has {first[key]}, state {number} has {part[key]}; merge states that "
                    "one run saved after the same step"
                )
    _same_pipeline(parts)
    m = max(part["m"] for part in parts)
    owner: dict[str, int] = {}
    shards: dict[str, str] = {}
    for number, part in enumerate(parts):
        for key in part:
            if not key.startswith("shard-"):
                continue
            if key in owner:
                raise StateError(
                    f"{key}: is in state {owner[key]} and in state {number}; merge one state of each rank"
                )
            owner[key] = number
            shards[key] = part[key]
    _complete(shards, merged["num_shards"], len(parts))
    for key in sorted(shards):
        shard = int(key.removeprefix("shard-"))
        try:
            check_cursor(key, shards[key], shard, m, merged["num_shards"])
        except StateError as error:
            raise StateError(f"state {owner[key]}: {error}{_own_ways(parts)}") from None
    sizes = {key: first[key] for key in ("batch_sizes",) if key in first}
    return {
        "trainpipes": FORMAT,
        "epoch": merged["epoch"],
        "m": m,
        "num_shards": merged["num_shards"],
        "pipeline": first["pipeline"],
        **sizes,
        **{key: shards[key] for key in sorted(shards)},
    }


def _same_pipeline(parts: list[Mapping[str, Any]]) -> None:
    first = parts[0]["pipeline"]
    for number, part in enumerate(parts):
        if part["pipeline"] == first:
            continue
        found = named_difference(read_identity(first), read_identity(part["pipeline"]))
        if found is not None:
            path, old, new = found
            raise StateError(
                f"{path}: state 0 has {old!r}, state {number} has {new!r}; merge states of one run"
            )


def _own_ways(parts: list[Mapping[str, Any]]) -> str:
    """What else may be the matter with states of a DataLoader's workers."""
    if not any(json.loads(part.get("turn", "{}")).get("num_workers", 1) > 1 for part in parts):
        return ""
    return (
        ". Or a shard has ended in the middle of an epoch, past which workers of a DataLoader get out of "
        "step: load the state into a StatefulDataLoader with as many workers, or use trainpipes.Loader"
    )


def _complete(shards: Mapping[str, str], num_shards: int, parts: int) -> None:
    missing = [s for s in range(num_shards) if shard_key(s) not in shards]
    if not missing:
        return
    ranks = ""
    for world in range(parts + 1, num_shards + 1):
        lost = {s % world for s in missing}
        whole = all(s in missing for s in range(num_shards) if s % world in lost)
        if num_shards % world == 0 and whole and world - len(lost) <= parts:
            ranks = f", those of rank{'s' * (len(lost) > 1)} {sorted(lost)} of {world}"
            break
    raise StateError(
        f"the cursors of shards {missing} are missing{ranks}: merge the states of all ranks, or save "
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
                f"this StatefulDataLoader's state was taken {late} batches after its last snapshot, and "
                "holds no position for now: use snapshot_every_n_steps=1, or load it into a "
                "StatefulDataLoader with as many workers"
            )
        workers = _inside(state, "_snapshot", "_worker_snapshots")
        names = sorted(workers) if isinstance(workers, Mapping) else []
        found = [_inside(workers, n, "fetcher_state", "dataset_iter_state") for n in names] or [
            None
        ]
    elif "fetcher_state" in state:
        found = [_inside(state, "fetcher_state", "dataset_iter_state")]
    else:
        found = [state]
    for part in found:
        if not isinstance(part, Mapping) or any(key not in part for key in _COMMON):
            shown = part if isinstance(part, Mapping) else state
            keys = ", ".join(map(repr, list(shown)[:4])) or "no keys"
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
