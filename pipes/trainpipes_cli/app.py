"""The command and its subcommands: help, errors without a traceback, and exit codes.

0: it is done. 1: it could not be done, and stderr says why in one sentence. 2: the command line is wrong.
130: stopped by Ctrl-C. 143: by SIGTERM.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from trainpipes_cli.console import error_line, warning_line

__all__ = ["Command", "Group", "command_line", "run"]

#: The subcommands in the order of help: the module that each is in, and what it does, so that help and
#: completion import none of them.
COMMANDS = {
    "recipes": "List prebuilt pipelines, show one, copy one.",
    "inspect": "Look into data files: rows, sizes, columns, and what to mend.",
    "run": "Run a pipeline alone: its speed, its padding, its batches.",
    "repack": "Rewrite data files for training: shuffled, in row groups of one size.",
    "tokenize": "Write the token ids of data files, once, for later runs.",
    "state": "Read a checkpoint: where it stands, and who can load it.",
    "completion": "Print the script that completes commands in a shell.",
}
FAILED, STOPPED, TERMINATED = 1, 128 + signal.SIGINT, 128 + signal.SIGTERM


class Command(click.Command):
    """A command with ``--debug``."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        return [*super().get_params(context), _DEBUG]


class Group(click.Group):
    """Several commands under one name."""

    command_class = Command

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        return [*super().get_params(context), _DEBUG]


class _Commands(Group):
    """The subcommands, each imported when it is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"trainpipes_cli.{name}").command
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise click.UsageError(f"no command {name!r}{hint}", context)
        return super().resolve_command(context, arguments)


@click.group(
    "trainpipes",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="trainpipes", message="%(package)s %(version)s")
def command_line() -> None:
    """Training data for PyTorch: look at it, prepare it, and run pipelines from a shell."""


def run(arguments: Sequence[str]) -> int:
    """Run the command, and say how it ended, as an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _warn
    try:
        code = command_line.main(list(arguments), prog_name="trainpipes", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        error_line("stopped")
        return STOPPED
    except BrokenPipeError:  # who reads the output has seen enough, as ``head`` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if _debugging:
            traceback.print_exc()
        else:
            error_line(said(error))
        return FAILED
    return code if isinstance(code, int) else 0


def said(error: Exception) -> str:
    """An error in one sentence; of one that nobody foresaw, its kind, too."""
    known = sys.modules.get("trainpipes.errors")
    if isinstance(error, OSError) or (known and isinstance(error, known.TrainpipesError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


_debugging = bool(os.environ.get("TRAINPIPES_DEBUG"))


def _debug(_: click.Context, __: click.Parameter, value: bool) -> None:
    global _debugging
    _debugging = _debugging or value


_DEBUG = click.Option(
    ["--debug"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_debug,
    help="Show the traceback of an error.",
)


def _terminate(_: int, __: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _warn(message: Any, *_: Any, **__: Any) -> None:
    warning_line(str(message))
