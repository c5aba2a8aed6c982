"""A pipeline as a command line names it: a recipe with options, a config with changes, or files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.options import STORAGE_OPTIONS, storage_options

if TYPE_CHECKING:
    from trainpipes import Pipeline

__all__ = ["PipelineOptions", "one_pipeline", "takes_pipeline"]

#: Rows in a batch of files that are run without a recipe.
BATCH_SIZE = 64


@dataclass(frozen=True)
class PipelineOptions:
    """What the options say of a pipeline.

    Args:
        tokenizer: of ``--tokenizer``.
        options: of ``--option``, each NAME=VALUE.
        changes: of ``--set``, each PATH=VALUE.
        allow_imports: whether functions that a config names are imported.
        storage_options: of ``--storage-options``, as JSON.
    """

    tokenizer: str | None
    options: tuple[str, ...]
    changes: tuple[str, ...]
    allow_imports: bool
    storage_options: str | None

    def recipe_options(self, files: Sequence[str] = ()) -> dict[str, Any]:
        """The options of a recipe, by name.

        Raises:
            click.UsageError: one is of a config, is given twice, or has no value.
        """
        if self.changes or self.allow_imports:
            raise click.UsageError(
                "--set and --allow-imports are for a config; a recipe takes --option NAME=VALUE"
            )
        given = [_named(text, "option") for text in self.options]
        given += [] if self.tokenizer is None else [("tokenizer", self.tokenizer)]
        given += [("files", list(files) if len(files) > 1 else files[0])] if files else []
        if self.storage_options is not None:
            given.append(("storage_options", storage_options(self.storage_options)))
        return _once(given, "option")

    def recipe(self, name: str, files: Sequence[str]) -> Pipeline:
        """The pipeline of a recipe."""
        from trainpipes import recipe

        return recipe(name, **self.recipe_options(files))

    def config(self, path: str) -> Pipeline:
        """The pipeline of a YAML file."""
        if self.options or self.tokenizer is not None:
            raise click.UsageError(
                "--tokenizer and --option are for a recipe; a config takes --set PATH=VALUE, such as "
                "--set options.tokenizer=bytes"
            )
        from trainpipes.config import load

        if self.allow_imports:  # as ``python -m`` has it
            sys.path.insert(0, os.getcwd())
        return load(
            path,
            allow_imports=self.allow_imports,
            storage_options=storage_options(self.storage_options),
            changes=_once([_named(text, "set") for text in self.changes], "set"),
        )

    def files(self, files: Sequence[str]) -> Pipeline:
        """The rows of files of one format, in their order, in batches."""
        if self.options or self.tokenizer is not None or self.changes or self.allow_imports:
            raise click.UsageError(
                "files alone are read and cut into batches: --tokenizer, --option, --set and "
                "--allow-imports are for a recipe or a config"
            )
        from trainpipes import list_files
        from trainpipes.sources.files.formats import ends_of_names, reader_by_name

        storage = storage_options(self.storage_options)
        listed = list_files(list(files), suffix=ends_of_names(), storage_options=storage)
        first = next(iter(listed.distributed(rank=0, world_size=1)))
        rows: Pipeline = getattr(listed, reader_by_name(first))()
        return rows.batch(BATCH_SIZE)


def takes_pipeline(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name a pipeline, together, as ``given``."""

    @functools.wraps(command)
    def taking(
        *,
        tokenizer: str | None,
        options: tuple[str, ...],
        changes: tuple[str, ...],
        allow_imports: bool,
        storage_options: str | None,
        **others: Any,
    ) -> Any:
        given = PipelineOptions(tokenizer, options, changes, allow_imports, storage_options)
        return command(given=given, **others)

    for option in (
        STORAGE_OPTIONS,
        click.option(
            "--allow-imports", is_flag=True, help="Import the functions that the config names."
        ),
        click.option(
            "--set", "changes", multiple=True, metavar="PATH=VALUE",
            help="Change a value of the config, such as options.batch_size=16. Repeatable.",
        ),
        click.option(
            "--option", "options", multiple=True, metavar="NAME=VALUE",
            help="Option of the recipe, such as batch_size=16. Repeatable.",
        ),
        click.option("--tokenizer", help="Tokenizer for the recipe: a path, or bytes."),
    ):  # fmt: skip
        taking = option(taking)
    return taking


def one_pipeline(
    recipe: str | None, config: str | None, given: PipelineOptions, files: Sequence[str]
) -> Pipeline:
    """The pipeline of ``--recipe`` or ``--config``."""
    if (recipe is None) == (config is None):
        raise click.UsageError("give the pipeline as either --recipe NAME or --config FILE")
    if recipe is not None:
        return given.recipe(recipe, files)
    if files:
        raise click.UsageError("a config names its files itself: change them by --set")
    return given.config(str(config))


def _named(text: str, flag: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE, the value as in YAML."""
    from trainpipes import ConfigError
    from trainpipes.config import parse_change

    try:
        name, value = parse_change(text)
    except ConfigError as error:
        raise click.UsageError(f"--{flag}: {error}") from None
    if flag == "set":
        return name, value
    if type(value).__module__ != "builtins":
        raise click.UsageError(
            f"--option {name}: tags and variables are for a config, got {text!r}"
        )
    return name.replace("-", "_"), value


def _once(given: Sequence[tuple[str, Any]], flag: str) -> dict[str, Any]:
    names = [name for name, _ in given]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise click.UsageError(f"--{flag}: {twice[0]} is given twice: leave one out")
    return dict(given)
