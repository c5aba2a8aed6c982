"""The command and its subcommands, and how it ends.

0: it is done. 1: it could not be done, and stderr says why. 2: the command line is wrong. 130: Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from trainpipes.cli import look, prepare
from trainpipes.cli.run import command as run_command
from trainpipes.cli.shared import error_line, printable, warning_line
from trainpipes.version import __version__

NAME, COMPLETE = "trainpipes", "_TRAINPIPES_COMPLETE"
COMMANDS = (
    look.recipes_command,
    look.inspect_command,
    run_command,
    prepare.repack_command,
    prepare.tokenize_command,
    look.state_command,
    look.locate_command,
    look.find_command,
)
INTERRUPTED = 130
#: Characters of an error that nobody foresaw.
MOST = 2000


class _InOrder(click.Group):
    """Lists its commands in the order in which they were added, not by name."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    NAME,
    cls=_InOrder,
    commands={str(command.name): command for command in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message=f"{NAME} %(version)s")
def command_line() -> None:
    """Training data for PyTorch: look at it, prepare it, and run pipelines from a shell.

    --debug, anywhere, or TRAINPIPES_DEBUG=1 shows the traceback of an error.

    \b
    Exit codes:
      0  done
      1  it failed; stderr says why
      2  the command line is wrong
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command, and say how it ended, as an exit code."""
    debug = "--debug" in arguments or os.environ.get("TRAINPIPES_DEBUG", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # no character makes printing fail
            stream.reconfigure(errors="backslashreplace")
    if asked := os.environ.get(COMPLETE):
        return shell_complete(command_line, {}, NAME, COMPLETE, asked)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warning_line(str(message))
        try:
            with command_line.make_context(NAME, arguments) as context:
                code = command_line.invoke(context)
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except BrokenPipeError:  # who reads the output has seen enough, as ``head`` has
            return 1
        except (SystemExit, GeneratorExit):
            raise
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.UsageError as error:
            error.show()
            return error.exit_code
        except click.ClickException as error:
            error_line(error.format_message())
            return error.exit_code
        except BaseException as error:  # a panic in Rust, as of tokenizers, is no Exception
            if debug:
                click.echo(printable(traceback.format_exc()), err=True, nl=False)
            stopped = isinstance(error, KeyboardInterrupt)
            if stopped or not debug:
                error_line("stopped" if stopped else said(error))
            return INTERRUPTED if stopped else 1


def said(error: BaseException) -> str:
    """An error as a text; of an unforeseen error, its kind, too."""
    known = sys.modules.get("trainpipes.errors")
    if known and isinstance(error, known.TrainpipesError):
        text = str(error)
        return f"{text} (here: --overwrite)" if "overwrite=True" in text else text
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([" -> ".join(names), error.strerror] if names else [error.strerror])
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"the package {package} is needed and not installed: pip install {package}"
    text = str(error)
    text = text if len(text) <= MOST else f"{text[:MOST]}…"
    return f"{type(error).__name__}{': ' if text else ''}{text} (--debug shows where)"
