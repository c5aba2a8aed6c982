"""A pipeline as a command line says it: a config with changes, or a recipe with its options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.storage_options import storage_options

if TYPE_CHECKING:
    from trainpipes import Pipeline

__all__ = ["of_config", "of_recipe", "recipe_option", "recipe_options"]


def of_recipe(
    name: str, files: Sequence[str], given: Mapping[str, Any], storage: str | None
) -> Pipeline:
    """The pipeline of a recipe.

    Args:
        name: of the recipe.
        files: of ``--files``; none leaves it to the recipe to say that they are missing.
        given: its other options.
        storage: of ``--storage-options``.
    """
    from trainpipes import recipe

    options = dict(given)
    if files:
        _once("files", given)
        options["files"] = list(files) if len(files) > 1 else files[0]
    if storage is not None:
        _once("storage_options", given)
        options["storage_options"] = storage_options(storage)
    return recipe(name, **options)


def of_config(
    path: str, changes: Sequence[str], allow_imports: bool, storage: str | None
) -> Pipeline:
    """The pipeline of a config.

    Args:
        path: of the YAML file.
        changes: of ``--set``.
        allow_imports: whether the functions that it names are imported.
        storage: of ``--storage-options``.
    """
    from trainpipes.config import load

    given = _changes(changes)
    if allow_imports:  # as ``python -m`` has it
        sys.path.insert(0, os.getcwd())
    return load(
        path,
        allow_imports=allow_imports,
        storage_options=storage_options(storage),
        changes=given,
    )


def _changes(texts: Sequence[str]) -> dict[str, Any]:
    """What ``--set`` says, by path."""
    from trainpipes import ConfigError
    from trainpipes.config import parse_change, path_steps

    found: dict[str, Any] = {}
    seen: set[tuple[str | int, ...]] = set()
    for text in texts:
        try:
            path, value = parse_change(text)
        except ConfigError as error:
            raise click.UsageError(f"--set: {error}") from None
        if (steps := path_steps(path)) in seen:
            raise click.UsageError(f"--set {path} is given twice: leave one out")
        seen.add(steps)
        found[path] = value
    return found


def recipe_options(texts: Sequence[str], tokenizer: str | None) -> dict[str, Any]:
    """A recipe's options of ``--option`` and ``--tokenizer``, by name.

    Raises:
        click.UsageError: one is none, or is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in map(recipe_option, texts):
        if name in found:
            raise click.UsageError(f"--option {name} is given twice: leave one out")
        found[name] = value
    if tokenizer is not None:
        _once("tokenizer", found)
        found["tokenizer"] = tokenizer
    return found


def _once(name: str, given: Mapping[str, Any]) -> None:
    """Raise if what an option of the command says is among those of ``--option``, too."""
    if name in given:
        flag = name.replace("_", "-")
        raise click.UsageError(
            f"{name} is given twice, by --{flag} and by --option {name}=...: leave one out"
        )


def recipe_option(text: str) -> tuple[str, Any]:
    """A recipe's option of ``--option NAME=VALUE``, its value as in YAML.

    Raises:
        click.UsageError: it is none.
    """
    name, mark, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not mark or not name:
        raise click.UsageError(f"--option is NAME=VALUE, such as max_length=512, got {text!r}")
    from trainpipes import ConfigError
    from trainpipes.config import parse_change

    try:
        _, found = parse_change(f"{name}={value}")
    except ConfigError:
        raise click.UsageError(
            f"--option {name}: {value!r} is no YAML value; put a text of special characters in quotes"
        ) from None
    return name, found
