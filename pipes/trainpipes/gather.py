"""One value of each rank, brought to all of them, within a time limit.

Through the key-value store that ``torch.distributed`` was started with: no group has to be made for it, it
works beside any backend and for tensors on any device, and a rank that calls alone gets an error when the
time is over, where a collective would wait for ever.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import StateError

__all__ = ["TIMEOUT", "gather"]

#: Seconds that a rank waits for the others.
TIMEOUT = 300.0
#: Seconds between two looks for a signal such as Ctrl-C, or for what has come.
TICK = timedelta(seconds=1)

#: How often these ranks have gathered, of the world at hand.
_calls: dict[tuple[int, ...], int] = {}
_world: list[Any] = []


def gather(value: Any, ranks: tuple[int, ...], timeout: float, what: str) -> list[Any]:
    """The values of some ranks, in their order. Each of them calls this, as often as the others.

    Args:
        value: this rank's; it has to pickle.
        ranks: global ranks that gather, with this one.
        timeout: seconds to wait for the others.
        what: is gathered, for an error.

    Raises:
        StateError: a rank did not come in time. No rank has gathered then: the next call is counted as
            if this one had not been.
    """
    if not _world or _world[0] is not dist.group.WORLD:
        _world[:] = [dist.group.WORLD]
        _calls.clear()
    call, own = _calls.get(ranks, 0), dist.get_rank()
    store = PrefixStore("trainpipes/gather/" + "-".join(map(str, ranks)), _get_default_store())
    store.set(f"{call}/{own}", pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
    missing = _wait(store, [f"{call}/{rank}" for rank in ranks], timeout)
    if missing:
        store.delete_key(f"{call}/{own}")
        late = [ranks[place] for place in missing]
        raise StateError(
            f"{what} of all ranks is asked for by all of them after the same step, and rank"
            f"{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not ask within {timeout:g} s, "
            f"rank {own} did: call it on every rank; a checkpoint that one rank saves alone, on an "
            "exception, cannot have it"
        )
    _calls[ranks] = call + 1
    if call:
        store.delete_key(f"{call - 1}/{own}")  # all have it, since they have come to this call
    return [pickle.loads(store.get(f"{call}/{rank}")) for rank in ranks]


def _wait(store: Any, keys: list[str], timeout: float) -> list[int]:
    """Wait for keys; the places of those that have not come in time."""
    end = monotonic() + timeout
    while True:
        left = end - monotonic()
        try:
            store.wait(keys, min(TICK, timedelta(seconds=max(left, 0.001))))
        except dist.DistStoreError:
            if left > 0:
                continue
            return [place for place, key in enumerate(keys) if not store.check([key])]
        return []
