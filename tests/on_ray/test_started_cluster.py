"""The commands on a cluster of two nodes that ``ray start`` has started, found by ``--address``, by
``RAY_ADDRESS`` and by Ray Client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
import pytest

import trainpipes as tp
from trainpipes.prepare import repack, tokenize
from trainpipes.writers import Threads
from unfinished import contents

pytestmark = pytest.mark.timeout(580)


class Started(NamedTuple):
    address: str
    client: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a node, and what it has started."""
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    _, alive = psutil.wait_procs(children, timeout=10)
    for left in [*alive, process]:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    port, client = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        head = ["--head", "--port", str(port), "--ray-client-server-port", str(client)]
        head += ["--include-dashboard", "false", "--temp-dir", f"{folder}/ray"]
        head += ["--node-ip-address", "127.0.0.1"]
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for more in (head, ["--address", address]):
                command = [sys.executable, "-m", "ray.scripts.scripts", "start", *more]
                command += ["--num-cpus", "1", "--block"]
                with open(log, "ab") as file:
                    nodes.append(
                        subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
                    )
                wait_for(port, nodes[-1], log)
            wait_for(client, nodes[0], log)
            yield Started(address, f"ray://127.0.0.1:{client}")
        finally:
            for node in reversed(nodes):
                end(node)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"text of {name}\n" * 3000)
    return folder


def pipeline(texts: Path) -> tp.Pipeline:
    return tp.list_files(texts).read_text().tokenize("bytes")


def command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainpipes", *map(str, words)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_commands_write_on_several_nodes_what_they_write_alone(
    started: Started, texts: Path, tmp_path: Path
) -> None:
    config = tmp_path / "it.yaml"
    config.write_text(pipeline(texts).to_yaml())
    words = ["tokenize", tmp_path / "ids", "--config", config, "--json"]
    at = ["--executor", f"ray:{started.address}"]
    for _ in range(100):  # until the second node has joined
        done = command(*words, *at)
        if done.returncode:
            break
        rmtree(tmp_path / "ids")
    assert "Ray cluster has 2 nodes" in done.stderr
    assert "give a URL of shared storage" in done.stderr
    assert not (tmp_path / "ids").exists()
    done = command(*words, *at, "--shared-filesystem")
    assert (done.returncode, done.stderr) == (0, "")
    tokenize(pipeline(texts), tmp_path / "alone", executor=Threads(1))
    assert contents(tmp_path / "ids") == contents(tmp_path / "alone")

    words = [
        "repack",
        texts,
        tmp_path / "packed",
        "--shuffle",
        "--num-files",
        3,
        "--executor",
        "ray",
        "--json",
    ]
    done = command(*words, "--shared-filesystem", RAY_ADDRESS=started.address)
    assert (done.returncode, done.stderr) == (0, "")
    repack(texts, tmp_path / "packed alone", shuffle=True, num_files=3)
    assert contents(tmp_path / "packed") == contents(tmp_path / "packed alone")


def test_ray_client_does_too(started: Started, texts: Path, tmp_path: Path) -> None:
    config = tmp_path / "it.yaml"
    config.write_text(pipeline(texts).to_yaml())
    words = ["tokenize", tmp_path / "ids", "--config", config, "--json"]
    done = command(*words, "--executor", f"ray:{started.client}", "--shared-filesystem")
    assert done.returncode == 0, done.stderr
    tokenize(pipeline(texts), tmp_path / "alone", executor=Threads(1))
    assert contents(tmp_path / "ids") == contents(tmp_path / "alone")


CALLS = """
import sys
import trainpipes as tp

loader = tp.Loader(tp.from_dataset(range(8)).map(lambda x: 2 * x).batch(4), executor=tp.Ray(sys.argv[1]))
print([batch for _ in range(2) for batch in loader])
"""


@pytest.mark.parametrize("by", ["name", "client"])
def test_functions_are_called_by_any_address_in_each_epoch(started: Started, by: str) -> None:
    address = (
        started.client if by == "client" else started.address.replace("127.0.0.1", "localhost")
    )
    done = subprocess.run(
        [sys.executable, "-c", CALLS, address],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str([[0, 2, 4, 6], [8, 10, 12, 14]] * 2), done.stderr
