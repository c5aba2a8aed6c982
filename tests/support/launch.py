"""Starting real ranks by ``torchrun``, and ending them at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import trainpipes
from interpreters import python

__all__ = ["Launch"]

TESTS = Path(__file__).resolve().parents[1]


#: ``torchrun``, with what ranks import before it starts them: forked, they have it. They do not keep its
#: handler of SIGTERM, which ends a process only once it is back in Python.
TORCHRUN = """
import os, pathlib, signal, sys
pid = pathlib.Path(sys.argv.pop(1))
pid.with_suffix(".part").write_text(str(os.getpid()))
pid.with_suffix(".part").rename(pid)
import torch, torch.distributed.checkpoint, trainpipes.testing
if os.environ.get("TRAINS"):
    import torch._dynamo  # which an optimizer brings
torch.set_num_threads(1)
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
        interpreter: the words that start Python; forked from one that has torch if left out.
        trains: whether the script trains: what an optimizer imports is imported once for all ranks.
        forks: whether the launcher forks its ranks; else each is a process group, as torchrun starts it.
    """

    def __init__(
        self,
        script: Path,
        ranks: int,
        folder: Path,
        *arguments: str,
        rendezvous: Sequence[str] = ("--standalone",),
        interpreter: Sequence[str] | None = None,
        trains: bool = False,
        forks: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid = folder / "launcher.pid"
        self._pid.unlink(missing_ok=True)
        self._said = folder / "output.txt"
        roots = [
            str(TESTS),
            str(TESTS / "support"),
            str(Path(trainpipes.__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, roots)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRAINS": "1" if trains else "",
        }
        command = [*(interpreter or python()), "-c", TORCHRUN, str(self._pid), *rendezvous]
        command += ["--nproc-per-node", str(ranks)]
        command += ["--start-method", "fork", "--run-path"] if forks else []
        command += [str(script), *arguments]
        with self._said.open("wb") as output:
            self._started = psutil.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self, seconds: float = 120) -> int:
        """The launcher's exit code; whatever runs longer is killed."""
        try:
            return int(self._started.wait(seconds))
        except psutil.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.said()}") from None

    def wait_until(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        """Wait while it runs, until ``ready``."""
        start = time.monotonic()
        while not ready():
            if self._started.poll() is not None or time.monotonic() - start > seconds:
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

    def launcher(self) -> psutil.Process:
        """The process of ``torchrun``, the parent of its ranks."""
        return psutil.Process(int(self._pid.read_text()))

    def kill(self) -> None:
        """SIGKILL the launcher and all processes below it, at once."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            launcher = self.launcher()
            everyone = [launcher, *launcher.children(recursive=True)]
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everyone, timeout=30)
        with suppress(psutil.NoSuchProcess):
            self._started.kill()
        self._started.wait(30)

    def said(self) -> str:
        """What all ranks have printed."""
        return self._said.read_text(errors="replace")


def write_beside(path: Path, content: Any) -> None:
    """JSON at ``path``: whole, or as it was before, whenever this process is killed."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content))
    beside.replace(path)
