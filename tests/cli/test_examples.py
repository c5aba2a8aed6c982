"""What docs/inside.md shows, and what the help of each command offers to try, is what happens.

Blocks of the page are run as they stand there, in this process:

    ```console
    $ trainpipes recipes show stf
    error: no recipe 'stf' ...
    ```

A command starts with "$ trainpipes", and goes on in lines that start with "> ". What follows is what it
prints to stdout and stderr. "..." stands for any text within a line; alone in a line, for any lines.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes.cli.app import command_line, run

PAGE = Path(__file__).parents[2] / "docs" / "inside.md"
NAMES = list(command_line.commands)
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def printed(monkeypatch):
    """Runs a command as it is typed; gives what it prints to stdout and stderr, and its exit code."""
    monkeypatch.setenv("COLUMNS", "100")

    def running(line: str) -> tuple[str, int]:
        program, *arguments = shlex.split(line)
        assert program == "trainpipes", line
        told = io.StringIO()
        with redirect_stdout(told), redirect_stderr(told):
            code = run(arguments)
        return told.getvalue(), code

    return running


#: As the command has them; click keeps those that were asked for first.
HELP = ["-h", "--help"]


def helps(name: str) -> Iterator[str]:
    """The help of a command and of those below it."""
    found = command_line.commands[name]
    several = [found, *found.commands.values()] if isinstance(found, click.Group) else [found]
    for one in several:
        yield one.get_help(click.Context(one, info_name=one.name, help_option_names=HELP))


def write_data(folder: Path) -> None:
    """The files that the examples in help name."""
    chat = {
        "prompt": [f"What is {i} + {i}?" for i in range(120)],
        "response": [f"It is {2 * i}." for i in range(120)],
    }
    pq.write_table(pa.table(chat), folder / "chat.parquet", row_group_size=30)
    with (folder / "chat.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in pa.table(chat).to_pylist())
    texts = pa.table({"text": [f"Document {i}. " + "It goes on. " * (i % 7) for i in range(120)]})
    (folder / "data").mkdir()
    pq.write_table(texts, folder / "data" / "part-0.parquet", row_group_size=16)
    options = "{files: chat.parquet, tokenizer: bytes, batch_size: 8}"
    (folder / "train.yaml").write_text(f"recipe: sft\noptions: {options}\n")
    loader = tp.Loader(tp.recipe("sft", str(folder / "chat.parquet"), tokenizer="bytes"))
    next(iter(loader))
    torch.save({"step": 1, "loader": loader.state_dict()}, folder / "checkpoint.pt")


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_help_work_as_they_stand(name, tmp_path, monkeypatch, printed):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    for text in helps(name):
        _, _, after = text.partition("\n  Example")
        commands = re.findall(
            r"^ +(trainpipes .*)$", after.partition("\nOptions:")[0], re.MULTILINE
        )
        assert commands, f"no example in:\n{text}"
        for command in commands:
            if "://" not in command and " copy " not in command:
                told, code = printed(command)
                assert code == 0, f"{command}\n{told}"


def test_what_the_page_shows_is_what_the_command_prints(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    shown = 0
    names = {"__name__": "page"}
    for block in BLOCK.finditer(PAGE.read_text()):
        if block[1] == "python":
            with redirect_stdout(io.StringIO()):
                exec(block[2], names)
            continue
        for example in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
            command, _, expected = example.replace("\\\n> ", "").partition("\n")
            told, _ = printed(command)
            differs = difference(expected, told)
            assert not differs, f"{PAGE.name}: {command}\n{differs}"
            shown += 1
    assert shown >= 8


def test_the_page_has_a_section_for_each_command_in_the_order_of_help():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("## `trainpipes ")]
    assert lines == [f"## `trainpipes {name}`" for name in NAMES]


def difference(shown: str, printed: str) -> str:
    """What is printed otherwise than it is shown; "" if nothing."""
    expected, real = (
        [line.rstrip() for line in text.strip().splitlines()] for text in (shown, printed)
    )
    reached = {0}  # each line keeps how many of the real ones may be used up
    for line in expected:
        if line == "...":
            reached = set(range(min(reached, default=0), len(real) + 1)) if reached else set()
            continue
        parts = [re.sub(r"([\[\]*?])", r"[\1]", part) for part in line.split("...")]
        pattern = re.compile(fnmatch.translate("*".join(parts)))
        reached = {n + 1 for n in reached if n < len(real) and pattern.match(real[n])}
    if len(real) in reached:
        return ""
    return "\n".join(difflib.unified_diff(expected, real, "shown", "printed", lineterm=""))
