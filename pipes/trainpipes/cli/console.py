"""What the command prints: results to stdout; notes, warnings and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from trainpipes._internal.table import in_color, table, terminal_width
from trainpipes.errors.text import amount, escaped


def out(text: str = "") -> None:
    sys.stdout.write(f"{printable(text)}\n")


def print_json(value: Any) -> None:
    """Print one JSON value; NaN and infinity as null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    is_utf = encoding.startswith("utf")
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    sys.stdout.write(json.dumps(finite, indent=2, ensure_ascii=not is_utf) + "\n")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    out(table([list(map(printable, row)) for row in rows], terminal_width()))


def print_manifest(value: Any, **more: Any) -> None:
    """Print what was written, without the entry of each file."""
    fields = {k: v for k, v in vars(value).items() if k[0] != "_" and k not in {"entries", "notes"}}
    print_json({**fields, **more})


def print_written(
    done: Any, seconds: float, *more: tuple[str, str], rows: str = "", size: str = ""
) -> None:
    """Print how much was written, with what ``rows`` and ``size`` say besides."""
    there = f", {done.kept:,} of them there already" if done.kept else ""
    lines = [("files", f"{len(done.files):,}{there}"), ("rows", f"{done.rows:,}{rows}"), *more]
    print_table([*lines, ("size", f"{amount(done.bytes)}{size}"), ("took", f"{seconds:,.1f} s")])


def note(text: str, label: str = "") -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        click.echo(f"{label}{printable(text)}", err=True, color=in_color(sys.stderr))


def warning_line(text: str) -> None:
    note(" ".join(text.split()), f"{click.style('warning:', fg='yellow')} ")


def error_line(text: str) -> None:
    note(text, f"{click.style('error:', fg='red')} ")


def printable(text: str) -> str:
    r"""A text for a terminal, its control characters as they are written in Python.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return "\n".join(map(escaped, text.split("\n")))
