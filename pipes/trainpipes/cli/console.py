"""What the command prints: results to stdout; notes, warnings and errors to stderr.

Rich decides on colours: ``NO_COLOR`` takes them away, ``FORCE_COLOR`` gives them to a pipe. Text of files and
errors is never markup, and control characters in it are spelt out.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where no terminal says how many it has.
WIDTH = 100
#: Control characters but for line breaks and tabs, and those that turn the direction of text.
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def out() -> Console:
    """The console of results."""
    return _console(stderr=False)


def print_json(value: Any) -> None:
    """A result for a script: one JSON value; NaN and infinity, which JSON lacks, as null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    is_utf = encoding.startswith("utf")
    print(json.dumps(_finite(value), indent=2, ensure_ascii=not is_utf))  # noqa: T201


def print_pairs(*pairs: tuple[str, str]) -> None:
    """Results, each with its name before it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs:
        table.add_row(Text(name, "bold"), printable(text))
    out().print(table)


def public_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without private ones."""
    return {name: inner for name, inner in vars(value).items() if not name.startswith("_")}


def note(text: str) -> None:
    """Something that is good to know, to stderr."""
    _to_stderr(printable(text))


def warning_line(text: str) -> None:
    """A warning, in one line, to stderr."""
    _labelled("warning", "yellow", " ".join(text.split()))


def error_line(text: str) -> None:
    """What went wrong, to stderr."""
    _labelled("error", "bold red", text)


def printable(text: str) -> str:
    r"""A text for a terminal, its control characters as they are written in Python.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return text.translate(_CONTROL)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS")
    width = None if known else WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def _labelled(label: str, style: str, text: str) -> None:
    from rich.text import Text

    _to_stderr(Text.assemble((f"{label}:", style), f" {printable(text)}"))


def _to_stderr(text: Any) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        _console(stderr=True).print(text, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
