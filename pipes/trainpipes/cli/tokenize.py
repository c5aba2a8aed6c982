"""``trainpipes tokenize``: token ids of data files, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.console import note, out, print_json, print_pairs
from trainpipes.cli.options import AS_JSON, CODECS, engine_options, storage_options
from trainpipes.cli.pipelines import PipelineOptions, one_pipeline, takes_pipeline
from trainpipes.cli.recipes import recipe_names

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.prepare import Tokenized

__all__ = ["command"]


@click.command("tokenize")
@click.argument("paths", metavar="[IN]... OUT", nargs=-1, required=True)
@click.option(
    "--recipe", shell_complete=recipe_names, help="The recipe that will train on the token ids."
)
@click.option(
    "--config", type=click.Path(), help="A pipeline, as YAML, instead of IN and a recipe."
)
@takes_pipeline
@click.option(
    "--format", type=click.Choice(("parquet", "bin")), default="parquet", show_default=True,
    help="parquet: rows with all their columns. bin: token ids alone, as in nanoGPT's train.bin.",
)  # fmt: skip
@click.option(
    "--dtype", help="Type of the ids in bin files. [default: uint16 where the vocabulary fits]"
)
@click.option(
    "--compression", type=CODECS, default="zstd", show_default=True,
    help="Compression of Parquet files.",
)  # fmt: skip
@click.option(
    "--bytes-per-file", type=click.IntRange(1), default=256 << 20, metavar="BYTES",
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
@AS_JSON
def command(
    paths: tuple[str, ...],
    recipe: str | None,
    config: str | None,
    given: PipelineOptions,
    compression: str,
    as_json: bool,
    **others: Any,
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
    if recipe is not None and not files:
        raise click.UsageError(f"give files and a folder to write to: IN... OUT, got {folder}")
    pipe = one_pipeline(recipe, config, given, files)
    storage = storage_options(given.storage_options) if "://" in folder else None
    from trainpipes.prepare import tokenize

    started = time.monotonic()
    done = tokenize(
        pipe, folder, compression=None if compression == "none" else compression,
        storage_options=storage, **others,
    )  # fmt: skip
    options = {} if recipe is None else given.recipe_options()
    options.pop("storage_options", None)
    train = _train(done, folder, recipe, options, storage)
    _say(done, train, time.monotonic() - started, as_json)


def _say(done: Tokenized, train: str, seconds: float, as_json: bool) -> None:
    made = len(done.files) - done.kept
    if as_json:
        print_json(
            {
                "folder": done.folder, "files": list(done.files), "files_made": made, "rows": done.rows,
                "rows_read": done.read, "tokens": done.tokens, "bytes": done.bytes,
                "format": done.format, "dtype": done.dtype, "columns": done.columns,
                "seconds": round(seconds, 3), "train": train,
            }
        )  # fmt: skip
        return
    from trainpipes._internal.amount import amount

    size = f"{len(done.files):,} file{'s' * (len(done.files) > 1)}, {amount(done.bytes)}"
    there = f", {done.kept:,} of them there already" if done.kept else ""
    left_out = f" of {done.read:,}; the pipeline leaves the others out"
    lines = [
        ("wrote", f"{size}{there}") if made else ("there", f"{size}, all written before"),
        ("rows", f"{done.rows:,}{left_out if done.read > done.rows else ''}"),
        ("tokens", f"{done.tokens:,}, {done.tokens / max(1, done.rows):,.1f} a row"),
    ]
    if done.dtype is not None:
        lines.append(("ids", done.dtype))
    if made:
        lines.append(("took", f"{seconds:,.1f} s"))
    print_pairs(lines)
    note("train with:")
    out().print(train, soft_wrap=True)


def _train(
    done: Tokenized,
    folder: str,
    recipe: str | None,
    given: Mapping[str, Any],
    storage: dict[str, Any] | None,
) -> str:
    """Python that trains on the files, and gives the batches that would have been made on the way."""
    if done.format == "bin":
        shared = ("max_length", "batch_size", "epochs", "seed", "num_shards")
        options = {name: given[name] for name in shared if name in given}
        return _call("tokens", f"{folder.rstrip('/')}/*.bin", {"dtype": done.dtype, **options})
    if recipe is not None:
        options = {name: value for name, value in given.items() if name != "cache"}
        # Options that name columns of texts have nothing to name there.
        named = {k for k, v in options.items() if isinstance(v, str) and v not in done.columns}
        for left_out in (set(), named - {"tokenizer"}):
            tried = {name: value for name, value in options.items() if name not in left_out}
            there = tried if storage is None else {**tried, "storage_options": storage}
            if _gives(recipe, done, there):
                return _call(recipe, folder, tried)
    first, *rest = repr(done.pipeline).splitlines()
    return "\n".join([f"tp.{first}", *rest])


def _gives(recipe: str, done: Tokenized, options: dict[str, Any]) -> bool:
    """Whether a recipe makes the pipeline that is left to train with."""
    from trainpipes import TrainpipesError
    from trainpipes import recipe as built

    def identity(pipe: Pipeline) -> str:
        return pipe._session.plan.identity

    try:
        return identity(built(recipe, done.folder, **options)) == identity(done.pipeline)
    except TrainpipesError:
        return False


def _call(recipe: str, folder: str, options: Mapping[str, Any]) -> str:
    said = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"tp.recipe({recipe!r}, {folder!r}{said})"
