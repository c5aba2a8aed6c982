"""A writer that is killed at any moment leaves whole files, and the next one ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreters import python
from writers.killed_writers import CASES

RANDOM = [*(f"counted, {format}" for format in ("parquet", "json", "arrow")), "memmap", "tokenize",
          "repack, shuffled"]  # fmt: skip


def check_killed(name: str, folder: Path, kills: int, how: str = "at steps", seed: int = 0) -> None:
    program = Path(__file__).parent / "killed_writers.py"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*python(), str(program), name, str(folder), str(kills), how, str(seed)],
        env={**os.environ, "PYTHONPATH": path, "TRAINPIPES_CACHE": "off"},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["odd"] == []
    assert found["files"] >= 2
    if how == "at steps":
        assert found["steps"] > 6 * found["files"]
        kills = min(kills, found["steps"])
    assert found["kills"] == kills


#: The others are killed where slow tests are run.
OFTEN = {"counted, json", "counted, parquet", "stream, arrow", "memmap", *[*CASES][10::2]}


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_killed_at_any_step_it_goes_on_to_the_same_files(name, tmp_path):
    kills = 8 if name == "counted, json" else 2
    check_killed(name, tmp_path, kills, seed=[*CASES].index(name))


def test_killed_at_random_moments_too(tmp_path):
    check_killed("tokenize", tmp_path, 3, "at random")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "at steps") for name in CASES), *((name, "at random") for name in RANDOM)],
)
def test_killed_fifty_times(name, how, tmp_path):
    check_killed(name, tmp_path, 50, how)
