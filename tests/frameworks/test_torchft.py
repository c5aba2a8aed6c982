"""torchft: replica groups that go and come back take the one sequence of micro-batches together."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
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
from trainpipes.integrations.torchft import ReplicaLoader
from trainpipes.testing import digest


class Job:
    """What groups of torchft agree upon, without torchft: who takes part, and what was committed."""

    def __init__(self) -> None:
        self.committed = 0
        self.present: list[FakeManager] = []
        self.state: Callable[[], Any] | None = None

    def begin(self, present: list[FakeManager], healthy: FakeManager) -> None:
        for manager in present:
            if manager is not healthy and manager.committed != healthy.committed:
                manager.committed = healthy.committed
                manager.load(healthy.state())
        self.present = present


class FakeManager:
    """As much of a ``torchft.Manager`` as is asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.committed = 0

    def register_state_dict_fn(self, key: str, load: Any, state: Any) -> None:
        self.load, self.state = load, state

    def batches_committed(self) -> int:
        return self.committed

    def participating_rank(self) -> int | None:
        return self.job.present.index(self) if self in self.job.present else None

    def num_participants(self) -> int:
        return len(self.job.present)

    def is_participating(self) -> bool:
        return self in self.job.present


def pipeline(num_shards: int = 12) -> tp.Pipeline:
    rows = tp.from_dataset(range(203)).sharding_filter(num_shards).shuffle(50, seed=0)
    return rows.batch(3).repeat()


@pytest.mark.parametrize(("ranks", "per_step"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_groups_that_come_and_go_commit_each_micro_batch_once(ranks: int, per_step: int) -> None:
    drawn, job = random.Random(0), Job()
    pipes = [pipeline(24).distributed(rank=rank, world_size=ranks) for rank in range(ranks)]
    numbers: list[int] = []
    batches: dict[int, Any] = {}

    def group() -> tuple[FakeManager, list[ReplicaLoader]]:
        manager = FakeManager(job)
        loaders = [
            ReplicaLoader(pipe, manager, groups=range(1, 5), per_step=per_step) for pipe in pipes
        ]
        return manager, loaders

    groups = [group()]
    for _ in range(60):
        if drawn.random() < 0.2 and len(groups) > 1:
            groups.pop(drawn.randrange(len(groups)))
        if drawn.random() < 0.2 and len(groups) < 4:
            groups.append(group())  # it heals from one that is there
        healthy = max((manager for manager, _ in groups), key=lambda manager: manager.committed)
        present = [manager for manager, _ in groups]
        for manager, loaders in groups:
            manager.load = lambda state, loaders=loaders: [
                one.load_state_dict(state) for one in loaders
            ]
        job.begin(present, healthy)
        taken: dict[int, Any] = {}
        for _, loaders in groups:
            for loader in loaders:
                for batch in loader.micro_batches():
                    assert loader.number is not None
                    assert loader.number not in taken
                    taken[loader.number] = batch
        if drawn.random() < 0.8:
            for manager in present:
                manager.committed += len(present)
            numbers += sorted(taken)
            batches.update(taken)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 80
    sequence = list(islice(pipeline(24), len(numbers)))
    assert [batches[number] for number in numbers] == sequence


def test_a_checkpoint_goes_on_with_another_number_of_groups_and_after_a_plain_run() -> None:
    sequence = list(islice(pipeline(), 20))
    loader = tp.Loader(pipeline())
    for _ in zip(range(5), loader, strict=False):
        state = loader.state_dict()
    job = Job()
    managers = [FakeManager(job), FakeManager(job)]
    data = [ReplicaLoader(pipeline(), manager, groups=[1, 2]) for manager in managers]
    for one in data:
        one.load_state_dict(state)
    job.present = managers
    assert [list(one.micro_batches()) for one in data] == [[sequence[5]], [sequence[6]]]
    for manager in managers:
        manager.committed = 2
    saved = data[1].state_dict()

    alone = FakeManager(Job())
    resumed = ReplicaLoader(pipeline(), alone, groups=[1, 2])
    resumed.load_state_dict(saved)
    alone.committed, alone.job.present = 2, [alone]
    assert list(resumed.micro_batches()) == [sequence[7]]
    assert resumed.number == 7


def test_a_spare_gets_a_batch_that_counts_for_nothing() -> None:
    job = Job()
    manager, spare = FakeManager(job), FakeManager(job)
    job.present = [manager]
    data = [ReplicaLoader(pipeline(), one, groups=[1, 2]) for one in (manager, spare)]
    assert list(data[0].micro_batches()) == list(data[1].micro_batches())


def test_what_would_lose_batches_is_refused_in_one_sentence() -> None:
    def refused(pipe: Any, manager: Any = None, **options: Any) -> str:
        with pytest.raises(tp.TrainpipesError) as caught:
            ReplicaLoader(
                pipe,
                FakeManager(Job()) if manager is None else manager,
                **{"groups": [1], **options},
            )
        return str(caught.value)

    ends = tp.from_dataset(range(9)).batch(3)
    assert "add .repeat() after .batch()" in refused(ends)
    assert "counted" in refused(ends.filter(len).repeat())
    assert "num_shards=60" in refused(pipeline(), groups=range(1, 6))
    of_two = pipeline().distributed(rank=0, world_size=2)
    assert "of 2 ranks" in refused(of_two, groups=[1, 4])
    for groups in ([], 3, "ab", [0], [True]):
        assert "ReplicaLoader(groups) is" in refused(pipeline(), groups=groups)
    assert "ReplicaLoader(per_step)" in refused(pipeline(), per_step=0)
    assert "takes a trainpipes Pipeline" in refused([1])
    assert "torchft.Manager, got 'x'" in refused(pipeline(), "x")

    job = Job()
    manager = FakeManager(job)
    data = ReplicaLoader(pipeline(), manager, groups=[1])
    with pytest.raises(tp.ConfigError, match=r"manager.start_quorum\(\), before micro_batches\(\)"):
        data.micro_batches()
    job.present = [manager]
    manager.is_participating = lambda: False  # type: ignore[method-assign]
    with pytest.raises(tp.ConfigError, match=r"write Manager\(use_async_quorum=False\)"):
        data.micro_batches()
    job.present = [manager, *(FakeManager(job) for _ in range(4))]
    del manager.is_participating  # type: ignore[method-assign]
    with pytest.raises(tp.TopologyError, match="5 groups of 1 ranks take part"):
        data.micro_batches()
    for state in ({}, [1], {"batches_committed": 1}):
        with pytest.raises(tp.StateError, match=r"not what ReplicaLoader\.state_dict"):
            data.load_state_dict(state)  # type: ignore[arg-type]
    other = ReplicaLoader(
        tp.from_dataset(range(203)).sharding_filter(12).shuffle(50, seed=1).batch(3).repeat(),
        FakeManager(Job()),
        groups=[1],
    )
    with pytest.raises(tp.StateError, match="stages/shuffle/seed: saved 0, now 1"):
        other.load_state_dict(data.state_dict())


# With torchft itself


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
