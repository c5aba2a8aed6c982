"""``trainpipes inspect``: what data files hold, and what to fix before training."""

from __future__ import annotations

from typing import Any

import click

from trainpipes.cli.console import out, print_json
from trainpipes.cli.options import AS_JSON, COUNT, STORAGE_OPTIONS, option


@click.command("inspect")
@click.argument("files", nargs=-1, required=True)
@option("--tokenizer", help="Count tokens with it: a path, a folder, or bytes; bytes if left out.")
@option("--column", multiple=True, help="Measure its lengths; those of several are added.")
@option("--rows", type=click.IntRange(0), default=3, help="Rows to show.")
@option("--sample", type=COUNT, default=10_000, help="The most rows to look at.")
@STORAGE_OPTIONS
@AS_JSON
@option("--strict", is_flag=True, help="Exit with 1 if there is a warning.")
def command(
    files: tuple[str, ...], column: tuple[str, ...], as_json: bool, strict: bool, **options: Any
) -> None:
    """Show what data files hold, how long their texts are, and what to fix before training.

    FILES are paths, folders, globs or URLs of Parquet, Arrow, JSON, CSV, text, NumPy, tar or image files; or
    the folder of a Delta, Lance or Iceberg table, of which the newest version is read.
    Exit code 1: a file or a row of the sample cannot be read, or there are no rows.

    \b
    Examples:
      trainpipes inspect data
      trainpipes inspect 'data/*.parquet' --tokenizer bytes --column text
    """
    from trainpipes.look import inspect_files

    report = inspect_files(list(files), column=column or None, **options)
    if as_json:
        print_json(report.to_dict())
    else:
        out(str(report))
    if report.unreadable:
        more = len(report.unreadable) - 1
        others = f" and {more:,} more" if more else ""
        raise click.ClickException(f"cannot be read: {next(iter(report.unreadable))}{others}")
    if report.bad_rows:
        many = "rows" if report.bad_rows > 1 else "row"
        raise click.ClickException(f"{report.bad_rows:,} {many} of the sample cannot be used")
    if not report.readable:
        raise click.ClickException("there are no rows in these files")
    if strict and report.findings:
        raise click.ClickException(f"--strict: there are warnings ({len(report.findings):,})")
