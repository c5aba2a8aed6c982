"""What docs/command-line.md shows, and what the help of each command offers to try, is what happens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.shell import blocks_of, difference, examples_in_help, run_examples, shell
from cli.small_data import write_small_data
from trainpipes.cli.app import COMMANDS, command_line

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shell() as found:
        yield found


def help_of(name: str) -> Iterator[str]:
    """The help of a command and of those below it."""
    found = command_line.get_command(click.Context(command_line), name)
    assert found is not None
    several = [found, *found.commands.values()] if isinstance(found, click.Group) else [found]
    for one in several:
        yield one.get_help(click.Context(one, info_name=one.name))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_work_as_they_stand(name: str, tmp_path: Path, place: Path) -> None:
    (tmp_path / "small").mkdir()
    write_small_data(tmp_path / "small")
    for number, text in enumerate(help_of(name)):
        commands = [command for command in examples_in_help(text) if "://" not in command]
        assert commands, f"no example in:\n{text}"
        for command in dict.fromkeys(commands):
            folder = tmp_path / f"{number}-{commands.index(command)}"
            shutil.copytree(tmp_path / "small", folder)
            ((printed, code),) = run_examples([command], folder, place)
            assert code == 0, f"{command}\n{printed}"


def test_what_the_page_shows_is_what_the_command_prints(tmp_path: Path, place: Path) -> None:
    shown = 0
    for code, examples in blocks_of(PAGE):
        if code:
            subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=250)
        commands = [example.command for example in examples]
        told = run_examples(commands, tmp_path, place)
        for example, (printed, _) in zip(examples, told, strict=True):
            differs = difference(example.shown or "", printed)
            assert not differs, f"{PAGE.name}, line {example.line}: {example.command}\n{differs}"
            shown += 1
    assert shown > 3


def test_the_page_has_a_section_for_each_command_in_the_order_of_help() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("## `trainpipes ")]
    assert lines == [f"## `trainpipes {name}`" for name in COMMANDS]


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n", "a\nb\n", False),
        ("", "a\n", False),
        ("", "", True),
        ("a ... rows\n", "a 12 rows\n", True),
        ("a ... rows\n", "a 12 row\n", False),
        ("...\n", "", True),
        ("a\n...\nb\n", "a\nb\n", True),
        ("a\n...\nb\n", "a\nx\ny\nb\n", True),
        ("a\n...\nb\n", "a\nx\n", False),
        ("[1] a* ?\n", "[1] a* ?\n", True),
        ("[1] a* ?\n", "1 ab c\n", False),
        ("x \\ y\n", "x \\ y\n", True),
    ],
)
def test_shown_and_printed_are_compared_line_by_line(shown: str, printed: str, fits: bool) -> None:
    assert (difference(shown, printed) == "") is fits


def test_a_shell_tells_what_commands_print_and_how_they_end(tmp_path: Path, place: Path) -> None:
    commands = ["x=1; echo a; echo b >&2", "false", "echo $? $x", "trainpipes --help | head -n 1"]
    assert run_examples(commands, tmp_path, place) == [
        ("a\nb\n", 0),
        ("", 1),
        ("1 1\n", 0),
        ("Usage: trainpipes [OPTIONS] COMMAND [ARGS]...\n", 0),
    ]
