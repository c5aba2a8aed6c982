"""``--storage-options``: what a file system needs to know, as JSON. Never shown, not even in an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["STORAGE_OPTIONS", "storage_options"]

STORAGE_OPTIONS = click.option(
    "--storage-options",
    metavar="JSON",
    help="Options of the file system, such as credentials: JSON, or @FILE with JSON.",
)


def storage_options(given: str | None) -> dict[str, Any] | None:
    """The options of a text, or of the file that it names; None of none.

    Raises:
        click.UsageError: they are no JSON object, or the file cannot be read.
    """
    if given is None:
        return None
    text = given
    if given.startswith("@"):
        try:
            text = Path(given[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(
                f"--storage-options: {given[1:]} cannot be read ({type(error).__name__}): give the path of a "
                "file with JSON"
            ) from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.UsageError(
            "--storage-options takes a JSON object, such as '{\"anon\": true}', or @FILE with one; "
            "the value given is not one; it is not shown, since it may hold a secret"
        )
    return found
