"""``Loader.full_state_dict``: the state of all ranks, as checkpoints that all share have it."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist

import trainpipes as tp
from frameworks.ranks import everyone
from frameworks.runs import rank
from trainpipes.state.merge import gather


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counted", [False, True])
def test_a_rank_that_saves_alone_is_told_so_where_batches_are_not_counted(counted: bool) -> None:
    dist.init_process_group("gloo")
    rows = tp.from_dataset(range(200)).sharding_filter(num_shards=4)
    pipe = rows.batch(4) if counted else rows.filter(lambda row: row % 3 > 0).batch(4).repeat()
    loader = tp.Loader(pipe)
    list(islice(loader, 3))

    def told(timeout: float) -> Any:
        try:
            return loader.full_state_dict(timeout=timeout)["batches"]
        except tp.StateError as error:
            return str(error)

    if rank() == 0 and counted:
        assert told(1) == 6
    elif rank() == 0:  # it does not wait for ever
        assert told(1).startswith(
            "the state of all ranks is asked for by all of them after the same step, and rank 1 did not ask "
            "within 1 s, rank 0 did"
        )
    dist.barrier()
    assert [told(30) for _ in range(3)] == [6, 6, 6]
    list(islice(loader, 1 + rank()))  # one too many on the second
    first, second = everyone(told(30))
    assert (first, second) == (2, 4) if counted else first == second
    assert counted or "batches" in first


@pytest.mark.ranks(2)
def test_ranks_agree_whether_one_came_too_late() -> None:
    dist.init_process_group("gloo")
    for number in range(20):
        dist.barrier()
        if rank():
            time.sleep(0.19 + 0.002 * number)  # as the time of the other is over
        try:
            found = gather((number, rank()), (0, 1), 0.2, "it")
        except tp.StateError:
            found = None
        first, second = everyone(found)
        assert first == second
        assert found is None or list(map(tuple, found)) == [(number, 0), (number, 1)]
    assert list(map(tuple, gather(("last", rank()), (0, 1), 30, "it"))) == [
        ("last", 0),
        ("last", 1),
    ]
