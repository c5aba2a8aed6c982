"""``merge_states``: one state for all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import count, islice
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import StateError, cut, shown
from trainpipes.state.cursor import check_delivered, shard_key
from trainpipes.state.format import Position, Saved, named_difference, read, render
from trainpipes.state.work import is_work, merge_work

#: Most missing shards whose ranks are named.
MOST_NAMED = 4096


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that any number of ranks and workers can load.

    If batches are counted (no stage filters, packs or mixes rows), each rank's state is already
    whole.

    Args:
        states: of ``Loader``s or pipelines in any order, a state of each rank, saved after the same step; or
            of ``WorkQueue``s, saved at any time.

    Returns:
        One state with the cursors of all shards.

    Raises:
        StateError: the states are of different runs or steps, or a shard is missing.

    >>> import trainpipes as tp
    >>> pipe = tp.from_tensors(range(8)).batch(2)
    >>> tp.merge_states([pipe.state_dict()]) == pipe.state_dict()
    True
    """
    if not isinstance(states, Iterable) or isinstance(states, str | Mapping):
        got = type(states).__name__
        raise StateError(
            f"merge_states(states) must be a list of the states of all ranks, got {got}"
        )
    states = list(states)
    if any(map(is_work, states)):
        return merge_work(states)
    parts = []
    for number, state in enumerate(states):
        try:
            parts.append(read(state))
            parts[-1].position.require_all_workers()
        except StateError as error:
            raise StateError(f"state {number}: {error}") from None
    if not parts:
        raise StateError("merge_states(states) must be the states of all ranks, got none")
    positions = [part.position for part in parts]
    _same(positions, "pass_number", "epoch")
    _same(positions, "num_shards")
    _same_pipeline(parts)
    first = positions[0]
    if not any(position.cursors for position in positions):
        _same(positions, "m", "batches")
        return render(replace(first, extra=_files(positions)), parts[0].pipeline)
    m = max(position.m for position in positions)
    owner: dict[int, int] = {}
    for number, position in enumerate(positions):
        for shard, cursor in position.cursors.items():
            other = positions[owner.setdefault(shard, number)]
            if cursor != other.cursors[shard]:
                # Ranks that share a shard are at the same place in it, until they pass the turns of one
                # that has ended.
                raise StateError(
                    f"{shard_key(shard)}: state {owner[shard]} and state {number} differ; {_way(positions)}"
                )
    _complete(positions, owner)
    cursors = {shard: positions[number].cursors[shard] for shard, number in sorted(owner.items())}
    for shard, cursor in cursors.items():
        try:
            check_delivered(shard, cursor, m, first.num_shards)
        except StateError as error:
            said = f"state {owner[shard]}: {error}"
            if _has_ended(positions):  # in its turns, other shards of its rank give batches
                said = f"{shard_key(shard)}: state {owner[shard]} is of an earlier batch; {_way(positions)}"
            raise StateError(said) from None
    whole = replace(first, m=m, cursors=cursors, extra=_files(positions))
    return render(whole, parts[0].pipeline)


def _has_ended(positions: list[Position]) -> bool:
    return any("ended" in cursor for part in positions for cursor in part.cursors.values())


def _way(positions: list[Position]) -> str:
    way = "merge states that one run saved after the same step"
    if _has_ended(positions):
        way += (
            '; with tail="uneven", where batches are not counted, states do not merge once a shard has '
            "ended: load that of each rank on the same number of ranks"
        )
    return way


def _files(positions: list[Position]) -> dict[str, Any]:
    """The names of the files of an epoch, where folders grow: all ranks have the same."""
    files = [position.extra.get("files") for position in positions]
    if files.count(files[0]) < len(files):
        other = next(number for number, names in enumerate(files) if names != files[0])
        raise StateError(f"files: state 0 and state {other} differ; merge states of one run")
    return {} if files[0] is None else {"files": files[0]}


def _same(positions: list[Position], name: str, key: str | None = None) -> None:
    first = getattr(positions[0], name)
    for number, position in enumerate(positions):
        value = getattr(position, name)
        if value != first:
            raise StateError(
                f"{key or name}: state 0 has {first}, state {number} has {value}; merge states that one run "
                "saved after the same step"
            )


def _same_pipeline(parts: list[Saved]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.position.sizes != first.position.sizes:
            raise StateError(
                f"batch_sizes: state {number} and state 0 differ; merge states of one run"
            )
        if part.pipeline == first.pipeline:
            continue
        difference = named_difference(json.loads(first.pipeline), json.loads(part.pipeline))
        if difference is not None:
            path, old, new = difference
            raise StateError(
                f"{cut(path)}: state 0 has {shown(old)}, state {number} has {shown(new)}; merge states of "
                "one run"
            )


def _complete(positions: list[Position], there: Collection[int]) -> None:
    num_shards = positions[0].num_shards
    count = num_shards - len(there)
    if not count:
        return
    missing = list(islice((s for s in range(num_shards) if s not in there), MOST_NAMED))
    ranks, parts = "", len({frozenset(position.cursors) for position in positions})
    for world in range(parts + 1, num_shards + 1) if count == len(missing) else ():
        if num_shards % world:
            continue
        lost = {s % world for s in missing}
        if count == len(lost) * num_shards // world and world - len(lost) <= parts:
            ranks = f", those of rank{'s' * (len(lost) > 1)} {shown(sorted(lost))} of {world}"
            break
    twice = next((n for n, p in enumerate(positions) if p in positions[:n]), None)
    if twice is not None:
        ranks += f" (states {[positions.index(positions[twice]), twice]} are the same)"
    raise StateError(
        f"the positions of shards {shown(missing)} are missing{ranks}: merge the states of all ranks, or "
        "save with torch.distributed.checkpoint, or with loader.full_state_dict() on all ranks"
    )


#: Seconds that a rank waits for the others.
TIMEOUT = 300.0
#: How often Ctrl-C is looked for.
TICK = 1.0
#: A rank that gives up takes this from the count: more than there are ranks.
GIVEN_UP = 1 << 40
#: What was decided of an attempt.
ALL_CAME, FAILED = b"all came", b"failed"
#: How often these ranks have gathered in this world, and the keys of the last time.
_calls: dict[tuple[int, ...], tuple[int, str]] = {}
_world: list[Any] = []


def gather(value: Any, ranks: tuple[int, ...], timeout: float, subject: str) -> list[Any]:
    """The values of some ranks, in their order. A collective; ``value`` is of JSON's types.

    Raises:
        StateError: a rank did not come in time. The call does not count then.
    """
    if not _world or _world[0] is not dist.group.WORLD:
        _world[:] = [dist.group.WORLD]
        _calls.clear()
    (call, before), my_rank = _calls.get(ranks, (0, "")), dist.get_rank()
    members = "-".join(map(str, ranks))
    store = PrefixStore(f"trainpipes/state/gather/{members}", _get_default_store())
    place, came = "", 0
    for attempt in count():  # those before it have failed
        place = f"{call}.{attempt}"
        store.set(f"{place}/{my_rank}", json.dumps(value))
        came = store.add(f"{place}/came", 1)
        if came > 0:
            break
        store.delete_key(f"{place}/{my_rank}")
    if came == len(ranks):
        store.set(f"{place}/decision", ALL_CAME.decode())
    elif _decision(store, place, len(ranks), timeout) == FAILED:
        late = [str(rank) for rank in ranks if not store.check([f"{place}/{rank}"])]
        store.delete_key(f"{place}/{my_rank}")
        raise StateError(
            f"{subject} of all ranks is asked for by all of them after the same step, and rank"
            f"{'s' if len(late) > 1 else ''} {', '.join(late)} did not ask within {timeout:g} s, rank "
            f"{my_rank} did: call it on every rank; a checkpoint that one rank saves alone, on an "
            "exception, cannot have it"
        )
    _calls[ranks] = call + 1, place
    if before:  # all have it, since they have come to this call
        for key in (my_rank, "came", "decision"):
            store.delete_key(f"{before}/{key}")
    return [json.loads(store.get(f"{place}/{rank}")) for rank in ranks]


def _decision(store: Any, place: str, ranks: int, timeout: float) -> bytes:
    """Wait for the decision of the last rank that comes, or of the first that gives up."""
    end = monotonic() + timeout
    while (left := end - monotonic()) > 0:
        try:
            store.wait([f"{place}/decision"], timedelta(seconds=max(0.001, min(left, TICK))))
        except dist.DistStoreError:
            continue
        break
    else:
        came = store.add(f"{place}/came", -GIVEN_UP) + GIVEN_UP
        if came > 0:  # no other rank gave up before
            store.set(f"{place}/decision", (ALL_CAME if came == ranks else FAILED).decode())
    decision: bytes = store.get(f"{place}/decision")  # it is there, or comes at once
    return decision
