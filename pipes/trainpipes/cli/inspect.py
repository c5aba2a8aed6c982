"""``trainpipes inspect``: what data files hold, and what to fix before training."""

from __future__ import annotations

import json
from typing import Any

import click

from trainpipes.cli.options import STORAGE_OPTIONS
from trainpipes.cli.options import storage_options as given_options


@click.command("inspect")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--tokenizer",
    help="Count tokens with this tokenizer: a path, a folder, or bytes. Left out, bytes are counted.",
)
@click.option(
    "--column",
    multiple=True,
    help="Measure the lengths of this column. Repeatable: lengths of several are added.",
)
@click.option("--max-length", type=click.IntRange(1), help="Report rows longer than this.")
@click.option("--rows", type=click.IntRange(0), default=3, show_default=True, help="Rows to show.")
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="The most rows to look at.",
)
@STORAGE_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there is a warning.")
def command(
    files: tuple[str, ...],
    column: tuple[str, ...],
    storage_options: str | None,
    as_json: bool,
    strict: bool,
    **options: Any,
) -> None:
    """Show what data files hold, how long their texts are, and what to fix before training.

    FILES are paths, folders, globs or URLs of Parquet, Arrow, JSON, CSV, text, NumPy, tar or image files.
    Exit code 1: a file cannot be read, or there are no rows.

    \b
    Examples:
      trainpipes inspect data
      trainpipes inspect 'data/*.parquet' --tokenizer bytes --column text
    """
    storage = given_options(storage_options)
    from trainpipes.look.inspect import inspect_files

    found = inspect_files(list(files), column=column or None, storage_options=storage, **options)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if found.unreadable:
        more = len(found.unreadable) - 1
        raise click.ClickException(
            f"cannot be read: {next(iter(found.unreadable))}{f' and {more:,} more' if more else ''}"
        )
    if not found.readable:
        raise click.ClickException("there are no rows in these files")
    if strict and found.findings:
        raise click.ClickException(f"--strict: there are warnings ({len(found.findings):,})")
