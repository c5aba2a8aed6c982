"""Attacks on processes: trainers, workers and writers are killed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import trainpipes as tp
from attacks.rounds import Round, ends_with, new_folder
from every_stage import ENDLESS, FINITE
from loader.test_dead_workers import TABLE, large, take
from loader.test_killed_trainers import CASES, killed
from trainpipes.testing import digest
from writers.test_killed import CASES as WRITERS
from writers.test_killed import RANDOM, check_killed

__all__ = ["killed_trainers", "killed_workers", "killed_writers", "resumed_trainers"]

STEPS = 60
#: Seconds after which something hangs, on a busy machine too.
HANGS = 240


def killed_trainers(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Processes and shared memory that are left."""

    def kill() -> Iterator[str]:
        for one in killed(draw.sample(CASES, 2)):
            yield f"left: {one}" if one["alive"] or one["files"] else "exact"

    while True:
        yield kill


# Trainers that go on


def train(
    make: Callable[[], tp.Pipeline], folder: Path, workers: int, every: int, ready: int
) -> None:
    """Note each batch, and save a state at times; begin with the one that was saved last."""
    loader, saved, step = tp.Loader(make(), num_workers=workers), folder / "saved.json", 0
    if saved.exists():
        step, state = json.loads(saved.read_text())
        loader.load_state_dict(state)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while step < STEPS:
        for item in loader:
            step += 1
            os.write(log, f"{step} {digest(item)}\n".encode())
            os.write(ready, b"1")
            if step % every == 0:
                (folder / "new.json").write_text(json.dumps([step, loader.state_dict()]))
                (folder / "new.json").replace(saved)
            if step == STEPS:
                return


def steps(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "log").read_text().splitlines()
    return [(int(step), found) for step, found in map(str.split, lines)]


def resumed_trainers(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Every batch over the kills is that of a run that was left alone."""
    every = {**FINITE, **ENDLESS}
    for name in [one for one in every if one.startswith(("read_delta", "read_lance"))]:
        del every[name]  # their libraries refuse to work in a fork

    def killed_at_times(make: Callable[[], tp.Pipeline], where: Path) -> int:
        """Start a trainer and kill it; 0 if it was done before."""
        reading, ready = os.pipe()
        workers, save = draw.choice([0, 0, 1, 2]), draw.choice([1, 3, 10])
        count, then = draw.randrange(1, 50), draw.random() / 50
        how = draw.choice([SIGKILL, SIGKILL, SIGTERM])
        child = os.fork()
        if not child:
            status = 1
            try:
                os.close(reading)
                train(make, where, workers, save, ready)
                status = 0
            finally:
                os._exit(status)
        os.close(ready)
        until = time.monotonic() + HANGS
        while count > 0:
            left = until - time.monotonic()
            if not select.select([reading], [], [], max(0, left))[0]:
                os.kill(child, SIGKILL)
                os.waitpid(child, 0)
                raise TimeoutError(f"no batch in {HANGS} seconds, with {workers} workers")
            said = os.read(reading, count)
            count -= len(said) or count
        time.sleep(then)
        os.kill(child, how)  # before its pipe is closed: it would end by itself
        os.close(reading)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def kill() -> Iterator[str]:
        name, where = draw.choice(sorted(every)), new_folder(folder)
        (where / "data").mkdir()
        (where / "whole").mkdir()
        (where / "killed").mkdir()
        make = partial(every[name], where / "data")
        make()  # its files are there
        nowhere = os.open(os.devnull, os.O_WRONLY)
        assert not ends_with(lambda: train(make, where / "whole", 0, STEPS + 1, nowhere)), name
        whole, kills = steps(where / "whole"), draw.randrange(1, 5)
        for _ in range(kills):
            ended = killed_at_times(make, where / "killed")
            if ended >= 0 or -ended not in (SIGKILL, SIGTERM):
                assert ended == 0, f"{name}: ended with {ended}"
                break
        workers = draw.randrange(3)
        assert not ends_with(lambda: train(make, where / "killed", workers, 5, nowhere)), name
        os.close(nowhere)
        found = steps(where / "killed")
        odd = sorted(set(found) - set(whole))[:3]
        lost = sorted(set(whole) - set(found))[:3]
        yield f"{name}: other batches {odd}, none {lost}" if odd or lost else "exact"

    while True:
        yield kill


# Workers


def slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.003)
    return row


def killed_workers(folder: Path, draw: random.Random) -> Iterator[Round]:
    """The run goes on from the state that it had when a worker died, and no process is left."""

    def kill() -> Iterator[str]:
        before = set(multiprocessing.active_children())
        function, buffer = draw.choice([large, slow, slow]), draw.choice([1, 20, 500])

        def pipeline(function: Any = function) -> tp.Pipeline:
            rows = tp.from_arrow(TABLE).sharding_filter(4).shuffle(buffer, seed=5)
            return rows.map(function, version="1").batch(2)

        whole = [[row["id"] for row in batch] for batch in pipeline(dict)]
        start = draw.choice(["fork", "fork", "fork", "forkserver"])
        loader = tp.Loader(pipeline(), num_workers=2, multiprocessing_context=start)
        batches, found = iter(loader), list[list[int]]()
        take(found, batches, draw.randrange(1, 40))
        workers = set(multiprocessing.active_children()) - before
        victim = draw.choice(sorted(workers, key=lambda one: one.pid or 0))
        timer = threading.Timer(draw.random() / 3, victim.kill)
        timer.start()
        said = "exact"  # all may have been there already
        try:
            take(found, batches)
        except tp.WorkerError:
            said, state = "named", loader.state_dict()
            del batches, loader
            loader = tp.Loader(pipeline(), num_workers=draw.randrange(3))
            loader.load_state_dict(state)
            take(found, iter(loader))
        timer.join()
        yield (
            said
            if found == whole
            else f"{len(found)} of {len(whole)} batches after a kill, or others"
        )
        batches = loader = None  # type: ignore[assignment]
        gc.collect()
        until = time.monotonic() + HANGS
        while left := set(multiprocessing.active_children()) - before:
            if time.monotonic() > until:
                yield f"left: {left}"
                break
            time.sleep(0.05)

    while True:
        yield kill


# Writers


def killed_writers(folder: Path, draw: random.Random) -> Iterator[Round]:
    """The next call goes on to the same bytes."""

    def kill() -> Iterator[str]:
        seed = draw.randrange(1 << 32)
        if draw.random() < 0.5:
            check_killed(draw.choice(RANDOM), new_folder(folder), 3, "at random", seed)
        else:
            check_killed(draw.choice(sorted(WRITERS)), new_folder(folder), 3, "at steps", seed)
        yield from ["exact"] * 3

    while True:
        yield kill
