"""``trainpipes tokenize``: token ids of data files, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli import options as o
from trainpipes.cli.console import note, out, print_manifest, print_written
from trainpipes.cli.options import option
from trainpipes.cli.pipelines import PipelineOptions, recipe_or_config, takes_pipeline

if TYPE_CHECKING:
    from trainpipes.prepare import Tokenized

FORMATS = click.Choice(("parquet", "bin"))


@click.command("tokenize")
@click.argument("paths", metavar="[IN]... OUT", nargs=-1, required=True)
@recipe_or_config
@takes_pipeline
@option("--format", type=FORMATS, default="parquet", help="bin: ids alone, as nanoGPT's train.bin.")
@option("--dtype", help="Of ids in bin files; uint16, where the vocabulary fits, if left out.")
@o.COMPRESSION
@option("--bytes-per-file", type=o.COUNT, default=256 << 20, help="Split input files above this.")
@o.takes_executor
@o.VERIFY
@o.OVERWRITE
@o.AS_JSON
def command(
    paths: tuple[str, ...],
    recipe: str | None,
    config: str | None,
    given: PipelineOptions,
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
    pipe = given.named(recipe, config, files)
    storage = given.storage_options if "://" in folder else None
    from trainpipes.prepare import tokenize

    started = time.monotonic()
    done = tokenize(pipe, folder, storage_options=storage, **others)
    if verify:
        done.verify()
    seconds = time.monotonic() - started
    options = {} if recipe is None else given.recipe_options()
    options |= {"storage_options": storage} if storage else {}
    train = _train(done, folder, recipe, options)
    if as_json:
        print_manifest(done, seconds=seconds, train=train)
        return
    left_out = f" of {done.read:,}; the pipeline leaves the others out"
    kind = f" of {done.dtype}" if done.dtype else ""
    tokens = f"{done.tokens:,}, {done.tokens / max(1, done.rows):,.1f} a row"
    rows = left_out if done.read > done.rows else ""
    print_written(done, seconds, ("tokens", tokens), rows=rows, size=kind)
    note("train with:")
    out(train)


def _train(done: Tokenized, folder: str, recipe: str | None, given: Mapping[str, Any]) -> str:
    if done.format == "bin":
        shared = ("max_length", "batch_size", "epochs", "seed", "num_shards")
        options = {name: given[name] for name in shared if name in given}
        return _call("tokens", f"{folder.rstrip('/')}/*.bin", {"dtype": done.dtype, **options})
    if recipe is not None:
        from trainpipes import TrainpipesError, recipes
        from trainpipes import recipe as built

        # Options that name columns of texts have nothing to name there.
        columns = next(known.columns for known in recipes() if known.name == recipe)
        kept = {k: v for k, v in given.items() if k not in columns or v in done.columns}
        kept.pop("cache", None)
        with suppress(TrainpipesError):
            again = built(recipe, done.folder, **kept)
            if again._plan().identity == done.pipeline._plan().identity:
                kept.pop("storage_options", None)  # which may hold a secret
                return _call(recipe, folder, kept)
    first, *rest = repr(done.pipeline).splitlines()
    lines = [f"tp.{first}", *rest]
    return lines[0] if len(lines) == 1 else "\n".join(["(", *(f"  {line}" for line in lines), ")"])


def _call(recipe: str, folder: str, options: Mapping[str, Any]) -> str:
    said = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"tp.recipe({recipe!r}, {folder!r}{said})"
