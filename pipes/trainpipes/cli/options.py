"""Options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["AS_JSON", "CODECS", "STORAGE_OPTIONS", "engine_options", "storage_options"]

CODECS = click.Choice(("zstd", "snappy", "gzip", "brotli", "lz4", "none"))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
STORAGE_OPTIONS = click.option(
    "--storage-options",
    metavar="JSON",
    help="Options of the file system, such as credentials: JSON, or @FILE with JSON.",
)


def storage_options(given: str | None) -> dict[str, Any] | None:
    """The options of a text, or of the file that it names; None of none. They are never shown.

    Raises:
        click.UsageError: they are no JSON object, or the file cannot be read.
    """
    if given is None:
        return None
    try:
        text = Path(given[1:]).read_text("utf-8") if given.startswith("@") else given
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
            "--storage-options must be a JSON object, such as '{\"anon\": true}', or @FILE with one; what "
            "was given is not shown, since it may hold a secret"
        )
    return found


def engine_options(local: str) -> Callable[[Any], Any]:
    """``--engine``, ``--address`` and ``--shared-filesystem``: where the tasks of a command run.

    Args:
        local: the engine of this machine, which is the default.
    """
    engine = click.option(
        "--engine", type=click.Choice((local, "ray")), default=local, show_default=True,
        help=f"What does the work: {local} on this machine, or tasks on a Ray cluster.",
    )  # fmt: skip
    address = click.option(
        "--address",
        help="Address of the Ray cluster. [default: RAY_ADDRESS, or a cluster started here]",
    )
    shared = click.option(
        "--shared-filesystem", is_flag=True,
        help="Every node of the Ray cluster sees the same files at the same paths, as with NFS.",
    )  # fmt: skip
    return lambda command: engine(address(shared(command)))
