"""``trainpipes repack``: data files rewritten for training."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click

from trainpipes.cli.app import Command
from trainpipes.cli.console import note, out, print_json
from trainpipes.cli.ray_options import engine_options
from trainpipes.cli.storage_options import STORAGE_OPTIONS
from trainpipes.cli.storage_options import storage_options as parsed
from trainpipes.cli.typed_options import options_as_typed

if TYPE_CHECKING:
    from trainpipes.prepare import Repacked

__all__ = ["command"]

CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")
#: Bytes of memory that can do: the library's, which is not imported to refuse a command line.
LEAST_MEMORY = 16 << 20
#: A column's name, which may stand in quotes as in CSV, and what ends it.
NAME = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^,]*?))\s*(,|$)')
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(_: click.Context, __: click.Parameter, given: str) -> int:
    """A number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", given.strip().lower())
    if found is None:
        raise click.UsageError(f"--memory-limit is a number of bytes, as 512M or 4G, got {given!r}")
    size = int(float(found[1]) * UNITS[found[2]])
    if size < LEAST_MEMORY:
        raise click.UsageError(f"--memory-limit is 16M or more, got {given!r}")
    return size


@click.command("repack", cls=Command)
@click.argument("files", metavar="IN...", nargs=-1, required=True)
@click.argument("folder", metavar="OUT")
@click.option("--shuffle", is_flag=True, help="Put all rows into a random order.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random order.")
@click.option(
    "--sort", multiple=True, metavar="COLUMNS",
    help="Sort by these columns, such as a,b. Repeatable. Quote a name that has a comma, as in CSV.",
)  # fmt: skip
@click.option("--descending", is_flag=True, help="Sort the largest first.")
@click.option("--drop-duplicates", is_flag=True, help="Keep only the first of equal rows.")
@click.option(
    "--drop-duplicates-by", multiple=True, metavar="COLUMNS",
    help="Keep only the first of rows that are equal in these columns; written as for --sort.",
)  # fmt: skip
@click.option(
    "--columns",
    multiple=True,
    metavar="COLUMNS",
    help="Keep only these columns; written as for --sort.",
)
@click.option(
    "--row-group-size", type=click.IntRange(1), metavar="ROWS",
    help="Rows in a row group. [default: 8 MiB of rows, 16,384 at most]",
)  # fmt: skip
@click.option("--rows-per-file", type=click.IntRange(1), metavar="ROWS", help="Rows in a file.")
@click.option(
    "--num-files", "number", type=click.IntRange(1), metavar="N",
    help="How many files. [default: one for each 512 MiB of rows in memory]",
)  # fmt: skip
@click.option("--compression", type=click.Choice(CODECS), default="zstd", show_default=True)
@click.option("--compression-level", type=int, help="Level for zstd, gzip or brotli.")
@click.option(
    "--memory-limit", "memory", callback=_size, default="512M", show_default=True, metavar="SIZE",
    help="Memory for rows that are being worked on.",
)  # fmt: skip
@click.option(
    "--temp-dir", "temporary_folder", metavar="FOLDER",
    help="Where to put temporary files. [default: OUT; where that is a URL, the system's]",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1), help="Threads to use. [default: one a core, 4 at most]"
)
@engine_options("threads")
@click.option("--verify", is_flag=True, help="Read each file back and compare it.")
@click.option("--overwrite", is_flag=True, help="Remove earlier output in OUT, and begin anew.")
@STORAGE_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    files: tuple[str, ...],
    folder: str,
    shuffle: bool,
    seed: int,
    sort: tuple[str, ...],
    descending: bool,
    drop_duplicates: bool,
    drop_duplicates_by: tuple[str, ...],
    columns: tuple[str, ...],
    row_group_size: int | None,
    rows_per_file: int | None,
    number: int | None,
    compression: str,
    compression_level: int | None,
    memory: int,
    temporary_folder: str | None,
    threads: int | None,
    engine: str,
    address: str | None,
    shared_filesystem: bool,
    verify: bool,
    overwrite: bool,
    storage_options: str | None,
    as_json: bool,
) -> None:
    """Rewrite data files for training: as Parquet, in a random order, sorted, or without duplicates.

    IN are files, folders, globs or URLs of one format: Parquet, JSON lines, CSV, Arrow, text, NumPy, tar; OUT
    is a new folder, or its URL. Each row is written once. The same command goes on where it was stopped.

    \b
    Examples:
      trainpipes repack chat.jsonl packed --shuffle --seed 1
      trainpipes repack data once --drop-duplicates-by text --memory-limit 4G
      trainpipes repack data s3://bucket/packed --shuffle
    """
    for one, other, both in (
        ("--drop-duplicates", "--drop-duplicates-by", drop_duplicates and drop_duplicates_by),
        ("--shuffle", "--sort", shuffle and sort),
        ("--num-files", "--rows-per-file", number and rows_per_file),
    ):
        if both:
            raise click.UsageError(f"give {one} or {other}, not both")
    names = [_names(given) for given in (sort, drop_duplicates_by, columns)]
    from trainpipes.prepare import repack

    options = parsed(storage_options)
    try:
        with options_as_typed():
            done = repack(
                files if len(files) > 1 else files[0], folder,
                shuffle=shuffle, seed=seed, sort=names[0], descending=descending,
                drop_duplicates=names[1] or drop_duplicates,
                columns=names[2], row_group_size=row_group_size, rows_per_file=rows_per_file,
                num_files=number, compression=None if compression == "none" else compression,
                compression_level=compression_level, memory_limit=memory,
                temp_dir=temporary_folder, overwrite=overwrite, verify=verify,
                threads=threads, storage_options=options,
                engine=engine,  # type: ignore[arg-type]
                address=address, shared_filesystem=shared_filesystem,
            )  # fmt: skip
    except KeyboardInterrupt:
        note("the same command goes on where this one was stopped; --overwrite begins anew")
        raise
    _say(done, as_json)


def _names(given: tuple[str, ...]) -> list[str] | None:
    """The names of columns in some texts; None of none."""
    names = []
    for text in given:
        at, comma = 0, ","
        while comma:
            found = NAME.match(text, at)
            assert found is not None
            at, comma = found.end(), found[3]
            names.append(found[2] if found[1] is None else found[1].replace('""', '"'))
        if "" in names:
            raise click.UsageError(
                f"columns are names with commas between them, as a,b, got {text!r}"
            )
    return names or None


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

    groups = f"{done.row_groups:,} row group{'s' * (done.row_groups > 1)}"
    files = f"{len(done.files):,} file{'s' * (len(done.files) > 1)}"
    dropped = f" of {done.rows_in:,}; {done.duplicates:,} were there before"
    size = "" if done.bytes_in is None else f", read {amount(done.bytes_in)}"
    there = f", {done.kept:,} of them there already" if done.kept else ""
    lines = [
        ("wrote", f"{files}, {groups}, {amount(done.bytes_out)}{size}{there}"),
        ("rows", f"{done.rows:,}{dropped if done.duplicates else ''}"),
        ("took", f"{done.seconds:,.1f} s"),
    ]
    if not made:
        lines[0] = ("there", f"{files}, {groups}, {amount(done.bytes_out)}, all written before")
        del lines[2]
    for label, text in lines:
        out().print(f"{label:<8}{text}", soft_wrap=True)
    note("look at it:")
    out().print(f"trainpipes inspect {shlex.quote(done.folder)}", soft_wrap=True)
