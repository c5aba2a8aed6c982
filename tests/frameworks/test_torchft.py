"""torchft: replica groups that go and come back take the one sequence of micro-batches together."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

os.environ.setdefault("RUST_LOG", "warn")  # before it is imported
pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

import trainpipes as tp
from frameworks.example import example
from frameworks.ranks import Ranks, free_port
from trainpipes.testing import digest


class FakeManager:
    """As much of a ``torchft.Manager`` as is asked for."""

    def __init__(self, present: list[FakeManager]) -> None:
        self.present = present  # who takes part
        self.committed = 0

    def batches_committed(self) -> int:
        return self.committed

    def participating_rank(self) -> int | None:
        return self.present.index(self) if self in self.present else None

    def num_participants(self) -> int:
        return len(self.present)


def pipeline(num_shards: int = 12) -> tp.Pipeline:
    rows = tp.from_dataset(range(203)).sharding_filter(num_shards).shuffle(50, seed=0)
    return rows.batch(3).repeat()


@pytest.mark.parametrize(("ranks", "per_step"), [(1, 1), (2, 3)])
def test_groups_that_come_and_go_commit_each_batch_once(ranks: int, per_step: int) -> None:
    script, drawn = example("torchft_groups"), random.Random(0)
    present: list[FakeManager] = []
    script.MICRO_BATCHES = per_step
    numbers: list[int] = []
    batches: dict[int, Any] = {}

    def group() -> tuple[FakeManager, list[Any]]:
        manager = FakeManager(present)
        return manager, [
            script.SharedBatches(pipeline(24), manager, rank, ranks) for rank in range(ranks)
        ]

    groups = [group()]
    for _ in range(60):
        if drawn.random() < 0.2 and len(groups) > 1:
            groups.pop(drawn.randrange(len(groups)))
        if drawn.random() < 0.2 and len(groups) < 4:
            groups.append(group())  # it heals from one that is there
        present[:] = [manager for manager, _ in groups]
        most = max(manager.committed for manager in present)
        for manager in present:
            manager.committed = most
        taken: dict[int, Any] = {}
        for _, shared in groups:
            for one in shared:
                for batch in one.of_step():
                    assert one.number not in taken
                    taken[one.number] = batch
        if drawn.random() < 0.8:
            for manager in present:
                manager.committed += len(present)
            numbers += sorted(taken)
            batches.update(taken)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 80
    sequence = list(islice(pipeline(24), len(numbers)))
    assert [batches[number] for number in numbers] == sequence


def test_a_group_with_other_data_is_refused() -> None:
    script, manager = example("torchft_groups"), FakeManager([])
    data = script.SharedBatches(pipeline(), manager)
    other = tp.from_dataset(range(203)).sharding_filter(12).shuffle(50, seed=1).batch(3).repeat()
    data.check(data.state_at(0))
    with pytest.raises(tp.StateError, match="stages/shuffle/seed: saved 0, now 1"):
        script.SharedBatches(other, manager).check(data.state_at(0))


# With torchft itself


def take_part(name: int, lighthouse: str, rows: str) -> None:
    """A replica group of docs/examples/torchft_groups.py, of one process."""
    os.environ.update(GROUP=str(name), TORCHFT_LIGHTHOUSE=lighthouse)
    example("torchft_groups").main(rows, 100_000)


#: Step, groups, number, digest of the batch, and whether it was committed.
Step = tuple[int, int, int, str, bool]


def steps_of(group: Ranks) -> list[Step]:
    lines = re.findall(r"step (\d+), (\d+) groups: (\d+) (\w{16}) (committed|not)", group.said())
    return [(int(s), int(g), int(n), d, c == "committed") for s, g, n, d, c in lines]


@contextmanager
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind=f"127.0.0.1:{free_port()}",
        min_replicas=1,
        join_timeout_ms=300,
        heartbeat_timeout_ms=2000,
    )
    try:
        yield re.sub(r"//[^:]+:", "//127.0.0.1:", server.address())
    finally:
        server.shutdown()


@pytest.mark.timeout(580)
def test_a_killed_group_comes_back_and_all_take_each_batch_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    texts = [f"row {i} " + "and more " * (i % 7) for i in range(600)]
    pq.write_table(pa.table({"text": texts}), rows, row_group_size=50)
    started: list[Ranks] = []
    with lighthouse() as address:

        def group(name: int) -> Ranks:
            folder = tmp_path / f"group-{len(started)}"
            started.append(Ranks(take_part, 1, folder, name, address, str(rows)))
            return started[-1]

        def wait_for(group: Ranks, groups: int, after: int = -1) -> None:
            """Until a group has committed five steps with so many."""
            group.wait_until(
                lambda: (
                    sum(s > after and of == groups and c for s, of, _, _, c in steps_of(group)) >= 5
                )
            )

        first, second = group(0), group(1)
        try:
            wait_for(first, 2)
            second.kill()
            lost = steps_of(second)[-1][0]
            wait_for(first, 1, lost)
            third = group(1)  # in its place
            wait_for(first, 2, lost)
            wait_for(third, 2, lost)
        finally:
            for one in started:
                one.kill()

    script = example("torchft_groups")
    found = [steps_of(one) for one in started]
    whole = found[0]
    last = min(whole[-1][0], found[2][-1][0])
    expected = [
        digest(batch)
        for batch in islice(script.pipeline(str(rows)), max(n for _, _, n, _, _ in whole) + 4)
    ]
    by_step: dict[int, dict[int, str]] = {}
    groups_in: dict[int, int] = {}
    of_first = {step: groups for step, groups, _, _, done in whole if done}
    for steps in found:
        for step, groups, number, content, done in steps:
            if step == lost and of_first.get(step, groups) != groups:
                continue  # the group that was killed has committed it alone: its weights are gone
            assert content == expected[number]
            if done and step <= last:
                assert number not in by_step.setdefault(step, {})
                by_step[step][number] = content
                assert groups_in.setdefault(step, groups) == groups
    # The healthy group has gone through all steps; with those it says what each of them held.
    position = count()
    for step in sorted(groups_in):
        in_step = [next(position) for _ in range(groups_in[step])]
        assert set(by_step[step]) <= set(in_step)
        missing = set(in_step) - set(by_step[step])
        # A batch whose gradients came from the group that was killed right then, before it could say so.
        assert not missing or (step == lost + 1 and len(missing) == 1), step
    kinds = [groups_in[step] for step in sorted(groups_in)]
    assert {1, 2} <= set(kinds[:-1])
    assert found[2][0][0] > lost  # it did not begin anew
