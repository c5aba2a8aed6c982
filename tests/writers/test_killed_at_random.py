"""Processes end with the one that is killed, at any moment, and the same call goes on to the same files."""

from __future__ import annotations

import os
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interpreters import pid_of, python
from unfinished import contents

#: What is run and killed: a writer's name, how many processes, the folder of the rows, the output.
PROGRAM = """
import sys
import trainpipes as tp
from trainpipes.prepare import tokenize
from trainpipes.writers import Processes, Threads

if __name__ == "__main__":
    name, processes, rows, out = sys.argv[1:]
    workers = Threads(1) if processes == "1" else Processes(int(processes))
    pipe = tp.list_files(rows).read_parquet()
    if name == "tokenize":
        tokenize(pipe.select("text").tokenize("bytes"), out, executor=workers)
    elif name == "write_memmap":
        pipe.select("x", "ids").shuffle(500).write_memmap(out, rows_per_file=997, executor=workers)
    else:
        getattr(pipe.shuffle(500), name)(out, rows_per_file=997, executor=workers)
"""
FILES, ROWS = 8, 2000
MANY = [
    pytest.param(name, 15, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
    for name in ("write_parquet", "write_json", "tokenize")
]


@pytest.mark.parametrize(("name", "kills"), [("write_memmap", 1), *MANY])
def test_after_kills_the_files_are_those_of_one_that_was_not_killed(
    name: str, kills: int, tmp_path: Path
) -> None:
    rows, script, out = tmp_path / "in", tmp_path / "script.py", tmp_path / "out"
    rows.mkdir()
    draw = np.random.default_rng(1)
    for number in range(FILES):
        lists = [draw.integers(0, 99, n % 50).tolist() for n in range(ROWS)]
        texts = ["word " * (n % 90) for n in range(ROWS)]
        table = pa.table({"x": range(ROWS), "text": texts, "ids": lists})
        pq.write_table(table, rows / f"{number}.parquet", row_group_size=500)
    script.write_text(PROGRAM)

    def start(processes: int, out: Path) -> subprocess.Popen[bytes]:
        words = [*python(), str(script), name, str(processes), str(rows), str(out)]
        return subprocess.Popen(words, env={**os.environ, "TRAINPIPES_CACHE": "off"})

    assert start(1, tmp_path / "whole").wait() == 0
    expected = contents(tmp_path / "whole")
    for _ in range(kills):
        process = start(2, out)
        wait_for_files(out, random.randrange(1, FILES - 1), process)
        children = []
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            killed = psutil.Process(pid_of(process))
            children = killed.children(recursive=True)
            killed.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=20)[1]
        left = contents(out) if out.exists() else {}
        assert all(left[file] == expected[file] for file in left)
    assert start(1, out).wait() == 0
    assert contents(out) == expected


def wait_for_files(out: Path, files: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many files are noted as whole, and another one is in work; or the process has ended."""
    while process.poll() is None:
        noted = len(list((out / "_unfinished").glob("*.done.json")))
        if noted >= files and (list((out / "_unfinished").glob("*.part")) or not files):
            return
        time.sleep(0.002)
