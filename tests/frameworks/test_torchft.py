"""torchft: replica groups that go and come back take the one sequence of micro-batches together."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from frameworks.example import EXAMPLES, example
from frameworks.ranks import free_port
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


class Group:
    """A replica group of docs/examples/torchft_groups.py, of one process."""

    def __init__(self, name: int, lighthouse: str, output: Path, *arguments: str) -> None:
        environment = {
            **os.environ,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GROUP": str(name),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RUST_LOG": "warn",
        }
        self.output = output
        command = [sys.executable, str(EXAMPLES / "torchft_groups.py"), *arguments]
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def steps(self) -> list[tuple[int, int, int, str, bool]]:
        """Step, groups, number, digest of the batch, and whether it was committed."""
        lines = re.findall(r"step (\d+), (\d+) groups: (\d+) (\w{16}) (committed|not)", self.said())
        return [(int(s), int(g), int(n), d, c == "committed") for s, g, n, d, c in lines]

    def wait_until(self, ready: Callable[[], bool], seconds: float = 250) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)


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
    made: list[Group] = []
    with lighthouse() as address:

        def group(name: int) -> Group:
            made.append(Group(name, address, tmp_path / f"{len(made)}.txt", str(rows), "100000"))
            return made[-1]

        def together(one: Group, groups: int, steps: int, after: int = -1) -> Callable[[], bool]:
            def ready() -> bool:
                found = [step for step, of, _, _, done in one.steps() if done and of == groups]
                return sum(step > after for step in found) >= steps

            return ready

        first, second = group(0), group(1)
        try:
            first.wait_until(together(first, 2, 5))
            second.process.send_signal(signal.SIGKILL)
            second.process.wait()
            lost = second.steps()[-1][0]
            first.wait_until(together(first, 1, 5, lost))
            third = group(1)  # in its place
            first.wait_until(together(first, 2, 5, lost))
            third.wait_until(together(third, 2, 5, lost))
        finally:
            for one in made:
                one.process.kill()
                one.process.wait()

    script = example("torchft_groups")
    found = [one.steps() for one in made]
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
