"""``trainpipes inspect``: what files of data hold, and what to know of them before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trainpipes.cli.console import error_line, out, print_json
from trainpipes.cli.options import STORAGE_OPTIONS
from trainpipes.cli.options import storage_options as given_options

if TYPE_CHECKING:
    from trainpipes.look.inspection import Inspection

__all__ = ["command"]


@click.command("inspect")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--tokenizer",
    help="Count tokens with this tokenizer: a path, a folder, or bytes. Left out, bytes are counted.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    help="Show the lengths of this column. Repeatable: lengths of several are added.",
)
@click.option("--rows", type=click.IntRange(0), default=3, show_default=True, help="Rows to show.")
@click.option(
    "--sample",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="The most rows to look at.",
)
@click.option("--duplicates", is_flag=True, help="Read all rows, and count duplicates.")
@click.option(
    "--num-shards",
    type=click.IntRange(1),
    default=24,
    show_default=True,
    help="num_shards of the pipeline that will read the files.",
)
@STORAGE_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there is a warning.")
def command(
    files: tuple[str, ...],
    tokenizer: str | None,
    columns: tuple[str, ...],
    rows: int,
    sample: int,
    duplicates: bool,
    num_shards: int,
    storage_options: str | None,
    as_json: bool,
    strict: bool,
) -> int:
    """Show what data files hold, how long their texts are, and what to mend before training.

    FILES are paths, folders, globs or URLs of Parquet, Arrow, JSON, CSV, text, NumPy, tar or image files.
    Exit code 1: a file cannot be read, or there are no rows.

    \b
    Examples:
      trainpipes inspect data
      trainpipes inspect 'data/*.parquet' --tokenizer bytes --column text
    """
    options = given_options(storage_options)
    from trainpipes.look.inspection import inspect_files

    found = inspect_files(
        list(files),
        tokenizer=tokenizer,
        column=columns or None,
        rows=rows,
        sample=sample,
        duplicates=duplicates,
        num_shards=num_shards,
        storage_options=options,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        out().print(found.text(out().width), soft_wrap=True)
    why = _failed(found, strict)
    if why:
        error_line(why)
    return 1 if why else 0


def _failed(found: Inspection, strict: bool) -> str:
    """Why the exit code is 1; "" if it is 0."""
    if bad := len(found.unreadable):
        from trainpipes.look.inspection.as_text import near

        more = f" and {bad - 1:,} more" if bad > 1 else ""
        return f"cannot be read: {near(found.unreadable[0].path)}{more}"
    if not found.readable:
        return "there are no rows in these files"
    if strict and (count := len(found.warnings)):
        return f"--strict: there {'is 1 warning' if count == 1 else f'are {count:,} warnings'}"
    return ""
