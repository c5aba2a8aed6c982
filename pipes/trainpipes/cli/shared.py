"""What commands share: options, the pipeline that a command line names (a recipe, a config, or files), and
printing: results to stdout; notes, warnings and errors to stderr.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes._internal.messages import in_color, table, terminal_width
from trainpipes.errors import TrainpipesError, amount, escaped, hidden

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.writers import Executor


def out(text: str = "") -> None:
    sys.stdout.write(f"{printable(text)}\n")


def print_json(value: Any) -> None:
    """Print a JSON value; NaN and infinity as null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    is_utf = encoding.startswith("utf")
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    sys.stdout.write(json.dumps(finite, indent=2, ensure_ascii=not is_utf) + "\n")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    out(table([list(map(printable, row)) for row in rows], terminal_width()))


def print_manifest(value: Any, **more: Any) -> None:
    """Print the result of a writer, without the entry of each file."""
    fields = {k: v for k, v in vars(value).items() if k[0] != "_" and k not in {"entries", "notes"}}
    fields |= {"folder": hidden(value.folder), "files": [*map(hidden, value.files)]}
    print_json({**fields, **more})


def print_written(
    done: Any, seconds: float, *more: tuple[str, str], rows: str = "", size: str = ""
) -> None:
    """Print how much was written, and the texts ``rows`` and ``size``."""
    there = f", {done.kept:,} of them there already" if done.kept else ""
    lines = [("files", f"{len(done.files):,}{there}"), ("rows", f"{done.rows:,}{rows}"), *more]
    print_table([*lines, ("size", f"{amount(done.bytes)}{size}"), ("took", f"{seconds:,.1f} s")])


def note(text: str, label: str = "") -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        click.echo(f"{label}{printable(text)}", err=True, color=in_color(sys.stderr))


def warning_line(text: str) -> None:
    note(" ".join(text.split()), f"{click.style('warning:', fg='yellow')} ")


def error_line(text: str) -> None:
    note(text, f"{click.style('error:', fg='red')} ")


def printable(text: str) -> str:
    r"""A text for a terminal, its control characters as they are written in Python.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return "\n".join(map(escaped, text.split("\n")))


option = functools.partial(click.option, show_default=True)

#: A whole number of 1 or more.
COUNT = click.IntRange(1)


def _storage_options(_: click.Context, __: click.Parameter, text_or_file: str | None) -> Any:
    """The options of a JSON text or @FILE. They are never shown."""
    if text_or_file is None:
        return None
    try:
        text = (
            Path(text_or_file[1:]).read_text("utf-8")
            if text_or_file.startswith("@")
            else text_or_file
        )
        options = json.loads(text)
    except OSError as error:
        raise click.UsageError(f"--storage-options: {text_or_file[1:]}: {error.strerror}") from None
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise click.UsageError(
            "--storage-options must be a JSON object, such as '{\"anon\": true}', or @FILE with one; what "
            "was given is not shown, since it may hold a secret"
        )
    return options


AS_JSON = option("--json", "as_json", is_flag=True, help="Print JSON.")
VERIFY = option("--verify", is_flag=True, help="Read each file back and compare it.")
OVERWRITE = option("--overwrite", is_flag=True, help="Remove earlier output in OUT; begin anew.")
STORAGE_OPTIONS = option(
    "--storage-options",
    metavar="JSON",
    callback=_storage_options,
    help="Options of the file system, such as credentials: JSON, or @FILE with JSON.",
)
COMPRESSION = option(
    "--compression",
    type=click.Choice(("zstd", "snappy", "gzip", "brotli", "lz4", "none")),
    default="zstd",
    callback=lambda _, __, given: None if given == "none" else given,
    help="Of the Parquet files.",
)


def takes_executor(command: Any) -> Any:
    """Give a command the options that say who does the work, together, as ``executor``."""

    @option("--executor", metavar="NAME[:N]", help="threads:4, processes:8, ray or ray:ADDRESS.")
    @option("--shared-filesystem", is_flag=True, help="All nodes see the same files, as by NFS.")
    @functools.wraps(command)
    def taking(executor: str | None, shared_filesystem: bool, **options: Any) -> Any:
        return command(executor=_executor(executor, shared_filesystem), **options)

    return taking


def _executor(written: str | None, shared_filesystem: bool) -> Executor | None:
    from trainpipes.engine.processes.executor_options import named_executor

    if shared_filesystem and (written or "").partition(":")[0] != "ray":
        raise click.UsageError("--shared-filesystem is of --executor ray")
    executor = named_executor(written or "", shared_filesystem)
    if executor is None and written is not None:
        rule = "must be threads:N, processes:N, ray or ray:ADDRESS"
        raise click.BadParameter(f"{rule}, got {written!r}", param_hint="--executor")
    return executor


several = functools.partial(option, multiple=True)
#: Rows in a batch of files that are run without a recipe.
BATCH_SIZE = 64


@dataclass(frozen=True)
class PipelineOptions:
    """The options that choose a pipeline."""

    tokenizer: str | None = None
    options: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    allow_imports: bool = False
    storage_options: dict[str, Any] | None = None

    def pipeline(self, source: str, files: Sequence[str]) -> Pipeline:
        """The pipeline of a recipe or a config by its name, or the rows of files."""
        if re.fullmatch(r"[^\W\d][\w-]*", source):  # files of this name do not count
            _check_recipe(source)
            return self.recipe(source, files)
        if source.endswith((".yaml", ".yml")):
            return self.config(source, files)
        return self.files([source, *files])

    def recipe_options(self, files: Sequence[str] = ()) -> dict[str, Any]:
        self._refuse("a recipe takes --option NAME=VALUE", "changes", "allow_imports")
        others = {
            "tokenizer": self.tokenizer,
            "files": (list(files) if len(files) > 1 else files[0]) if files else None,
            "storage_options": self.storage_options,
        }
        named = {name: value for name, value in others.items() if value is not None}
        options = _each_named(self.options, "option")
        for name in options.keys() & named.keys():
            raise click.UsageError(f"{name} is given twice: leave --option {name}=... out")
        return {**options, **named}

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
        allowed, storage = self.allow_imports, self.storage_options
        changes = _each_named(self.changes, "set", allowed)
        return load(path, allow_imports=allowed, storage_options=storage, changes=changes)

    def named(self, recipe: str | None, config: str | None, files: Sequence[str]) -> Pipeline:
        if (recipe is None) == (config is None):
            raise click.UsageError("give the pipeline as either --recipe NAME or --config FILE")
        return self.config(config, files) if config is not None else self.recipe(str(recipe), files)

    def files(self, files: Sequence[str]) -> Pipeline:
        """The rows of files of the same format, in their order, in batches."""
        of_others = ("tokenizer", "options", "changes", "allow_imports")
        self._refuse("files alone are read and cut into batches", *of_others)
        from trainpipes.pipeline.starts import read_by_name

        return read_by_name(files, self.storage_options, "run").batch(BATCH_SIZE)

    def _refuse(self, rule: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, (), False):
                flag = {"changes": "set", "options": "option"}.get(name, name).replace("_", "-")
                raise click.UsageError(f"{rule}, got --{flag}")


def _check_recipe(name: str) -> None:
    from trainpipes.recipe_registry import recipe_function

    try:
        recipe_function(name)
    except TrainpipesError as error:
        if os.path.exists(name):
            written = f"{name}/" if os.path.isdir(name) else f"./{name}"
            error.message += f"; the data of that name is written {written}"
        raise


def takes_pipeline(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that name a pipeline, together, as ``pipe_options``."""

    @STORAGE_OPTIONS
    @option("--allow-imports", is_flag=True, help="Import functions that the config names.")
    @several("--set", "changes", metavar="PATH=VALUE", help="Of the config: options.seed=1.")
    @several("--option", "options", metavar="NAME=VALUE", help="Of the recipe: batch_size=16.")
    @option("--tokenizer", help="Of the recipe: a name on the Hub, a path, or bytes.")
    @functools.wraps(command)
    def taking(**options: Any) -> Any:
        pipeline_options = {
            name: options.pop(name) for name in PipelineOptions.__dataclass_fields__
        }
        return command(pipe_options=PipelineOptions(**pipeline_options), **options)

    return taking


def recipe_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    points = entry_points(group="trainpipes.recipes")
    return sorted({point.name for point in points if point.name.startswith(incomplete)})


def recipe_or_config(command: Callable[..., Any]) -> Callable[..., Any]:
    recipe = option("--recipe", shell_complete=recipe_names, help="The pipeline, by its name.")
    config = option("--config", type=click.Path(), help="The pipeline, as a YAML file.")
    return recipe(config(command))


def _each_named(texts: Sequence[str], flag: str, allow_imports: bool = False) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in (_named(text, flag, allow_imports) for text in texts):
        if name in named:
            raise click.UsageError(f"{name} is given twice: leave one --{flag} {name}=... out")
        named[name] = value
    return named


def _named(text: str, flag: str, allow_imports: bool = False) -> tuple[str, Any]:
    if "=" not in text:
        example = "batch_size=16" if flag == "option" else "options.batch_size=16"
        raise click.UsageError(f"--{flag} must be NAME=VALUE, such as {example}, got {text!r}")
    from trainpipes import ConfigError
    from trainpipes.config import parse_change

    try:
        name, value = parse_change(text, allow_imports=allow_imports)
    except ConfigError as error:
        raise click.UsageError(f"--{flag}: {error}") from None
    if flag == "set":
        return name, value
    if type(value).__module__ != "builtins":
        raise click.UsageError(f"--option {name}: tags and variables are for a config")
    return name.replace("-", "_"), value
