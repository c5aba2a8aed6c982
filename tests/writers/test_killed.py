"""A writer that is killed at any moment leaves whole files, and the next one ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from interpreters import python
from writers.killed_writers import PIPES

TESTS = Path(__file__).parent.parent
CASES = [("counted", format) for format in ("parquet", "arrow", "json")]
CASES += [(name, "arrow") for name in PIPES if name != "counted"]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_a_killed_writer_goes_on_to_the_same_files(name: str, format: str, tmp_path: Path) -> None:
    program = TESTS / "writers" / "killed_writers.py"
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*python(), str(program), name, format, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "TRAINPIPES_CACHE": "off"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["odd"] == []
    assert found["files"] >= 2
    assert found["kills"] > 6 * found["files"]
