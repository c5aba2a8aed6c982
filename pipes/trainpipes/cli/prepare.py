"""Commands that write files for training: ``repack`` rows, ``tokenize`` token ids."""

from __future__ import annotations

import csv
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli import shared
from trainpipes.errors import hidden

if TYPE_CHECKING:
    from trainpipes.prepare import Tokenized


def _names(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[str] | None:
    names = [name for line in csv.reader(texts, skipinitialspace=True) for name in line]
    if "" in names or (texts and not names):
        raise click.BadParameter(f"must be names with commas between them, as a,b, got {texts}")
    return names or None


@click.command("repack")
@click.argument("files", metavar="IN...", nargs=-1, required=True)
@click.argument("folder", metavar="OUT")
@shared.option("--shuffle", is_flag=True, help="Put all rows into a random order.")
@shared.option("--seed", type=int, default=0, help="Seed of the random order.")
@shared.option(
    "--columns",
    multiple=True,
    metavar="COLUMNS",
    callback=_names,
    help="Keep only these: a,b. Quote a name with a comma, as in CSV.",
)
@shared.option(
    "--row-group-size", type=shared.COUNT, help="Rows in a row group; 8 MiB of them if left out."
)
@shared.option(
    "--rows-per-file", type=shared.COUNT, help="Rows in a file; 512 MiB of them if left out."
)
@shared.option("--num-files", type=shared.COUNT, help="How many files to write, instead.")
@shared.COMPRESSION
@shared.option("--memory-limit", default="512MB", help="Memory for rows that are worked on.")
@shared.option(
    "--temp-dir", help="For temporary files; OUT, or of a URL the system's, if left out."
)
@shared.takes_executor
@shared.OVERWRITE
@shared.STORAGE_OPTIONS
@shared.AS_JSON
def repack_command(files: tuple[str, ...], folder: str, as_json: bool, **others: Any) -> None:
    """Rewrite data files as Parquet, shuffled if wanted.

    IN are files, folders, globs or URLs of one format: Parquet, JSON lines, CSV, Arrow, text, NumPy, tar; OUT
    is a new folder, or its URL. Each row is written once. The same command goes on where it was stopped.

    \b
    Examples:
      trainpipes repack chat.jsonl packed --shuffle --seed 1
      trainpipes repack data s3://bucket/packed --shuffle
    """
    from trainpipes.prepare import repack

    started = time.monotonic()
    try:
        done = repack(files if len(files) > 1 else files[0], folder, **others)
    except KeyboardInterrupt:
        same = "the same command" + " without --overwrite" * others["overwrite"]
        shared.note(f"{same} goes on where this one was stopped; --overwrite begins anew")
        raise
    seconds = time.monotonic() - started
    if as_json:
        shared.print_manifest(done, seconds=seconds)
        return
    shared.print_written(done, seconds)
    shared.note("look at it:")
    shared.out(f"trainpipes inspect {shlex.quote(hidden(done.folder))}")


FORMATS = click.Choice(("parquet", "bin"))


@click.command("tokenize")
@click.argument("paths", metavar="[IN]... OUT", nargs=-1, required=True)
@shared.recipe_or_config
@shared.takes_pipeline
@shared.option(
    "--format", type=FORMATS, default="parquet", help="bin: ids alone, as nanoGPT's train.bin."
)
@shared.option(
    "--dtype", help="Of ids in bin files; uint16, where the vocabulary fits, if left out."
)
@shared.COMPRESSION
@shared.option(
    "--bytes-per-file", type=shared.COUNT, default=256 << 20, help="Split input files above this."
)
@shared.takes_executor
@shared.VERIFY
@shared.OVERWRITE
@shared.AS_JSON
def tokenize_command(
    paths: tuple[str, ...],
    recipe: str | None,
    config: str | None,
    pipe_options: shared.PipelineOptions,
    verify: bool,
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
    pipe = pipe_options.named(recipe, config, files)
    storage = pipe_options.storage_options if "://" in folder else None
    from trainpipes.prepare import tokenize

    started = time.monotonic()
    done = tokenize(pipe, folder, storage_options=storage, **others)
    if verify:
        done.verify()
    seconds = time.monotonic() - started
    options = {} if recipe is None else pipe_options.recipe_options()
    options |= {"storage_options": storage} if storage else {}
    train = hidden(_train(done, folder, recipe, options))
    if as_json:
        shared.print_manifest(done, seconds=seconds, train=train)
        return
    left_out = f" of {done.read:,}; the pipeline leaves the others out"
    kind = f" of {done.dtype}" if done.dtype else ""
    tokens = f"{done.tokens:,}, {done.tokens / max(1, done.rows):,.1f} a row"
    rows = left_out if done.read > done.rows else ""
    shared.print_written(done, seconds, ("tokens", tokens), rows=rows, size=kind)
    way = "train with this config:" if train.startswith("#") else "train with:"
    if done.format == "bin" and "://" in done.folder:
        way = "bare ids are read on this machine: copy them here, and train with their path:"
    shared.note(way)
    shared.out(train)


def _train(
    done: Tokenized, folder: str, recipe: str | None, pipeline_options: Mapping[str, Any]
) -> str:
    if done.format == "bin":
        recipe_options = ("max_length", "batch_size", "epochs", "seed", "num_shards")
        options = {
            name: pipeline_options[name] for name in recipe_options if name in pipeline_options
        }
        return _call("tokens", f"{folder.rstrip('/')}/*.bin", {"dtype": done.dtype, **options})
    import trainpipes
    from trainpipes import TrainpipesError, recipes
    from trainpipes import recipe as built

    if recipe is not None:
        # Options that name columns of texts have nothing to name there.
        columns = next(known.columns for known in recipes() if known.name == recipe)
        left = {k: v for k, v in pipeline_options.items() if k not in columns or v in done.columns}
        for name in ("cache", "files"):
            left.pop(name, None)
        with suppress(TrainpipesError):
            again = built(recipe, done.folder, **left)
            if again._plan().identity == done.pipeline._plan().identity:
                left.pop("storage_options", None)  # which may hold a secret
                return _call(recipe, folder, left)
    first, *rest = repr(done.pipeline).splitlines()
    lines = [f"tp.{first}", *rest]
    chain = lines[0] if not rest else "\n".join(["(", *(f"  {line}" for line in lines), ")"])
    with suppress(
        Exception
    ):  # functions, and what is long, are shown otherwise than they are written
        if eval(chain, {"tp": trainpipes}) == done.pipeline:
            return chain
    with suppress(TrainpipesError):
        return done.pipeline.to_yaml().rstrip()
    return f"tokenize(pipeline, {folder!r}).pipeline"


def _call(recipe: str, folder: str, options: Mapping[str, Any]) -> str:
    said = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"tp.recipe({recipe!r}, {folder!r}{said})"
