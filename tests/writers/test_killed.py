"""A writer that is killed at any moment leaves whole files, and the next one ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from interpreters import python
from writers.killed_writers import CASES

TESTS = Path(__file__).parent.parent
WRITERS = [name for name in CASES if not name.startswith("repack")]
REPACKS = [name for name in CASES if name.startswith("repack")]


def check_killed(name: str, folder: Path, kills: int) -> None:
    program = TESTS / "writers" / "killed_writers.py"
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*python(), str(program), name, str(folder), str(kills)],
        env={**os.environ, "PYTHONPATH": path, "TRAINPIPES_CACHE": "off"},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["odd"] == []
    assert found["files"] >= 2
    assert found["steps"] > 6 * found["files"]
    assert found["kills"] == min(kills, found["steps"])


@pytest.mark.parametrize("name", WRITERS)
def test_killed_at_each_step_a_writer_goes_on_to_the_same_files(name: str, tmp_path: Path) -> None:
    check_killed(name, tmp_path, 10_000)


@pytest.mark.parametrize("name", REPACKS)
def test_killed_at_some_steps_repack_goes_on_to_the_same_files(name: str, tmp_path: Path) -> None:
    check_killed(name, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", REPACKS)
def test_killed_at_fifty_steps_too(name: str, tmp_path: Path) -> None:
    check_killed(name, tmp_path, 50)
