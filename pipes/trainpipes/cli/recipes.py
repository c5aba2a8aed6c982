"""``trainpipes recipes``: the prebuilt pipelines that are installed, their files, and copies of these."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.app import Command, Group
from trainpipes.cli.console import note, out, print_json, printable

if TYPE_CHECKING:
    from trainpipes.recipe_registry import RecipeSummary

__all__ = ["command", "recipe_names"]


def recipe_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Names of recipes, for a shell that completes one."""
    from trainpipes.cli import installed

    return [name for name in installed.recipe_names() if name.startswith(incomplete)]


@click.group("recipes", cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the prebuilt pipelines that are installed, with the columns and options of each.

    What an option means, and which names of columns are found by themselves, is in the file of the recipe,
    which `show` prints.

    \b
    Examples:
      trainpipes recipes
      trainpipes recipes show sft
      trainpipes recipes copy sft my_sft.py
    """
    if context.invoked_subcommand is not None:
        return
    from trainpipes import recipes

    found = recipes()
    if as_json:
        print_json([_as_json(one) for one in found])
    elif found:
        _print_list(found)
    else:
        out().print(repr(found))


@command.command("show", cls=Command)
@click.argument("name", shell_complete=recipe_names)
def show(name: str) -> None:
    """Print the file of a recipe, in colours on a terminal.

    \b
    Example:
      trainpipes recipes show sft | less
    """
    from trainpipes.cli.installed import recipe_file

    path = recipe_file(name).path
    if out().color_system is None:
        sys.stdout.buffer.write(path.read_bytes())
        return
    from rich.syntax import Syntax

    text = path.read_text(encoding="utf-8")
    out().print(Syntax(printable(text), "python", theme="ansi_dark", background_color="default"))


@command.command("copy", cls=Command)
@click.argument("name", shell_complete=recipe_names)
@click.argument("to", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def copy(name: str, to: Path, force: bool) -> None:
    """Copy the file of a recipe to TO, a file or a folder, as the start of one of your own.

    The copy can be imported at once, and gives the same batches as the recipe until you change it.

    \b
    Example:
      trainpipes recipes copy sft my_sft.py
    """
    from trainpipes.cli.recipe_copy import write_copy

    to, function = write_copy(name, to, force)
    shown = printable(os.fspath(to))
    if to.suffix == ".py" and to.stem.isidentifier():
        note(f"{shown} is yours to change; beside it, write: from {to.stem} import {function}")
    else:
        note(f"{shown} is yours to change; to import it, give it a name such as my_{function}.py")


def _as_json(one: RecipeSummary) -> dict[str, Any]:
    options = {}
    for text in one.options:
        option, _, default = text.partition("=")
        options[option.lstrip("*")] = {
            "default": default or None,
            "needed": option in one.needs,
            "text": one.texts.get(option.lstrip("*"), ""),
        }
    return {"name": one.name, "summary": one.summary, "columns": one.columns, "options": options}


def _print_list(found: tuple[RecipeSummary, ...]) -> None:
    """A paragraph for each recipe, its name before it."""
    from rich.text import Text

    indent = max(len(one.name) for one in found) + 2
    width = max(out().width - indent, 20)
    for number, one in enumerate(found):
        others = [
            o for o in one.options if o not in one.needs and o.split("=")[0] not in one.columns
        ]
        told = [("", one.summary)]
        for label, names in (("needs", one.needs), ("columns", one.columns), ("options", others)):
            told += [(label, f"{label}: {', '.join(names)}")] if names else []
        if number:
            out().print()
        before = Text(one.name.ljust(indent), "bold")
        for label, text in told:
            for line in textwrap.wrap(text, width, break_on_hyphens=False):
                shown = Text(line)
                shown.stylize("dim", 0, len(label) and len(label) + 1)
                out().print(Text.assemble(before, shown), soft_wrap=True)
                before, label = Text(" " * indent), ""
