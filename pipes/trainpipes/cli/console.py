"""What the command prints: results to stdout, all else to stderr.

Colours and progress only on a terminal. ``NO_COLOR`` takes the colours away, ``FORCE_COLOR`` gives them to a
pipe, too. Text of files and errors is printed as it is, never as markup, and what would move the cursor or
change the terminal is spelt out.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "err", "error_line", "forget_consoles", "note", "out", "print_json", "printable",
    "spell_out_what_cannot_be_encoded", "warning_line",
]  # fmt: skip

#: Columns where no terminal says how many it has.
WIDTH = 100
#: Characters that move the cursor or are not there to be seen; lines and tabs stay.
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


@cache
def out() -> Console:
    """The console of results."""
    return _console(stderr=False)


@cache
def err() -> Console:
    """The console of notes, warnings and errors."""
    return _console(stderr=True)


def forget_consoles() -> None:
    """Look at the environment and the terminal again when something is printed next."""
    out.cache_clear()
    err.cache_clear()


def print_json(value: Any) -> None:
    """A result for a script: one JSON value; NaN and infinity, which JSON lacks, as null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    ascii_only = not encoding.startswith("utf")
    print(json.dumps(_finite(value), indent=2, ensure_ascii=ascii_only))  # noqa: T201


def note(text: str) -> None:
    """Something that is good to know, to stderr."""
    _to_stderr(printable(text))


def warning_line(text: str) -> None:
    """A warning, in one line, to stderr."""
    _line("warning", "yellow", " ".join(text.split()))


def error_line(text: str) -> None:
    """What went wrong, to stderr."""
    _line("error", "bold red", text)


def printable(text: str) -> str:
    r"""A text of a file, for a terminal: control characters as they are written in Python.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return text.translate(_CONTROL)


def spell_out_what_cannot_be_encoded() -> None:
    """Let no character make printing fail: what a stream's encoding lacks is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream is not None and stream.isatty()
    columns = os.environ.get("COLUMNS", "")
    return Console(
        stderr=stderr,
        color_system=_colours(terminal),
        force_terminal=terminal,  # else FORCE_COLOR would draw progress into files
        width=None if terminal or (columns.isdecimal() and int(columns)) else WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _colours(terminal: bool) -> Any:
    if os.environ.get("NO_COLOR"):
        return None
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0") and not terminal:
        return "256"
    return "auto"


def _line(kind: str, style: str, text: str) -> None:
    from rich.text import Text

    _to_stderr(Text.assemble((f"{kind}:", style), f" {printable(text)}"))


def _to_stderr(text: Any) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        err().print(text, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
