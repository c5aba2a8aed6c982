"""``trainpipes repack``: data files rewritten for training."""

from __future__ import annotations

import csv
import shlex
import time
from typing import Any

import click

from trainpipes.cli import options as o
from trainpipes.cli.console import note, out, print_manifest, print_written
from trainpipes.cli.options import option


def _names(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[str] | None:
    names = [name for line in csv.reader(given, skipinitialspace=True) for name in line]
    if "" in names:
        raise click.BadParameter(f"must be names with commas between them, as a,b, got {given}")
    return names or None


@click.command("repack")
@click.argument("files", metavar="IN...", nargs=-1, required=True)
@click.argument("folder", metavar="OUT")
@option("--shuffle", is_flag=True, help="Put all rows into a random order.")
@option("--seed", type=int, default=0, help="Seed of the random order.")
@option(
    "--columns",
    multiple=True,
    metavar="COLUMNS",
    callback=_names,
    help="Keep only these: a,b. Quote a name with a comma, as in CSV.",
)
@option("--row-group-size", type=o.COUNT, help="Rows in a row group; 8 MiB of them if left out.")
@option("--rows-per-file", type=o.COUNT, help="Rows in a file; 512 MiB of them if left out.")
@option("--num-files", type=o.COUNT, help="How many files to write, instead.")
@o.COMPRESSION
@option("--memory-limit", default="512MB", help="Memory for rows that are worked on.")
@option("--temp-dir", help="For temporary files; OUT, or of a URL the system's, if left out.")
@o.takes_executor
@o.OVERWRITE
@o.STORAGE_OPTIONS
@o.AS_JSON
def command(files: tuple[str, ...], folder: str, as_json: bool, **others: Any) -> None:
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
        note("the same command goes on where this one was stopped; --overwrite begins anew")
        raise
    seconds = time.monotonic() - started
    if as_json:
        print_manifest(done, seconds=seconds)
        return
    print_written(done, seconds)
    note("look at it:")
    out(f"trainpipes inspect {shlex.quote(done.folder)}")
