"""Which rank the environment says, and which replica a ``DistributedSampler`` is for where it is not said."""

from __future__ import annotations

import pytest
import torch.utils.data.distributed as td

import trainpipes as tp
from trainpipes import ConfigError
from trainpipes.samplers import DistributedSampler


@pytest.mark.parametrize(
    ("replicas", "rank", "expected"),
    [(None, None, (3, 1)), (4, None, (4, 1)), (None, 0, (3, 0)), (None, 2, (3, 2)), (5, 3, (5, 3))],
)  # fmt: skip
def test_what_is_left_out_is_the_processs_own(replicas, rank, expected, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ours = DistributedSampler(range(22), replicas, rank, shuffle=False)
    theirs = td.DistributedSampler(range(22), *expected, shuffle=False)  # type: ignore[arg-type, var-annotated]
    assert (list(ours), len(ours)) == (list(theirs), len(theirs))


def test_the_environment_is_asked_for_what_is_left_out_alone(monkeypatch):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(DistributedSampler(range(6), 3, 1, shuffle=False)) == [1, 4]
    for replicas, rank in ((3, None), (None, 1), (None, None)):
        with pytest.raises(ConfigError, match="RANK"):
            list(DistributedSampler(range(6), replicas, rank, shuffle=False))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_of_the_environment_reads_its_part(rank, monkeypatch):
    pipe = tp.from_dataset(range(18)).sharding_filter(3).batch(2)
    expected = list(pipe.distributed(rank=rank, world_size=3))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(pipe) == expected == [[n, n + 1] for n in range(6 * rank, 6 * rank + 6, 2)]
