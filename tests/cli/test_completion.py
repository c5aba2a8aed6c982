"""``trainpipes completion``: the scripts, and what they do in a shell."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import START, environment, trainpipes
from cli.test_frame import SAY_HEAVY
from trainpipes.cli.app import COMMANDS, run

BASH = shutil.which("bash") or ""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder with ``trainpipes`` in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "trainpipes"
    script.write_text(f"#!{sys.executable}\n{START}\n")
    script.chmod(0o755)
    return folder


class Terminal:
    """A bash at whose keyboard somebody sits."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        leader, follower = pty.openpty()
        path = f"{bin_folder}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [BASH, "--norc", "--noprofile", "-i"],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=folder,
            env=environment({"PATH": path, "TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}),
            start_new_session=True,
        )
        os.close(follower)
        self.leader = leader
        self.shown = ""

    def types(self, keys: str, until: str) -> str:
        """Type something, and give what is shown from there on, until this is."""
        self.shown = ""
        os.write(self.leader, keys.encode())
        end = time.monotonic() + 60
        while until not in self.shown:
            assert time.monotonic() < end, f"{until!r} never came: {self.shown!r}"
            if select.select([self.leader], [], [], 0.2)[0]:
                self.shown += os.read(self.leader, 65536).decode()
        return self.shown

    def leave(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


@pytest.fixture
def terminal(tmp_path: Path, bin_folder: Path) -> Iterator[Terminal]:
    if not BASH:
        pytest.skip("there is no bash")
    work = tmp_path / "work"
    work.mkdir()
    (work / "checkpoint.pt").write_bytes(b"")
    found = Terminal(work, bin_folder)
    found.types("bind 'set bell-style none'; bind 'set enable-bracketed-paste off'\n", "> ")
    found.types('eval "$(trainpipes completion bash)"; echo re""ady\n', "\nready")
    yield found
    found.leave()


CLEAR = "\x15"


def test_bash_completes_commands_options_recipes_and_files(terminal: Terminal) -> None:
    terminal.types("trainpipes rec\t", "recipes ")
    terminal.types("sh\t", "show ")
    terminal.types("masked\t", "masked_lm ")
    terminal.types(f"{CLEAR}trainpipes recipes copy sft --fo\t", "--force ")
    terminal.types(f"{CLEAR}trainpipes recipes copy sft chec\t", "checkpoint.pt")
    shown = terminal.types(f"{CLEAR}trainpipes recipes show s\t\t", "seq2seq")
    assert "sft" in shown
    terminal.types(f"{CLEAR}trainpipes completion z\t", "zsh ")
    shown = terminal.types(f"{CLEAR}trainpipes re\t\t", "repack")
    assert "recipes" in shown


def test_bash_completes_files_of_state(terminal: Terminal) -> None:
    terminal.types("trainpipes state chec\t", "checkpoint.pt")
    terminal.types(f"{CLEAR}trainpipes state check chec\t", "checkpoint.pt")
    terminal.types(" --world\t", "--world-size ")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(name: str, tmp_path: Path) -> None:
    told = trainpipes("completion", name, before=SAY_HEAVY)
    assert told.returncode == 0
    assert told.stderr == "heavy []\n"
    assert "_TRAINPIPES_COMPLETE" in told.stdout
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"there is no {name} here to read it")
    script = tmp_path / "script"
    script.write_text(told.stdout)
    subprocess.run([program, "-n", str(script)], check=True, timeout=60)


def test_another_shell_is_refused(capsys) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def completed(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    words = line.split(" ")
    env = {
        "_TRAINPIPES_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        **more,
    }
    return trainpipes(env=env, before=SAY_HEAVY)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("trainpipes ", [f"plain,{name}" for name in COMMANDS]),
        ("trainpipes recipes show se", ["plain,seq2seq"]),
        ("trainpipes recipes co", ["plain,copy"]),
        ("trainpipes --de", ["plain,--debug"]),
        ("trainpipes recipes copy sft --f", ["plain,--force"]),
    ],
)
def test_completing_imports_nothing_heavy_and_says_nothing_else(
    line: str, found: list[str]
) -> None:
    told = completed(line)
    assert told.stdout.splitlines() == found
    assert told.stderr == "heavy []\n"


def test_completing_never_fails_aloud() -> None:
    told = completed("trainpipes recipes show 'x", COMP_CWORD="many")
    assert (told.returncode, told.stdout, told.stderr) == (1, "", "heavy []\n")
