"""Real ranks of a framework, in processes that begin with it imported, and are killed at any moment.

Once all tests are collected, and what they need is imported, a process is forked from theirs, from which each
rank of each run is forked in turn. So a rank starts in a tenth of a second, fresh but for what was imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Ranks", "everyone", "fork_server", "free_port", "run"]

_server: list[Connection] = []


def fork_server() -> None:
    """Fork the process that starts all ranks, while this one has no threads."""
    here, there = multiprocessing.Pipe()
    if os.fork() == 0:
        here.close()
        with suppress(EOFError):  # as the tests end
            _serve(there)
        os._exit(0)
    there.close()
    _server.append(here)


def _serve(tests: Connection) -> None:
    """Start ranks, and say how they ended: their exit codes, None while they run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.resetwarnings()
    context, started = multiprocessing.get_context("fork"), {}
    while True:
        asked = tests.recv()
        if isinstance(asked, list):
            tests.send([started[pid].exitcode for pid in asked])
            continue
        process = context.Process(target=_rank, args=asked)
        process.start()
        started[process.pid] = process
        tests.send(process.pid)


def _ask(asked: Any) -> Any:
    _server[-1].send(asked)
    return _server[-1].recv()


def free_port() -> int:
    """A port that no other test process takes, nor the system for a connection, until ranks listen."""
    first = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for port in random.sample(range(first, first + 500), 500):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError("no port is free")


class Ranks:
    """A function on several ranks, over gloo; started at once.

    Args:
        function: of a module that is imported; called with the arguments on each rank, whose place
            ``RANK`` and ``WORLD_SIZE`` say, as under ``torchrun``. What it returns passes through JSON.
        ranks: how many.
        folder: for what they print and return: one for each start.
        arguments: of the function: they have to pickle.
    """

    def __init__(self, function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any):
        folder.mkdir(parents=True)
        self._folder, port = folder, free_port()
        self._pids = [
            _ask((function, rank, ranks, port, folder, arguments)) for rank in range(ranks)
        ]

    def wait(self, seconds: float = 250) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            AssertionError: it raised, or has not come to its end in time; all ranks are killed.
        """
        end = time.monotonic() + seconds
        while None in (codes := _ask(self._pids)):
            if any(codes) or time.monotonic() > end:
                time.sleep(1)  # for the others to say what they know
                self.kill()
                raise AssertionError(self.said())
            time.sleep(0.02)
        if any(codes):
            raise AssertionError(self.said())
        return [json.loads(path.read_text()) for path in sorted(self._folder.glob("returned-*"))]

    def wait_until(self, ready: Callable[[], bool], seconds: float = 250) -> None:
        """Wait while they run, until ``ready``."""
        end = time.monotonic() + seconds
        while not ready():
            if _ask(self._pids) != [None] * len(self._pids) or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ended before it was killed:\n{self.said()}")
            time.sleep(0.005)

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """SIGKILL all ranks once ``ready``."""
        self.wait_until(ready)
        self.kill()

    def kill(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while None in _ask(self._pids):
            time.sleep(0.002)

    def said(self) -> str:
        """What the ranks have printed."""
        paths = sorted(self._folder.glob("rank-*.txt"))
        return "\n".join(f"{path.stem}:\n{path.read_text(errors='replace')}" for path in paths)


def everyone(value: Any) -> list[Any]:
    """What this is on each rank; called by all of them."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def run(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """What a function returns on each of several ranks."""
    return Ranks(function, ranks, folder, *arguments).wait()


def _rank(
    function: Callable[..., Any], rank: int, ranks: int, port: int, folder: Path, arguments: Any
) -> None:
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
        HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",  # or accelerate gives each rank a thread for every core
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        returned = function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    (folder / f"returned-{rank:02}").write_text(json.dumps(returned))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
