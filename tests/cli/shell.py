"""A shell in which ``trainpipes`` answers at once: a process that has imported the library forks for each
call, so that twenty examples take as long as one.

Blocks of a page are run as they stand there:

    ```console
    $ trainpipes recipes show sft | wc -l
    ...
    $ echo $?
    0
    ```

A command starts with "$ ", and goes on in lines that start with "> ". What follows is what it prints to
stdout and stderr. "..." stands for any text within a line; alone in a line, for any lines. A block that is
marked ```console no-run is not run.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cli.command import environment

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "=== end of example {} ==="

SERVER = r"""
import json, os, signal, socket, sys
import trainpipes, trainpipes_recipes, trainpipes.cli.app, rich.table

def answer(connection):
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 64)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, buffering=1)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["trainpipes", *asked["arguments"]]
    try:
        trainpipes.cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = server.accept()
    if os.fork() == 0:
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        answer(connection)
    connection.close()
"""

CLIENT = """#!{python} -IS
import json, os, socket, sys
asked = {{"arguments": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16)))
"""


@dataclass(frozen=True)
class Example:
    """A command, and what it prints; None where that does not matter.

    Args:
        command: of the shell.
        shown: what it prints.
        line: of the page.
    """

    command: str
    shown: str | None
    line: int = 0


@contextmanager
def shell() -> Iterator[Path]:
    """Give a folder in which ``trainpipes`` is, for PATH."""
    with TemporaryDirectory(prefix="tp-shell-") as place:
        address, client = os.path.join(place, "server"), Path(place, "bin", "trainpipes")
        client.parent.mkdir()
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        python = client.with_name("python")
        python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
        python.chmod(0o755)
        server = subprocess.Popen([sys.executable, "-c", SERVER, address], env=environment())
        try:
            while not os.path.exists(address):
                assert server.poll() is None, "the library cannot be imported"
                time.sleep(0.05)
            yield client.parent
        finally:
            server.terminate()
            server.wait()


def run_examples(commands: list[str], folder: Path, place: Path) -> list[tuple[str, int]]:
    """What each command prints, to stdout and stderr, and its exit code: one after the other, in one shell.

    Args:
        commands: of bash.
        folder: to run them in.
        place: the folder of ``shell()``.
    """
    lines = ["__code=0"]
    for number, command in enumerate(commands):
        lines += [
            "(exit $__code)",
            command,
            f"__code=$?; echo; echo '{END.format(number)}' $__code",
        ]
    path = f"{place}:{os.environ['PATH']}"
    told = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment({"PATH": path, "HOME": str(folder)}),
        timeout=250,
    )
    found, rest = [], told.stdout
    for number, command in enumerate(commands):
        printed, end, rest = rest.partition(f"\n{END.format(number)} ")
        assert end, f"{command!r} did not come to its end: {printed}"
        code, _, rest = rest.partition("\n")
        found.append((printed, int(code)))
    return found


def blocks_of(page: Path) -> Iterator[tuple[str, list[Example]]]:
    """The blocks of a page to run, in order: either Python, or the examples of a shell."""
    for block in BLOCK.finditer(page.read_text()):
        first = block.string.count("\n", 0, block.start(2)) + 1
        if block[1] == "python":
            yield block[2], []
        else:
            yield "", _examples(block[2], first)


def examples_in_help(text: str) -> list[str]:
    """The commands that the help of a command shows, each in a line of its own."""
    _, _, after = text.partition("\n  Example")
    return re.findall(
        r"^ +((?:eval \"\$\()?trainpipes .*)$", after.partition("\nOptions:")[0], re.MULTILINE
    )


def difference(shown: str, printed: str) -> str:
    """What is printed otherwise than it is shown; "" if nothing."""
    expected, real = ([line.rstrip() for line in text.splitlines()] for text in (shown, printed))
    while real and not real[-1]:
        real.pop()
    while expected and not expected[-1]:
        expected.pop()
    if _fits(expected, real):
        return ""
    return "\n".join(difflib.unified_diff(expected, real, "shown", "printed", lineterm=""))


def _examples(text: str, first: int) -> list[Example]:
    found: list[Example] = []
    for number, line in enumerate(text.splitlines(keepends=True), first):
        if line.startswith("$ "):
            found.append(Example(line[2:], "", number))
            continue
        assert found, f"line {number}: a block starts with a command, '$ ...'"
        last = found[-1]
        if line.startswith("> ") and not last.shown:
            found[-1] = Example(last.command + line[2:], "", last.line)
        else:
            found[-1] = Example(last.command, (last.shown or "") + line, last.line)
    return found


def _fits(expected: list[str], real: list[str]) -> bool:
    """Whether lines are as shown, each step keeping how many of the real lines may be used up."""
    reached = {0}
    for line in expected:
        if line == "...":
            reached = set(range(min(reached, default=0), len(real) + 1)) if reached else set()
            continue
        parts = [re.sub(r"([\[\]*?])", r"[\1]", part) for part in line.split("...")]
        pattern = re.compile(fnmatch.translate("*".join(parts)))
        reached = {n + 1 for n in reached if n < len(real) and pattern.match(real[n])}
    return len(real) in reached
