"""``trainpipes repack``: data files rewritten for training."""

from __future__ import annotations

import csv
import re
import shlex
from typing import TYPE_CHECKING

import click

from trainpipes.cli.console import note, out, print_json, print_pairs
from trainpipes.cli.options import AS_JSON, CODECS, STORAGE_OPTIONS, engine_options
from trainpipes.cli.options import storage_options as parsed

if TYPE_CHECKING:
    from trainpipes.prepare import Repacked

__all__ = ["command"]

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(_: click.Context, __: click.Parameter, given: str) -> int:
    """A number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", given.strip().lower())
    if found is None:
        raise click.BadParameter(f"must be a number of bytes, as 512M or 4G, got {given!r}")
    return int(float(found[1]) * UNITS[found[2]])


def _names(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[str] | None:
    """Names of columns, written as a line of CSV."""
    names = [name for line in csv.reader(given, skipinitialspace=True) for name in line]
    if "" in names:
        raise click.BadParameter(f"must be names with commas between them, as a,b, got {given}")
    return names or None


@click.command("repack")
@click.argument("files", metavar="IN...", nargs=-1, required=True)
@click.argument("folder", metavar="OUT")
@click.option("--shuffle", is_flag=True, help="Put all rows into a random order.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random order.")
@click.option(
    "--sort", multiple=True, metavar="COLUMNS", callback=_names,
    help="Sort by these columns, such as a,b. Repeatable. Quote a name that has a comma, as in CSV.",
)  # fmt: skip
@click.option("--descending", is_flag=True, help="Sort the largest first.")
@click.option("--drop-duplicates", is_flag=True, help="Keep only the first of equal rows.")
@click.option(
    "--drop-duplicates-by", multiple=True, metavar="COLUMNS", callback=_names,
    help="Keep only the first of rows that are equal in these columns; written as for --sort.",
)  # fmt: skip
@click.option(
    "--columns", multiple=True, metavar="COLUMNS", callback=_names,
    help="Keep only these columns; written as for --sort.",
)  # fmt: skip
@click.option(
    "--row-group-size", type=click.IntRange(1), metavar="ROWS",
    help="Rows in a row group. [default: 8 MiB of rows, 16,384 at most]",
)  # fmt: skip
@click.option("--rows-per-file", type=click.IntRange(1), metavar="ROWS", help="Rows in a file.")
@click.option(
    "--num-files", type=click.IntRange(1), metavar="N",
    help="How many files to write. [default: one for each 512 MiB of rows in memory]",
)  # fmt: skip
@click.option("--compression", type=CODECS, default="zstd", show_default=True)
@click.option("--compression-level", type=int, help="Level for zstd, gzip or brotli.")
@click.option(
    "--memory", callback=_size, default="512M", show_default=True, metavar="SIZE",
    help="Memory for rows that are being worked on.",
)  # fmt: skip
@click.option(
    "--temporary-folder", metavar="FOLDER",
    help="Where to put temporary files. [default: OUT; where that is a URL, the system's]",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1), help="Threads to use. [default: one a core, 4 at most]"
)
@engine_options("threads")
@click.option("--verify", is_flag=True, help="Read each file back and compare it.")
@click.option("--overwrite", is_flag=True, help="Remove earlier output in OUT, and begin anew.")
@STORAGE_OPTIONS
@AS_JSON
def command(
    files: tuple[str, ...],
    folder: str,
    drop_duplicates: bool,
    drop_duplicates_by: list[str] | None,
    num_files: int | None,
    compression: str,
    storage_options: str | None,
    as_json: bool,
    **others: object,
) -> None:
    """Rewrite data files for training: as Parquet, in a random order, sorted, or without duplicates.

    IN are files, folders, globs or URLs of one format: Parquet, JSON lines, CSV, Arrow, text, NumPy, tar; OUT
    is a new folder, or its URL. Each row is written once. The same command goes on where it was stopped.

    \b
    Examples:
      trainpipes repack chat.jsonl packed --shuffle --seed 1
      trainpipes repack data once --drop-duplicates-by text --memory 4G
      trainpipes repack data s3://bucket/packed --shuffle
    """
    storage = parsed(storage_options)
    from trainpipes.prepare import repack

    try:
        done = repack(
            files if len(files) > 1 else files[0], folder,
            drop_duplicates=drop_duplicates_by or drop_duplicates, files=num_files,
            compression=None if compression == "none" else compression,
            storage_options=storage, **others,  # type: ignore[arg-type]
        )  # fmt: skip
    except KeyboardInterrupt:
        note("the same command goes on where this one was stopped; --overwrite begins anew")
        raise
    _say(done, as_json)


def _say(done: Repacked, as_json: bool) -> None:
    made = len(done.files) - done.kept
    if as_json:
        print_json(
            {
                "folder": done.folder, "files": list(done.files), "files_made": made, "rows": done.rows,
                "rows_in": done.rows_in, "duplicates": done.duplicates,
                "row_groups": done.row_groups, "bytes_in": done.bytes_in,
                "bytes_out": done.bytes_out, "seconds": round(done.seconds, 3),
            }
        )  # fmt: skip
        return
    from trainpipes._internal.amount import amount

    read = "" if done.bytes_in is None else f", read {amount(done.bytes_in)}"
    there = f", {done.kept:,} of them there already" if done.kept else ""
    dropped = f" of {done.rows_in:,}; {done.duplicates:,} were there before"
    groups = f"{done.row_groups:,} row group{'s' * (done.row_groups > 1)}"
    size = (
        f"{len(done.files):,} file{'s' * (len(done.files) > 1)}, {groups}, {amount(done.bytes_out)}"
    )
    lines = [("rows", f"{done.rows:,}{dropped if done.duplicates else ''}")]
    if made:
        lines.insert(0, ("wrote", f"{size}{read}{there}"))
        lines.append(("took", f"{done.seconds:,.1f} s"))
    else:
        lines.insert(0, ("there", f"{size}, all written before"))
    print_pairs(lines)
    note("look at it:")
    out().print(f"trainpipes inspect {shlex.quote(done.folder)}", soft_wrap=True)
