"""The command and its subcommands: help, errors without a traceback, and exit codes.

0: it is done. 1: it could not be done, and stderr says why in one sentence. 2: the command line is wrong.
130: stopped by Ctrl-C. 143: by SIGTERM.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainpipes.cli.console import (
    error_line,
    forget_consoles,
    note,
    printable,
    warning_line,
)
from trainpipes.cli.signals import INTERRUPTED, let_signals_stop

__all__ = ["COMMANDS", "COMPLETE", "FAILED", "NAME", "Command", "Group", "command_line", "run"]

#: The subcommands in the order of help: the module that each is in, and what it does, so that help and
#: completion import none of them.
COMMANDS = {
    "recipes": "List prebuilt pipelines, show one, copy one.",
    "inspect": "Look into data files: rows, sizes, columns, and what to mend.",
    "run": "Run a pipeline without training: its speed, padding and batches.",
    "repack": "Rewrite data files for training: shuffled, in row groups of one size.",
    "tokenize": "Write the token ids of data files, once, for later runs.",
    "state": "Read a checkpoint: where it stands, and which runs can load it.",
    "completion": "Print the script that completes commands in a shell.",
}
NAME = "trainpipes"
FAILED, WRONG = 1, 2
#: The variable by which a shell asks for completions.
COMPLETE = "_TRAINPIPES_COMPLETE"
#: Characters of an error that nobody foresaw.
MOST = 2000
#: Columns of a terminal below which click writes wider than it is.
NARROW = 52


class Command(click.Command):
    """A command with ``--debug``."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        return [*super().get_params(context), _DEBUG]


class Group(click.Group):
    """Several commands under one name, with ``--debug``."""

    command_class = Command

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        return [*super().get_params(context), _DEBUG]

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = arguments[0], self.list_commands(context)
        if name in known or name.startswith("-") or context.resilient_parsing:
            return super().resolve_command(context, arguments)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else f"; there are {', '.join(known)}"
        raise click.UsageError(f"no command {name!r}{hint}", context)


class _Commands(Group):
    """The subcommands, each imported when it is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"trainpipes.cli.{name}").command
        return found

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        options = click.Command.shell_complete(self, context, incomplete)
        found = [name for name in COMMANDS if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in found] + options

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from trainpipes.cli.installed import library_version

        click.echo(f"{NAME} {library_version()}")
        context.exit()


@click.group(
    NAME,
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def command_line() -> None:
    """Training data for PyTorch: look at it, prepare it, and run pipelines from a shell.

    \b
    Exit codes:
      0  done
      1  it failed; stderr says why
      2  the command line is wrong
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command, and say how it ended, as an exit code."""
    global _debugging
    _debugging = os.environ.get("TRAINPIPES_DEBUG", "0") not in ("", "0")
    forget_consoles()
    shown = warnings.showwarning
    warnings.showwarning = _warn
    try:
        with let_signals_stop():
            return _run(list(arguments))
    finally:
        warnings.showwarning = shown


def _run(arguments: list[str]) -> int:
    try:
        if asked := os.environ.get(COMPLETE):
            return _complete(asked)
        columns = shutil.get_terminal_size().columns
        narrow = max(columns - 2, 30) if columns < NARROW else None  # which click does not see
        with command_line.make_context(NAME, arguments, terminal_width=narrow) as context:
            code = command_line.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        return _refused(error)
    except (SystemExit, GeneratorExit):
        raise
    except (KeyboardInterrupt, click.Abort):
        _trace()
        error_line("stopped")
        return INTERRUPTED
    except BrokenPipeError:  # who reads the output has seen enough, as ``head`` has
        return FAILED
    except BaseException as error:  # a panic in Rust, as tokenizers may have one, is no Exception
        if not _trace():
            error_line(said(error))
        return FAILED
    return code if isinstance(code, int) else 0


def _complete(asked: str) -> int:
    """Answer a shell that asks how a line may go on; without a word where that fails."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(command_line, {}, NAME, COMPLETE, asked)
    except Exception:
        _trace()
        return FAILED


def _refused(error: click.ClickException) -> int:
    """Say what is wrong with a command line."""
    context = getattr(error, "ctx", None)
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # not before 8.2
        note(error.format_message())
        return error.exit_code
    if context is not None:
        note(context.get_usage())
        note(f"Try '{context.command_path} --help' for help.\n")
    error_line(error.format_message())
    return error.exit_code


def said(error: BaseException) -> str:
    """An error in one sentence; of one that nobody foresaw, its kind, too."""
    known = sys.modules.get("trainpipes.errors")
    if known and isinstance(error, known.TrainpipesError):
        return _without_trace(error)
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([" -> ".join(names), error.strerror] if names else [error.strerror])
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"out of memory{why}: give the process more, or work on less at a time"
    if isinstance(error, ModuleNotFoundError) and error.name and _is_foreign(error.name):
        package = error.name.partition(".")[0]
        return f"the package {package} is needed and not installed: pip install {package}"
    text = _without_trace(error)
    text = text if len(text) <= MOST else f"{text[:MOST]}…"
    return f"{type(error).__name__}{': ' if text else ''}{text} (--debug shows where)"


def _without_trace(error: BaseException) -> str:
    """The text of an error; of one that a worker process raised, in which torch puts the traceback there,
    what it said."""
    text = str(error)
    if "Original Traceback (most recent call last):" not in text:
        return text
    starts = list(re.finditer(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", text, re.MULTILINE))
    return text[starts[-1].end() :].strip() if starts else text


def _is_foreign(module: str) -> bool:
    return not module.startswith("trainpipes")


def _trace() -> bool:
    """Show where the error at hand comes from, if ``--debug`` asks for that."""
    if _debugging:
        click.echo(printable(traceback.format_exc()), err=True, nl=False)
    return _debugging


_debugging = False


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


def _warn(message: Any, *_: Any, **__: Any) -> None:
    warning_line(str(message))
