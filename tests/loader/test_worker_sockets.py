"""Sockets by which workers hand over tensors: a worker whose trainer is gone removes those of the dead."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainpipes.engine.iterating.worker_end import _remove_sockets

LISTENS = """
import socket, sys
one = socket.socket(socket.AF_UNIX)
one.bind(sys.argv[1])
one.listen()
print("here", flush=True)
one.accept()
"""


def listener(path: Path) -> subprocess.Popen[str]:
    one = subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert one.stdout is not None
    assert one.stdout.readline() == "here\n"
    return one


def end(one: subprocess.Popen[str]) -> None:
    one.kill()
    one.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who listens")
def test_sockets_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    dead, living = listener(folder / "dead"), listener(folder / "living")
    try:
        end(dead)
        assert (folder / "dead").exists()  # SIGKILL leaves it
        _remove_sockets(folder)
        assert [path.name for path in folder.iterdir()] == ["living"]
        assert living.poll() is None  # nobody has connected to it
        end(living)
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(str(folder / "own"))
            own.listen()
            _remove_sockets(folder)
        assert not list(folder.iterdir())  # which its maker removes
    finally:
        end(living)
