"""A pipeline as a command line names it: a recipe, a config, or files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.options import STORAGE_OPTIONS, option

if TYPE_CHECKING:
    from trainpipes import Pipeline

several = functools.partial(option, multiple=True)
#: Rows in a batch of files that are run without a recipe.
BATCH_SIZE = 64


@dataclass(frozen=True)
class PipelineOptions:
    """What the options say of a pipeline."""

    tokenizer: str | None = None
    options: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    allow_imports: bool = False
    storage_options: dict[str, Any] | None = None

    def recipe_options(self, files: Sequence[str] = ()) -> dict[str, Any]:
        self._refuse("a recipe takes --option NAME=VALUE", "changes", "allow_imports")
        others = {
            "tokenizer": self.tokenizer,
            "files": (list(files) if len(files) > 1 else files[0]) if files else None,
            "storage_options": self.storage_options,
        }
        given = {name: value for name, value in others.items() if value is not None}
        return {**dict(_named(text, "option") for text in self.options), **given}

    def recipe(self, name: str, files: Sequence[str]) -> Pipeline:
        from trainpipes import recipe

        return recipe(name, **self.recipe_options(files))

    def config(self, path: str, files: Sequence[str] = ()) -> Pipeline:
        self._refuse("a config takes --set PATH=VALUE", "tokenizer", "options")
        if files:
            raise click.UsageError(f"{path} names its files itself: change them by --set")
        from trainpipes.config import load

        if self.allow_imports:  # as ``python -m`` has it
            sys.path.insert(0, os.getcwd())
        changes = dict(_named(text, "set") for text in self.changes)
        allowed, storage = self.allow_imports, self.storage_options
        return load(path, allow_imports=allowed, storage_options=storage, changes=changes)

    def named(self, recipe: str | None, config: str | None, files: Sequence[str]) -> Pipeline:
        if (recipe is None) == (config is None):
            raise click.UsageError("give the pipeline as either --recipe NAME or --config FILE")
        return self.config(config, files) if config is not None else self.recipe(str(recipe), files)

    def files(self, files: Sequence[str]) -> Pipeline:
        """The rows of files of one format, in their order, in batches."""
        of_others = ("tokenizer", "options", "changes", "allow_imports")
        self._refuse("files alone are read and cut into batches", *of_others)
        from trainpipes.pipeline.starts import read_by_name

        return read_by_name(files, self.storage_options, "run").batch(BATCH_SIZE)

    def _refuse(self, rule: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, (), False):
                flag = {"changes": "set", "options": "option"}.get(name, name).replace("_", "-")
                raise click.UsageError(f"{rule}, got --{flag}")


def takes_pipeline(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name a pipeline, together, as ``given``."""

    @STORAGE_OPTIONS
    @option("--allow-imports", is_flag=True, help="Import functions that the config names.")
    @several("--set", "changes", metavar="PATH=VALUE", help="Of the config: options.seed=1.")
    @several("--option", "options", metavar="NAME=VALUE", help="Of the recipe: batch_size=16.")
    @option("--tokenizer", help="Of the recipe: a name on the Hub, a path, or bytes.")
    @functools.wraps(command)
    def taking(**options: Any) -> Any:
        own = {name: options.pop(name) for name in PipelineOptions.__dataclass_fields__}
        return command(given=PipelineOptions(**own), **options)

    return taking


def recipe_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    points = entry_points(group="trainpipes.recipes")
    return sorted({point.name for point in points if point.name.startswith(incomplete)})


def recipe_or_config(command: Callable[..., Any]) -> Callable[..., Any]:
    recipe = option("--recipe", shell_complete=recipe_names, help="The pipeline, by its name.")
    config = option("--config", type=click.Path(), help="The pipeline, as a YAML file.")
    return recipe(config(command))


def _named(text: str, flag: str) -> tuple[str, Any]:
    if "=" not in text:
        example = "batch_size=16" if flag == "option" else "options.batch_size=16"
        raise click.UsageError(f"--{flag} must be NAME=VALUE, such as {example}, got {text!r}")
    from trainpipes import ConfigError
    from trainpipes.config import parse_change

    try:
        name, value = parse_change(text)
    except ConfigError as error:
        raise click.UsageError(f"--{flag}: {error}") from None
    if flag == "set":
        return name, value
    if type(value).__module__ != "builtins":
        raise click.UsageError(f"--option {name}: tags and variables are for a config")
    return name.replace("-", "_"), value
