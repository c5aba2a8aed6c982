"""``trainpipes tokenize``: token ids of data files, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.app import Command
from trainpipes.cli.console import note, out, print_json
from trainpipes.cli.pipelines import of_config, of_recipe, recipe_options
from trainpipes.cli.ray_options import engine_options
from trainpipes.cli.storage_options import STORAGE_OPTIONS
from trainpipes.cli.storage_options import storage_options as of_json
from trainpipes.cli.typed_options import options_as_typed

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.prepare import Tokenized

__all__ = ["command"]

FORMATS = ("parquet", "bin")
CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


@click.command("tokenize", cls=Command)
@click.argument("paths", metavar="[IN]... OUT", nargs=-1, required=True)
@click.option("--recipe", metavar="NAME", help="The recipe that will train on the token ids.")
@click.option("--tokenizer", help="The tokenizer that the recipe takes: a path, or bytes.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of the recipe. Repeatable.",
)
@click.option("--config", help="A YAML file with a pipeline, instead of IN and a recipe.")
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE",
    help="Change a value of the config, such as options.max_length=512. Repeatable.",
)  # fmt: skip
@click.option("--allow-imports", is_flag=True, help="Import the functions that the config names.")
@STORAGE_OPTIONS
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="parquet", show_default=True,
    help="parquet: rows with all their columns. bin: token ids alone, as in nanoGPT's train.bin.",
)  # fmt: skip
@click.option(
    "--dtype", help="Type of the ids in bin files. [default: uint16 where the vocabulary fits]"
)
@click.option(
    "--compression",
    type=click.Choice(CODECS),
    default="zstd",
    show_default=True,
    help="Compression of Parquet files.",
)
@click.option(
    "--bytes-per-file", type=click.IntRange(1), metavar="BYTES",
    help="Split input files that are larger than this. [default: 256 MiB]",
)  # fmt: skip
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Processes to use. [default: one a core, fewer for little work]",
)
@engine_options("processes")
@click.option("--verify", is_flag=True, help="Read each file back and compare it.")
@click.option("--overwrite", is_flag=True, help="Remove earlier output in OUT, and begin anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    paths: tuple[str, ...],
    recipe: str | None,
    tokenizer: str | None,
    options: tuple[str, ...],
    config: str | None,
    changes: tuple[str, ...],
    allow_imports: bool,
    storage_options: str | None,
    form: str,
    dtype: str | None,
    compression: str,
    bytes_per_file: int | None,
    processes: int | None,
    engine: str,
    address: str | None,
    shared_filesystem: bool,
    verify: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the token ids of data files, once, for later runs.

    IN are files, folders, globs or URLs of texts; OUT is a new folder or URL. One file is written for each
    file, with the rows that the recipe would make on the way; the line to train with is printed. The
    same command goes on where it was stopped.

    \b
    Examples:
      trainpipes tokenize data ids --recipe pretrain --tokenizer bytes
      trainpipes tokenize chat.parquet chat --recipe sft --tokenizer bytes --option max_length=512
    """
    *files, folder = paths
    given: dict[str, Any] = {}
    if config is not None:
        if files or recipe or tokenizer is not None or options:
            raise click.UsageError(
                "--config names files, tokenizer and options itself: give OUT and --config, and change "
                "values by --set"
            )
        pipe = of_config(config, changes, allow_imports, storage_options)
    elif recipe is None:
        raise click.UsageError("say what will train on the files: --recipe NAME, or --config FILE")
    else:
        if changes or allow_imports:
            raise click.UsageError(
                "--set and --allow-imports are of a config; a recipe's options are --option NAME=VALUE"
            )
        if not files:
            raise click.UsageError(f"give files and a folder to write to: IN... OUT, got {folder}")
        given = recipe_options(options, tokenizer)
        _need_tokenizer(recipe, given)
        pipe = of_recipe(recipe, files, given, storage_options)
    from trainpipes.prepare import tokenize
    from trainpipes.prepare.tokenize.run import FILE_BYTES

    storage = of_json(storage_options) if "://" in folder else None
    started = time.monotonic()
    with options_as_typed():
        done = tokenize(
            pipe, folder, format=form, dtype=dtype,  # type: ignore[arg-type]
            compression=None if compression == "none" else compression,
            bytes_per_file=bytes_per_file or FILE_BYTES, processes=processes, overwrite=overwrite,
            verify=verify, engine=engine,  # type: ignore[arg-type]
            address=address, shared_filesystem=shared_filesystem,
            storage_options=storage,
        )  # fmt: skip
    _say(done, _train(done, folder, recipe, given, storage), time.monotonic() - started, as_json)


def _need_tokenizer(recipe: str, given: Mapping[str, Any]) -> None:
    """Raise unless a recipe has the tokenizer that it cannot do without."""
    from trainpipes import recipes

    needing = [found.name for found in recipes() if "tokenizer" in found.options]
    if recipe in needing and "tokenizer" not in given:
        raise click.UsageError(f"the recipe {recipe} needs --tokenizer: a path, or bytes")


def _say(done: Tokenized, train: str, seconds: float, as_json: bool) -> None:
    size = done.bytes
    made = len(done.files) - done.kept
    if as_json:
        print_json(
            {
                "folder": done.folder, "files": list(done.files), "files_made": made, "rows": done.rows,
                "rows_read": done.read, "tokens": done.tokens, "bytes": size, "format": done.format,
                "dtype": done.dtype, "columns": done.columns, "seconds": round(seconds, 3), "train": train,
            }
        )  # fmt: skip
        return
    from trainpipes._internal.amount import amount

    count = f"{len(done.files):,} file{'s' * (len(done.files) > 1)}"
    there = f", {done.kept:,} of them there already" if done.kept else ""
    lines = [
        ("wrote", f"{count}, {amount(size)}{there}"),
        ("rows", f"{done.rows:,}"),
        ("tokens", f"{done.tokens:,}, {done.tokens / max(1, done.rows):,.1f} a row"),
    ]
    if done.read > done.rows:
        lines[1] = ("rows", f"{done.rows:,} of {done.read:,}; the pipeline leaves the others out")
    if done.dtype is not None:
        lines.append(("ids", done.dtype))
    if not made:
        lines[0] = ("there", f"{count}, {amount(size)}, all written before")
    if made == len(done.files):
        lines.append(("took", f"{seconds:,.1f} s"))
    for label, text in lines:
        out().print(f"{label:<8}{text}", soft_wrap=True)
    note("train with:")
    out().print(train, soft_wrap=True)


# What to train with


def _train(
    done: Tokenized,
    folder: str,
    recipe: str | None,
    given: Mapping[str, Any],
    storage: dict[str, Any] | None,
) -> str:
    """Python that trains on the files, and gives the batches that would have been made on the way."""
    if done.format == "bin":
        return _call(
            "tokens", f"{folder.rstrip('/')}/*.bin", {"dtype": done.dtype, **_of_tokens(given)}
        )
    wanted = done.pipeline
    if recipe is not None:
        own = {k: v for k, v in given.items() if k not in ("files", "cache")}
        texts = {k: v for k, v in own.items() if isinstance(v, str) and k != "tokenizer"}
        # Options that name columns of texts have nothing to name there.
        for left_out in ([], [k for k, v in texts.items() if v not in done.columns]):
            options = {k: v for k, v in own.items() if k not in left_out}
            there = options if storage is None else {**options, "storage_options": storage}
            if _gives(recipe, done, there, wanted):
                return _call(recipe, folder, options)
    first, *rest = repr(wanted).splitlines()
    return "\n".join([f"tp.{first}", *rest])


def _gives(recipe: str, done: Tokenized, options: dict[str, Any], wanted: Pipeline) -> bool:
    """Whether a recipe makes that pipeline of the files."""
    from trainpipes import TrainpipesError
    from trainpipes import recipe as built

    try:
        found = built(recipe, done.folder, **options)
        return bool(found._session.plan.identity == wanted._session.plan.identity)
    except TrainpipesError:
        return False


def _of_tokens(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the recipe of bare ids has, too."""
    shared = ("max_length", "batch_size", "epochs", "seed", "num_shards")
    return {name: given[name] for name in shared if name in given}


def _call(recipe: str, folder: str, options: Mapping[str, Any]) -> str:
    said = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"tp.recipe({recipe!r}, {folder!r}{said})"
