"""The scripts of docs/examples train on one sequence, killed and resumed on other ranks."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from itertools import islice
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from launch import Launch
from trainpipes.testing import digest

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"

#: What a gloo process of DistributedDataParallel says where it aborts at exit, its work done. So does
#: one without trainpipes.
TORCH_ABORTS = "terminate called without an active exception"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    texts = [f"row {i} " + "and more " * (i % 7) for i in range(600)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50)
    return path


def script(name: str) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    name: str, ranks: int, rows: Path, work: Path, steps: int, kill_after: int | None
) -> Launch:
    """Run a script to its end, or kill it once a step is saved."""
    option = {"ddp": "--checkpoint", "fsdp_checkpoint": "--checkpoints"}[name]
    options = ["--files", str(rows), option, str(work / "saved"), "--steps", str(steps)]
    launch = Launch(EXAMPLES / f"{name}.py", ranks, work / f"{ranks}-ranks", *options, trains=True)
    if kill_after is not None:
        launch.kill_when(lambda: f"step {kill_after} saved" in launch.said())
    elif launch.wait() != 0:
        assert TORCH_ABORTS in launch.said(), launch.said()
        assert f"step {steps} saved" in launch.said()
    return launch


def step_of(name: str, module: ModuleType, saved: Path) -> int:
    """The step after which a checkpoint was saved."""
    if name == "ddp":
        return int(torch.load(saved, weights_only=True)["step"])
    return int(module.last_complete(saved).name.removeprefix("step-"))


def trained_on(launch: Launch) -> dict[tuple[int, int], list[str]]:
    """Digests of what each (step, rank) trained on, in order."""
    found = defaultdict(list)
    for step, rank, content in re.findall(
        r"step (\d+), rank (\d+) of \d+: ([0-9a-f]{16})", launch.said()
    ):
        found[int(step), int(rank)].append(content)
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["ddp", "fsdp_checkpoint"])
def test_an_example_killed_on_two_ranks_goes_on_on_three(
    name: str, rows: Path, tmp_path: Path
) -> None:
    module = script(name)
    first = run(name, 2, rows, tmp_path, steps=10_000, kill_after=3)
    saved = step_of(name, module, tmp_path / "saved")
    assert saved >= 3
    then = run(name, 3, rows, tmp_path, steps=saved + 3, kill_after=None)
    in_turn = getattr(module, "GLOBAL_BATCH", 0) // getattr(module, "MICRO_BATCH", 1)
    whole = [digest(batch) for batch in islice(module.pipeline(str(rows)), 400)]
    m = 0
    for launch, ranks, steps in (
        (first, 2, range(1, saved + 1)),
        (then, 3, range(saved + 1, saved + 4)),
    ):
        found = trained_on(launch)
        for step in steps:
            count = in_turn or ranks  # batches of a step
            for rank in range(ranks):
                numbers = [n for n in range(m, m + count) if n % ranks == rank]
                assert found[step, rank] == [whole[n] for n in numbers], f"step {step}, rank {rank}"
            m += count
