"""One value of each rank, brought to all of them, within a time limit.

Through the key-value store that ``torch.distributed`` was started with: no group has to be made for it, it
works beside any backend and for tensors on any device, and a rank that calls alone gets an error when the
time is over, where a collective would wait for ever.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trainpipes.errors import StateError

#: Seconds that a rank waits for the others.
TIMEOUT = 300.0
#: Seconds between two looks for a signal such as Ctrl-C, or for what has come.
TICK = timedelta(seconds=1)
#: What is taken from the count of those who have come by one that gives up: more than there are ranks.
GIVEN_UP = 1 << 40
#: What was decided of an attempt.
ALL_CAME, FAILED = b"all came", b"failed"

#: How often these ranks have gathered, of the world at hand, and the keys of the last time.
_calls: dict[tuple[int, ...], tuple[int, str]] = {}
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
    (call, before), own = _calls.get(ranks, (0, "")), dist.get_rank()
    store = PrefixStore(
        "trainpipes/state/gather/" + "-".join(map(str, ranks)), _get_default_store()
    )
    place, came = "", 0
    for attempt in count():  # those before it have failed
        place = f"{call}.{attempt}"
        store.set(f"{place}/{own}", pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
        came = store.add(f"{place}/came", 1)
        if came > 0:
            break
        store.delete_key(f"{place}/{own}")
    if came == len(ranks):
        store.set(f"{place}/decision", ALL_CAME.decode())
    elif _decision(store, place, len(ranks), timeout) == FAILED:
        late = [str(rank) for rank in ranks if not store.check([f"{place}/{rank}"])]
        store.delete_key(f"{place}/{own}")
        raise StateError(
            f"{what} of all ranks is asked for by all of them after the same step, and rank"
            f"{'s' if len(late) > 1 else ''} {', '.join(late)} did not ask within {timeout:g} s, rank {own} "
            "did: call it on every rank; a checkpoint that one rank saves alone, on an exception, cannot "
            "have it"
        )
    _calls[ranks] = call + 1, place
    if before:  # all have it, since they have come to this call
        for key in (own, "came", "decision"):
            store.delete_key(f"{before}/{key}")
    return [pickle.loads(store.get(f"{place}/{rank}")) for rank in ranks]


def _decision(store: Any, place: str, ranks: int, timeout: float) -> bytes:
    """Wait for what is decided: by the last rank that comes, or by the first that gives up. The count says
    which was first, so that all ranks get the same answer."""
    end = monotonic() + timeout
    while (left := end - monotonic()) > 0:
        try:
            store.wait([f"{place}/decision"], min(TICK, timedelta(seconds=max(left, 0.001))))
        except dist.DistStoreError:
            continue
        break
    else:
        came = store.add(f"{place}/came", -GIVEN_UP) + GIVEN_UP
        if came > 0:  # no other one gave up before
            store.set(f"{place}/decision", (ALL_CAME if came == ranks else FAILED).decode())
    found: bytes = store.get(f"{place}/decision")  # it is there, or comes at once
    return found
