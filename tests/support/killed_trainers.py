"""Trains in many processes at once, kills each, and says what they leave behind.

``python killed_trainers.py '[["rows", "fork", "first", 9], ...]'`` prints as JSON what is left of each: what
it sends, how its workers start, when it is killed, and the signal. Each trainer is a fork of this process,
which has imported all it needs, and leads a session of its own, by which its workers are known.
``python killed_trainers.py train rows fork first`` is one that writes "1" when it is time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch

import trainpipes as tp

#: Seconds after which nothing may be left, on a busy machine too.
LIMIT = 60.0
SHARED = Path("/dev/shm")


def large(row: dict[str, Any]) -> dict[str, Any]:
    """Two megabytes that travel by themselves, and four that do not."""
    return {
        "own": torch.full((1 << 21,), row["id"] % 9, dtype=torch.uint8),
        "text": "x" * (1 << 22),
    }


def slow(flag: str, row: dict[str, Any]) -> dict[str, Any]:
    """Takes a minute for each row once there is a file."""
    if os.path.exists(flag):
        time.sleep(60)
    return row


def pipeline(kind: str, flag: str | None) -> tp.Pipeline:
    """Endless batches of rows of text, of tensors, or of megabytes."""
    text = ["a line of text " * 100] * 4000
    table = pa.table({"id": range(4000), "text": text, "ids": [[n] * 64 for n in range(4000)]})
    rows = tp.from_arrow(table).sharding_filter(4).shuffle(200)
    if flag is not None:
        rows = rows.map(partial(slow, flag), version="1")
    if kind == "rows":
        return rows.map(dict).repeat().batch(16)
    if kind == "tensors":
        return rows.select("ids").repeat().batch(32).pad_collate().map(dict)
    return rows.map(large).repeat().batch(2)


def train(kind: str, start: str, moment: str, ready: int, flag: str) -> None:
    """Train until this is killed."""
    pipe = pipeline(kind, flag if moment == "slow" else None)
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context=start)
    for step, _ in enumerate(loader):
        if step == {"first": 0, "middle": 30, "asleep": 3, "slow": 0}[moment]:
            Path(flag).touch()
            os.write(ready, b"1")
            if moment == "asleep":
                time.sleep(600)


def of_session(session: int) -> list[int]:
    """The processes of a session; dead ones whose parent has not yet asked how they ended are not there."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(name))
    return found


def shared_files(processes: list[int]) -> set[str]:
    """Shared memory that processes have mapped."""
    found = set()
    for pid in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if str(SHARED) in line and not line.endswith("(deleted)"):
                    found.add(line.split()[-1])
    return found


def begin(case: list[Any], flag: str) -> tuple[int, int]:
    """Start a trainer: its session, and where it says that it is time."""
    reading, ready = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.close(reading)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train(*case[:3], ready, flag)
        finally:
            os._exit(3)
    os.close(ready)
    return pid, reading


def left_of(cases: list[list[Any]], folder: str) -> list[dict[str, Any]]:
    """Run and kill some trainers at once; says of each what is left."""
    starting = {}
    for n, case in enumerate(cases):
        pid, reading = begin(case, f"{folder}/{n}")
        starting[reading] = case, pid
    waiting, found = {}, []
    while starting or waiting:
        for reading in select.select(list(starting), [], [], 0.05)[0]:
            case, pid = starting.pop(reading)
            assert os.read(reading, 1) == b"1", case
            os.close(reading)
            time.sleep({"first": 0, "middle": 0.05, "asleep": 0.5, "slow": 0.5}[case[2]])
            below = of_session(pid)
            shared = shared_files(below)
            os.kill(pid, case[3])
            os.waitpid(pid, 0)
            waiting[pid] = case, time.monotonic(), len(below), below, shared
        for pid, (case, killed, count, below, shared) in list(waiting.items()):
            alive = of_session(pid)
            files = [name for name in shared if os.path.exists(name)]
            files += [n for n in os.listdir(SHARED) if any(f"_{b}_" in n for b in below)]
            seconds = time.monotonic() - killed
            if (alive or files) and seconds < LIMIT:
                continue
            del waiting[pid]
            found.append(
                {"case": case, "were": count, "alive": alive, "files": files, "seconds": seconds}
            )
            for one in alive:
                os.kill(one, signal.SIGKILL)
    return found


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        if sys.argv[1] == "train":
            train(*sys.argv[2:5], 1, f"{folder}/0")
        sys.stdout.write(json.dumps(left_of(json.loads(sys.argv[1]), folder)))
