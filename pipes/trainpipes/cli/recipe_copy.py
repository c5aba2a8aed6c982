"""A recipe's file as a file of the user's own, which can be imported where it stands."""

from __future__ import annotations

import ast
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import click

from trainpipes.cli.installed import RecipeFile, recipe_file

__all__ = ["write_copy"]


def write_copy(name: str, to: Path, force: bool = False) -> tuple[Path, str]:
    """Write the file of a recipe to another place, whole or not at all.

    Args:
        name: of the recipe.
        to: the file, or a folder that is there.
        force: take the place of a file that is there.

    Returns:
        The file, and the name of the function in it that is the recipe.

    Raises:
        ClickException: it is there, or its name would hide a module that it needs.
    """
    recipe = recipe_file(name)
    if to.is_dir():
        to /= recipe.path.name if recipe.path.stem != "__init__" else f"{recipe.function}.py"
    source = recipe.path.read_bytes()
    if to.suffix == ".py" and to.stem in {*sys.stdlib_module_names, *_packages_used(source)}:
        raise click.ClickException(
            f"{to} would hide the module {to.stem!r}, which scripts beside it may import: choose another "
            f"name, such as {to.with_name(f'my_{recipe.function}.py')}"
        )
    if os.path.lexists(to) and not (force and to.is_file()):
        way = "or pass --force to write over it" if to.is_file() and not force else "it is no file"
        raise click.ClickException(f"{to} is there already: choose another name, {way}")
    if not to.parent.is_dir():
        raise click.ClickException(f"the folder {to.parent} is not there: make it first")
    try:
        _write(to.resolve(), standing_alone(source, recipe), force)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(to)) from error
    return to, recipe.function


def standing_alone(source: bytes, recipe: RecipeFile) -> bytes:
    """A recipe's source, whose imports from the package that it is in name that package."""
    home = recipe.module.split(".")
    if recipe.path.stem != "__init__":
        home.pop()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    relative = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    for node in sorted(relative, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        module = node.module or ""
        package = ".".join([*home[: len(home) - node.level + 1], *filter(None, [module])])
        at = starts[node.lineno - 1] + node.col_offset
        old = re.compile(rb"from[\s\\]*(?:\.[\s\\]*)+" + re.escape(module.encode()) + rb"\s*")
        written = old.match(source, at)
        if written:
            source = source[:at] + f"from {package} ".encode() + source[written.end() :]
    return source


def _packages_used(source: bytes) -> set[str]:
    """The packages that a file imports from."""
    found = {"trainpipes"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _write(to: Path, content: bytes, force: bool) -> None:
    beside = to.with_name(f".{to.name}.{os.getpid()}.new")
    try:
        with beside.open("xb") as file:
            file.write(content)
        if force:
            os.replace(beside, to)
            return
        try:
            os.link(beside, to)  # not over a file that has come in the meantime
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            os.replace(beside, to)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
