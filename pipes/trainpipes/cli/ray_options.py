"""``--engine``, ``--address`` and ``--shared-filesystem``: where a command's tasks run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["engine_options"]


def engine_options(local: str) -> Callable[[Any], Any]:
    """The three options.

    Args:
        local: the engine of this machine, which is the default.
    """
    options = (
        click.option(
            "--engine", type=click.Choice((local, "ray")), default=local, show_default=True,
            help=f"What does the work: {local} on this machine, or tasks on a Ray cluster.",
        ),
        click.option(
            "--address",
            help="Address of the Ray cluster. [default: RAY_ADDRESS, or a cluster started here]",
        ),
        click.option(
            "--shared-filesystem", is_flag=True,
            help="Every node of the Ray cluster sees the same files at the same paths, as with NFS.",
        ),
    )  # fmt: skip

    def added(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return added
