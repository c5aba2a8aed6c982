"""Errors of the library in the words of the command line: ``--overwrite`` for ``overwrite=True``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

__all__ = ["as_typed", "options_as_typed"]


@contextmanager
def options_as_typed() -> Iterator[None]:
    """Let errors of the library name the options of the command at hand as they are typed."""
    context = click.get_current_context()
    names = [name for param in context.command.params for name in param.opts]
    options = {name[2:].replace("-", "_"): name for name in names if name.startswith("--")}
    try:
        yield
    except Exception as error:
        known = sys.modules.get("trainpipes.errors")
        if known and isinstance(error, known.TrainpipesError):
            error.message = as_typed(error.message, context.command.name or "", options)
        raise


def as_typed(text: str, function: str, options: Mapping[str, str]) -> str:
    """A text that names options as Python has them, as they are typed.

    Args:
        text: an error of the library.
        function: whose options they are.
        options: as they are typed, by their names.

    >>> options = {"overwrite": "--overwrite", "num_files": "--num-files"}
    >>> as_typed("repack(num_files=9): give fewer files, or overwrite=True", "repack", options)
    '--num-files 9: give fewer files, or --overwrite'
    """

    def given(found: re.Match[str]) -> str:
        typed, value = options.get(found[1]), found[2].strip("\"'")
        if typed is None:
            return found[0]
        return typed if value in ("True", "...") else f"{typed} {value}"

    def called(found: re.Match[str]) -> str:
        inner = options.get(found[1], found[1])
        return inner if inner.startswith("--") else found[0] if inner else function

    text = re.sub(r"(?<![\w./=-])(\w+)=(\.\.\.|[^\s,;:()\[\]{}]+)", given, text)
    return re.sub(rf"(?<![\w.]){function}\(([^()]*)\)", called, text)
