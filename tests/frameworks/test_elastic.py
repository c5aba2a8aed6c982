"""docs/examples/elastic.py under ``torchrun`` whose nodes come and go: one sequence, whatever happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frameworks.example import EXAMPLES, example
from frameworks.ranks import free_port
from launch import Launch
from trainpipes.testing import digest

SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def trained(launch: Launch) -> list[tuple[int, int, int, str]]:
    """What the ranks of a node trained on, in order: step, number in the step, ranks, digest."""
    lines = re.findall(r"step (\d+), (\d+) on (\d+) ranks: ([0-9a-f]{16})", launch.said())
    return [(int(step), int(number), int(ranks), content) for step, number, ranks, content in lines]


def saved(folder: Path) -> list[int]:
    """The steps after which whole checkpoints were saved."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


@pytest.mark.timeout(600)
def test_a_node_is_lost_and_another_joins_and_the_run_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a node that joins waits for ever for the address of rank 0, which was told once (torch 2.13).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    rows, folder = tmp_path / "rows.parquet", tmp_path / "checkpoints"
    texts = [f"row {i} " + "and more " * (i % 7) for i in range(600)]
    pq.write_table(pa.table({"text": texts}), rows, row_group_size=50)
    meets = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    meets += ["--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    meets += ["--local-addr", "127.0.0.1"]

    def node(name: str) -> Launch:
        arguments = str(rows), str(folder), "100000"
        is_host = f"{SOON},is_host={int(name == 'first')}"  # of what all meet at
        options = [*meets, "--rdzv-conf", is_host]
        return Launch(EXAMPLES / "elastic.py", 1, tmp_path / name, *arguments, rendezvous=options)

    def trained_after_a_checkpoint(launch: Launch, ranks: int, step: int) -> Callable[[], bool]:
        def ready() -> bool:
            steps = [found[0] for found in trained(launch) if found[2] == ranks]
            whole = saved(folder)
            return bool(steps and whole) and whole[-1] > step and steps[-1] > whole[-1]

        return ready

    first, second = node("first"), node("second")
    launches = [first, second]
    try:
        second.kill_when(trained_after_a_checkpoint(second, 2, 0), seconds=200)
        lost_at = saved(folder)[-1]
        first.wait_until(trained_after_a_checkpoint(first, 1, lost_at), seconds=200)
        third = node("third")
        launches.append(third)
        third.wait_until(trained_after_a_checkpoint(third, 2, saved(folder)[-1]), seconds=200)
    finally:
        for launch in launches:
            launch.kill()

    script = example("elastic")
    count = script.MICRO_BATCHES
    found = [one for launch in launches for one in trained(launch)]
    last = max(step for step, *_ in found)
    whole = [digest(batch) for batch in islice(script.pipeline(str(rows)), count * (last + 1))]
    for step, number, ranks, content in found:
        assert content == whole[step * count + number], f"step {step}, {number} on {ranks} ranks"
    assert {(step, number) for step, number, *_ in found} >= {
        (step, number) for step in range(last) for number in range(count)
    }
    # Each start goes on right after a checkpoint, and not from the beginning.
    starts = [
        step
        for before, (step, _, ranks, _) in zip(
            [None, *trained(first)], trained(first), strict=False
        )
        if before is None or before[2] != ranks or before[0] > step
    ]
    assert starts[0] == 0
    assert len(starts) >= 3
    assert all(step >= lost_at and step % script.SAVE_EVERY == 0 for step in starts[1:])
