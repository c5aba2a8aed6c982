"""A pipeline as a command line says it: a config with changes, or a recipe with its options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from trainpipes_cli.storage_options import storage_options

if TYPE_CHECKING:
    from trainpipes import Pipeline

__all__ = ["of_config", "of_recipe", "recipe_option"]


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
        options["files"] = list(files) if len(files) > 1 else files[0]
    if storage is not None:
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
    from trainpipes.config import load, parse_change

    if allow_imports:  # as ``python -m`` has it
        sys.path.insert(0, os.getcwd())
    return load(
        path,
        allow_imports=allow_imports,
        storage_options=storage_options(storage),
        changes=dict(map(parse_change, changes)),
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
    from trainpipes.config.nodes import Node

    try:
        _, found = parse_change(f"{name}={value}")
    except ConfigError:
        raise click.UsageError(
            f"--option {name}: {value!r} is no YAML value; put a text of special characters in quotes"
        ) from None
    if isinstance(found, Node):
        raise click.UsageError(
            f"--option {name}: tags and variables are for a config, got {value!r}"
        )
    return name, found
