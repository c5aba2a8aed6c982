"""Real ranks of a framework, in processes that begin with it imported, and are killed at any moment.

A server process imports the frameworks once; each rank of each run is forked from it. So a rank starts in
a tenth of a second, fresh but for what was imported.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

__all__ = ["Ranks", "free_port", "run"]

#: Imported by the server, where installed.
FRAMEWORKS = ("torch", "trainpipes", "frameworks.imported")


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
        function: of a module that can be imported; called with the arguments on each rank, whose place
            ``RANK`` and ``WORLD_SIZE`` say, as under ``torchrun``. What it returns passes through JSON.
        ranks: how many.
        folder: for what they print and return: one for each start.
        arguments: of the function: they have to pickle.
    """

    def __init__(self, function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any):
        folder.mkdir(parents=True)
        self._folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(FRAMEWORKS))
        _start_server()
        port = free_port()
        self._processes = [
            context.Process(
                target=_rank, args=(function, rank, ranks, port, folder, arguments), daemon=False
            )
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def wait(self, seconds: float = 200) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            AssertionError: it raised, or has not come to its end in time; all ranks are killed.
        """
        end = time.monotonic() + seconds
        while any(process.is_alive() for process in self._processes):
            failed = any(process.exitcode for process in self._processes)
            if failed or time.monotonic() > end:
                time.sleep(1)  # for the others to say what they know
                self.kill()
                break
            time.sleep(0.02)
        if any(process.exitcode for process in self._processes):
            raise AssertionError(self.said())
        return [json.loads(path.read_text()) for path in sorted(self._folder.glob("returned-*"))]

    def kill_when(self, ready: Callable[[], bool], seconds: float = 200) -> None:
        """SIGKILL all ranks once ``ready``."""
        end = time.monotonic() + seconds
        while not ready():
            if not all(process.is_alive() for process in self._processes) or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ended before it was killed:\n{self.said()}")
            time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.join()

    def said(self) -> str:
        """What the ranks have printed."""
        texts = [
            f"{path.stem}:\n{path.read_text(errors='replace')}"
            for path in sorted(self._folder.glob("rank-*.txt"))
        ]
        return "\n".join(texts)


def _start_server() -> None:
    """Start the server, if it is not there yet: with this process's path, which Python 3.11 does not tell it,
    so that it would pass over what is to be imported."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


def run(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, seconds: float = 200
) -> list[Any]:
    """What a function returns on each of several ranks."""
    return Ranks(function, ranks, folder, *arguments).wait(seconds)


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # or accelerate gives each rank a thread for every core
        CUDA_VISIBLE_DEVICES="",
    )
    import torch

    multiprocessing.set_start_method(
        "fork", force=True
    )  # of DataLoader workers: not the server's way
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        returned = function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    (folder / f"returned-{rank:02}").write_text(json.dumps(returned))
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
