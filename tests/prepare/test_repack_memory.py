"""``repack`` of some 2 GB takes less than 1 GB of memory, with Python and all packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepare.repack_memory import CASES

TESTS = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, "shuffled") for name in CASES), ("many row groups", "once"), ("tiny rows", "sorted"),
     ("tiny rows", "once")],
)  # fmt: skip
def test_two_gigabytes_take_less_than_one_of_memory(
    name: str, options: str, tmp_path: Path
) -> None:
    if options != "shuffled":
        pytest.importorskip("duckdb")
    program = TESTS / "prepare" / "repack_memory.py"
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), name, options, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_mb"] < 1000
    assert found["rows"] in (3_350_000, 2048, 10_000_000)
