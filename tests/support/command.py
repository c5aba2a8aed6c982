"""The command as a shell runs it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = "from trainpipes.cli import main; main()"
#: Runs the command with these arguments, and gives its exit code, stdout and stderr.
Ran = Callable[..., tuple[int, str, str]]


def trainpipes(
    *arguments: str | os.PathLike[str],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    before: str = "",
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run ``trainpipes`` with these arguments.

    Args:
        arguments: of the command line.
        cwd: folder to run in.
        env: variables to add to the environment.
        before: Python to run in that process first.
        options: of ``subprocess.run``.
    """
    command = [sys.executable, "-c", f"{before}\n{START}", *map(os.fspath, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(env),
        **{"capture_output": True, "text": True, "timeout": 120, **options},
    )


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """This process's, without what a terminal says of colours."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, **(more or {})}
