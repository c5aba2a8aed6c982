"""Workers end with the process that trains, however it ends, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import product
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest

import killed_trainers
from interpreters import python
from killed_trainers import of_session

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
STARTS = ["fork", "spawn", "forkserver"]
KINDS = ["rows", "tensors", "large"]
CASES = [
    *product(KINDS, ["fork"], ["first", "middle", "asleep", "slow"], [SIGKILL, SIGTERM]),
    *product(KINDS, ["spawn", "forkserver"], ["first", "middle", "asleep"], [SIGKILL]),
    *product(KINDS, ["spawn", "forkserver"], ["middle", "asleep", "slow"], [SIGTERM]),
]
SAMPLE = [
    ("rows", "fork", "first", SIGTERM),
    ("tensors", "fork", "slow", SIGTERM),
    ("large", "fork", "asleep", SIGKILL),
    ("rows", "forkserver", "asleep", SIGKILL),
]


def killed(cases: list[Any]) -> list[dict[str, Any]]:
    """What is left of trainers that are killed."""
    command = [*python(), killed_trainers.__file__, json.dumps(cases)]
    run = subprocess.run(command, env=ENV, stdout=subprocess.PIPE, timeout=250, check=True)
    found: list[dict[str, Any]] = json.loads(run.stdout)
    assert len(found) == len(cases)
    assert all(one["were"] >= 3 for one in found)  # the trainer, and two workers
    return found


def test_nothing_is_left_of_a_trainer_that_is_killed() -> None:
    assert not [one for one in killed(SAMPLE) if one["alive"] or one["files"]]


@pytest.mark.parametrize(("start", "moment"), [
    ("fork", "asleep"),
    pytest.param("forkserver", "asleep", marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in product(STARTS, ["first", "slow"])),
])  # fmt: skip
def test_an_interrupt_ends_a_trainer_and_its_workers_in_seconds(start: str, moment: str) -> None:
    command = [sys.executable, killed_trainers.__file__, "train", "rows", start, moment]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, env=ENV, text=True, start_new_session=True, **pipes)
    try:
        assert run.stdout is not None
        assert run.stdout.read(1) == "1"
        time.sleep(0.5)
        os.killpg(run.pid, SIGINT)
        started = time.monotonic()
        _, said = run.communicate(timeout=60)
        assert time.monotonic() - started < 15  # a worker that sleeps on would take a minute
        assert said.rstrip().endswith("KeyboardInterrupt")
        # The servers of multiprocessing end once they see that the trainer has.
        while of_session(run.pid) and time.monotonic() - started < 10:
            time.sleep(0.05)
        assert not of_session(run.pid)
    finally:
        for one in of_session(run.pid):
            os.kill(one, SIGKILL)


PRINTS = """
import sys, time
import trainpipes as tp

def slow(row):
    print("a line that waits in a buffer")
    print("begun", file=sys.stderr, flush=True)
    time.sleep(600)

rows = tp.from_dataset(range(2)).map(slow, version="1")
list(tp.Loader(rows, num_workers=1, multiprocessing_context="fork"))
"""


def test_a_worker_whose_output_nobody_reads_ends_with_its_trainer() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen([sys.executable, "-c", PRINTS], env=ENV, start_new_session=True, **pipes)
    try:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stderr.readline() == b"begun\n"
        run.stdout.close()
        run.kill()
        run.wait()
        end = time.monotonic() + 20
        while of_session(run.pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not of_session(run.pid)
    finally:
        for one in of_session(run.pid):
            os.kill(one, SIGKILL)
        run.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_left_of_sixty_trainers_that_are_killed_at_all_moments(part: int) -> None:
    assert len(CASES) == 60
    assert not [one for one in killed(CASES[part::10]) if one["alive"] or one["files"]]
