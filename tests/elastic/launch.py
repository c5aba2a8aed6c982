"""Starting real ranks by ``torchrun``, and ending them at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import trainpipes

__all__ = ["Launch"]

TESTS = Path(__file__).resolve().parents[1]


#: ``torchrun``, with what ranks import before it starts them: forked, they have it. They do not keep its
#: handler of SIGTERM, which ends a process only once it is back in Python.
TORCHRUN = """
import os, signal
import torch._dynamo, torch.distributed.checkpoint, trainpipes.testing
from torch.distributed.run import main
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
main()
"""


class Launch:
    """Ranks of one script under ``torchrun``, on this machine and over gloo.

    The launcher forks its ranks, so that torch is imported once for all of them.

    Args:
        script: what each rank runs.
        ranks: how many.
        folder: where the output of all goes; one launch a folder.
        arguments: of the script.
        rendezvous: options of ``torchrun`` by which several launches meet; alone if left out.
    """

    def __init__(
        self,
        script: Path,
        ranks: int,
        folder: Path,
        *arguments: str,
        rendezvous: Sequence[str] = ("--standalone",),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "output.txt"
        roots = [
            str(TESTS),
            str(Path(trainpipes.__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, roots)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-c", TORCHRUN, *rendezvous, "--start-method", "fork"]
        command += ["--nproc-per-node", str(ranks), "--run-path", str(script), *arguments]
        with self._said.open("wb") as output:
            self._agent = psutil.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self, seconds: float = 120) -> int:
        """The launcher's exit code; whatever runs longer is killed."""
        try:
            return int(self._agent.wait(seconds))
        except psutil.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.said()}") from None

    def wait_until(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        """Wait while it runs, until ``ready``."""
        start = time.monotonic()
        while not ready():
            if self._agent.poll() is not None or time.monotonic() - start > seconds:
                self.kill()
                raise AssertionError(f"ended before it was killed:\n{self.said()}")
            time.sleep(0.003)

    def kill_when(
        self,
        ready: Callable[[], bool],
        victim: Callable[[], int] | None = None,
        seconds: float = 120,
    ) -> None:
        """SIGKILL all processes once ``ready``; or only the one with the id that ``victim`` gives,
        after which the launcher ends the others."""
        self.wait_until(ready, seconds)
        if victim is None:
            self.kill()
        else:
            psutil.Process(victim()).kill()
            assert self.wait(60) != 0

    def kill(self) -> None:
        """SIGKILL the launcher and all processes below it, at once."""
        with suppress(psutil.NoSuchProcess):
            everyone = [self._agent, *self._agent.children(recursive=True)]
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everyone, timeout=30)

    def said(self) -> str:
        """What all ranks have printed."""
        return self._said.read_text(errors="replace")


def write_beside(path: Path, content: Any) -> None:
    """JSON at ``path``: whole, or as it was before, whenever this process is killed."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content))
    beside.replace(path)
