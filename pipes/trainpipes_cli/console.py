"""What the command prints: results to stdout, all else to stderr.

Colours and progress only on a terminal, and no colours where ``NO_COLOR`` is set, which ``rich`` sees to.
Text of files and errors is printed as it is, never as markup.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error_line", "note", "out", "print_json", "warning_line"]


@cache
def out() -> Console:
    """The console of results."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


@cache
def err() -> Console:
    """The console of notes, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """A result for a script: one JSON value; NaN and infinity, which JSON lacks, as null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False))  # noqa: T201


def note(text: str) -> None:
    """Something that is good to know, to stderr."""
    err().print(text, soft_wrap=True)


def warning_line(text: str) -> None:
    _line("warning", "yellow", text)


def error_line(text: str) -> None:
    _line("error", "bold red", text)


def _line(kind: str, style: str, text: str) -> None:
    from rich.text import Text

    err().print(Text.assemble((f"{kind}:", style), f" {text}"), soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
