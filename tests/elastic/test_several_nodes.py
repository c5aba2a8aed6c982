"""docs/nodes.md: a torchrun for each node, files in a folder of each, one checkpoint for all."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "ddp.py"
TRAINED = re.compile(r"^step (\d+), rank \d+ of (\d+): (\w+)$", re.MULTILINE)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(folder: Path, names: list[str], checkpoint: Path, steps: int) -> list[psutil.Popen]:
    """The command of the page on each node, which here are folders of one machine."""
    port, nodes = free_port(), []
    for number, name in enumerate(names):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names)),
            "--node-rank", str(number), "--nproc-per-node", "1",
            "--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT),
            "--files", "*.parquet", "--checkpoint", str(checkpoint), "--steps", str(steps),
        ]  # fmt: skip
        with (folder / f"{name}.log").open("wb") as log:
            nodes.append(
                psutil.Popen(
                    command, cwd=folder / name, stdout=log, stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )  # fmt: skip
    return nodes


def trained(folder: Path, names: list[str]) -> dict[int, set[str]]:
    """The batches of each step over all nodes."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        for step, ranks, digest in TRAINED.findall((folder / f"{name}.log").read_text()):
            assert int(ranks) == len(names)
            found[int(step)].add(digest)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_nodes_that_are_killed_goes_on_on_three_others(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e", "alone"]
    for name in names:
        (tmp_path / name).mkdir()
        for part in range(4):
            texts = [f"{part} {row} " + "x" * (row % 50) for row in range(3000)]
            file = tmp_path / name / f"{part}.parquet"
            pq.write_table(pa.table({"text": texts}), file, row_group_size=500)
    (alone,) = start(tmp_path, ["alone"], tmp_path / "alone.pt", 10)
    assert alone.wait(300) == 0
    expected = trained(tmp_path, ["alone"])
    assert [len(batches) for batches in expected.values()] == [24] * 10

    checkpoint = tmp_path / "run.pt"
    nodes = start(tmp_path, ["a", "b"], checkpoint, 1000)
    until = time.monotonic() + 300
    while len(trained(tmp_path, ["a", "b"])) < 5 and time.monotonic() < until:
        time.sleep(0.05)
    for node in nodes:
        for process in (*node.children(recursive=True), node):
            process.kill()
        node.wait()
    before = trained(tmp_path, ["a", "b"])

    for node in start(tmp_path, ["c", "d", "e"], checkpoint, max(before) + 3):
        assert node.wait(300) == 0
    after = trained(tmp_path, ["c", "d", "e"])
    assert min(after) in (max(before), max(before) + 1)
    whole = {step: found for step, found in before.items() if step < max(before)}
    for step, batches in {**whole, **after}.items():
        if step in expected:
            assert batches == expected[step], step
    assert len(after) in (3, 4)
