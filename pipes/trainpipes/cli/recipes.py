"""``trainpipes recipes``: prebuilt pipelines, their options, and copies of their files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.console import note, out, print_json, print_table
from trainpipes.cli.options import AS_JSON
from trainpipes.cli.pipelines import recipe_names

if TYPE_CHECKING:
    from trainpipes.recipe_registry import RecipeSummary


@click.group("recipes", invoke_without_command=True)
@AS_JSON
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List prebuilt pipelines, show one with its options, copy one.

    \b
    Examples:
      trainpipes recipes
      trainpipes recipes show sft
      trainpipes recipes copy sft my_sft.py
    """
    if context.invoked_subcommand is not None:
        return
    from trainpipes import recipes

    known = recipes()
    if as_json:
        print_json([_as_json(recipe) for recipe in known])
        return
    rows = [
        (recipe.name, recipe.summary, ", ".join(recipe.needs), ", ".join(recipe.columns))
        for recipe in known
    ]
    print_table([("recipe", "what it makes", "needs", "columns"), *rows])
    note("trainpipes recipes show NAME tells the options of one")


@command.command("show")
@click.argument("name", shell_complete=recipe_names)
def show(name: str) -> None:
    """Show what a recipe is for, where its file is, and its options.

    \b
    Example:
      trainpipes recipes show sft
    """
    from trainpipes import recipes

    file, _ = _file(name)  # first, since it says which names there are
    (recipe,) = (known for known in recipes() if known.name == name)
    print_table([("recipe", f"{name}: {recipe.summary}"), ("file", file)])
    options = _as_json(recipe)["options"].items()
    rows = [
        (k, "needed" if option["needed"] else option["default"], option["text"])
        for k, option in options
    ]
    out()
    print_table([("option", "default", "what it is"), *rows])


@command.command("copy")
@click.argument("name", shell_complete=recipe_names)
@click.argument("to", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def copy(name: str, to: Path, force: bool) -> None:
    """Copy the file of a recipe to TO, a file or a folder, as the start of one of your own.

    \b
    Example:
      trainpipes recipes copy sft my_sft.py
    """
    file, function = _file(name)
    to = to / Path(file).name if to.is_dir() else to
    if to.exists() and not force:
        raise click.ClickException(f"{to} is there already: pass --force to write over it")
    shutil.copyfile(file, to)
    note(f"{to} is yours to change; beside it, write: from {to.stem} import {function}")


def _file(name: str) -> tuple[str, str]:
    import inspect

    from trainpipes.recipe_registry import recipe_function

    function = inspect.unwrap(recipe_function(name))
    return inspect.getfile(function), function.__name__


def _as_json(recipe: RecipeSummary) -> dict[str, Any]:
    options = {}
    for option in recipe.options:
        text, _, default = option.partition("=")
        name = text.lstrip("*")
        said = {"default": default or None, "needed": option in recipe.needs}
        options[name] = {**said, "text": recipe.texts.get(name, "")}
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "columns": recipe.columns,
        "options": options,
    }
