"""Who writes in several processes is killed at drawn moments, and the same call ends with the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interpreters import python
from unfinished import contents

#: What is run and killed: a writer's name, how many processes, the folder of the rows, the output.
PROGRAM = """
import sys
import trainpipes as tp
from trainpipes.prepare import tokenize
from trainpipes.storage import Processes, Threads

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


def written(folder: Path, rows: int) -> str:
    """Files of so many rows."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(8):
        lists = [rng.integers(0, 99, n % 50).tolist() for n in range(rows // 8)]
        texts = ["word " * (n % 90) for n in range(rows // 8)]
        table = pa.table({"x": range(rows // 8), "text": texts, "ids": lists})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=500)
    return str(folder)


def start(script: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRAINPIPES_CACHE": "off"}
    return subprocess.Popen([sys.executable, str(script), *words], env=environment)


def test_after_a_kill_the_files_are_those_of_one_that_was_not_killed(tmp_path: Path) -> None:
    check_kills("write_memmap", 1, tmp_path)


def run(script: Path, *words: str) -> None:
    """Without being killed."""
    environment = {**os.environ, "TRAINPIPES_CACHE": "off"}
    subprocess.run([*python(), str(script), *words], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["write_parquet", "write_json", "write_memmap", "tokenize"])
def test_after_many_kills_too(name: str, tmp_path: Path) -> None:
    check_kills(name, 15, tmp_path)


def check_kills(name: str, kills: int, folder: Path) -> None:
    rows = written(folder / "in", 16_000)
    script = folder / "script.py"
    script.write_text(PROGRAM)
    whole, out = folder / "whole", folder / "out"
    run(script, name, "1", rows, str(whole))
    rng, expected, done = random.Random(name), contents(whole), 0
    tasks = len({file.partition(".")[0] for file in expected})
    for _ in range(3 * kills):
        process = start(script, name, "2", rows, str(out))
        wait_for_files(out, rng.randrange(tasks), process)
        time.sleep(rng.uniform(0, 0.02))
        children = []
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        ended = process.wait()
        assert not psutil.wait_procs(children, timeout=20)[
            1
        ]  # they end with the one that is killed
        left = contents(out) if out.exists() else {}
        noted = {path.name.partition(".")[0] for path in (out / "_unfinished").glob("*.done.json")}
        for file in left:
            if "_manifest.json" in left or file.partition(".")[0] in noted:
                assert left[file] == expected[file], file
        if ended == 0:
            shutil.rmtree(out)
            continue
        done += 1
        if done == kills:
            break
    assert done
    run(script, name, "2", rows, str(out))
    assert contents(out) == expected


def wait_for_files(out: Path, files: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many files are noted as whole, and another one is in work; or the process has ended."""
    while process.poll() is None:
        noted = len(list((out / "_unfinished").glob("*.done.json")))
        if noted >= files and (list((out / "_unfinished").glob("*.part")) or not files):
            return
        time.sleep(0.002)
