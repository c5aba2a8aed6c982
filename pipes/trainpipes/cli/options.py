"""Options that several commands have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainpipes.storage import Executor

option = functools.partial(click.option, show_default=True)

#: A whole number of 1 or more.
COUNT = click.IntRange(1)
CODECS = click.Choice(("zstd", "snappy", "gzip", "brotli", "lz4", "none"))
AS_JSON = option("--json", "as_json", is_flag=True, help="Print JSON.")
VERIFY = option("--verify", is_flag=True, help="Read each file back and compare it.")
OVERWRITE = option(
    "--overwrite", is_flag=True, help="Remove earlier output in OUT, and begin anew."
)
STORAGE_OPTIONS = option(
    "--storage-options",
    metavar="JSON",
    help="Options of the file system, such as credentials: JSON, or @FILE with JSON.",
)


def storage_options(given: str | None) -> dict[str, Any] | None:
    """The options of a JSON text or @FILE. They are never shown."""
    if given is None:
        return None
    try:
        text = Path(given[1:]).read_text("utf-8") if given.startswith("@") else given
        found = json.loads(text)
    except OSError as error:
        raise click.UsageError(
            f"--storage-options: {given[1:]} cannot be read ({error.strerror})"
        ) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.UsageError(
            "--storage-options must be a JSON object, such as '{\"anon\": true}', or @FILE with one; what "
            "was given is not shown, since it may hold a secret"
        )
    return found


def executor_options(command: Any) -> Any:
    given = option(
        "--executor", metavar="NAME[:N]", help="threads:4, processes:8, ray, or ray:ADDRESS."
    )
    shared = option(
        "--shared-filesystem", is_flag=True, help="All nodes see the same files, as with NFS."
    )
    return given(shared(command))


def executor(given: str | None, shared_filesystem: bool) -> Executor | None:
    """What ``--executor`` names; None where it is left out."""
    from trainpipes.storage import Processes, Ray, Threads

    name, _, rest = (given or "").partition(":")
    if shared_filesystem and name != "ray":
        raise click.UsageError("--shared-filesystem is of --executor ray")
    if given is None:
        return None
    if name == "ray":
        return Ray(rest or None, shared_filesystem)
    if name in ("threads", "processes") and (not rest or (rest.isdigit() and int(rest))):
        kind = Threads if name == "threads" else Processes
        return kind(int(rest)) if rest else kind()
    raise click.BadParameter(
        f"must be threads:N, processes:N, ray or ray:ADDRESS, got {given!r}",
        param_hint="--executor",
    )
