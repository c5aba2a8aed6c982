"""Options that several commands have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainpipes.writers import Executor

option = functools.partial(click.option, show_default=True)

#: A whole number of 1 or more.
COUNT = click.IntRange(1)


def _storage_options(_: click.Context, __: click.Parameter, given: str | None) -> Any:
    """The options of a JSON text or @FILE. They are never shown."""
    if given is None:
        return None
    try:
        text = Path(given[1:]).read_text("utf-8") if given.startswith("@") else given
        options = json.loads(text)
    except OSError as error:
        raise click.UsageError(f"--storage-options: {given[1:]}: {error.strerror}") from None
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise click.UsageError(
            "--storage-options must be a JSON object, such as '{\"anon\": true}', or @FILE with one; what "
            "was given is not shown, since it may hold a secret"
        )
    return options


AS_JSON = option("--json", "as_json", is_flag=True, help="Print JSON.")
VERIFY = option("--verify", is_flag=True, help="Read each file back and compare it.")
OVERWRITE = option("--overwrite", is_flag=True, help="Remove earlier output in OUT; begin anew.")
STORAGE_OPTIONS = option(
    "--storage-options",
    metavar="JSON",
    callback=_storage_options,
    help="Options of the file system, such as credentials: JSON, or @FILE with JSON.",
)
COMPRESSION = option(
    "--compression",
    type=click.Choice(("zstd", "snappy", "gzip", "brotli", "lz4", "none")),
    default="zstd",
    callback=lambda _, __, given: None if given == "none" else given,
    help="Of the Parquet files.",
)


def takes_executor(command: Any) -> Any:
    """Give a command the options that say who does the work, together, as ``executor``."""

    @option("--executor", metavar="NAME[:N]", help="threads:4, processes:8, ray or ray:ADDRESS.")
    @option("--shared-filesystem", is_flag=True, help="All nodes see the same files, as by NFS.")
    @functools.wraps(command)
    def taking(executor: str | None, shared_filesystem: bool, **options: Any) -> Any:
        return command(executor=_executor(executor, shared_filesystem), **options)

    return taking


def _executor(given: str | None, shared_filesystem: bool) -> Executor | None:
    from trainpipes.writers import Processes, Ray, Threads

    name, _, rest = (given or "").partition(":")
    if shared_filesystem and name != "ray":
        raise click.UsageError("--shared-filesystem is of --executor ray")
    if name == "ray":
        return Ray(rest or None, shared_filesystem)
    kind: Any = {"threads": Threads, "processes": Processes}.get(name)
    if kind and (not rest or (rest.isdigit() and int(rest))):
        return kind(int(rest)) if rest else kind()  # type: ignore[no-any-return]
    if given is not None:
        rule = "must be threads:N, processes:N, ray or ray:ADDRESS"
        raise click.BadParameter(f"{rule}, got {given!r}", param_hint="--executor")
    return None
