"""The command ``trainpipes``: ``trainpipes --help`` says what it does.

One module a command. They use what the library ``trainpipes`` offers, and import it, and torch with it, in
the functions that need it, so that help and completion answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

__all__ = ["main"]

#: What the command itself works with, by the name that it is imported by, and what pip calls it.
PACKAGES = {"click": "click", "rich": "rich", "yaml": "pyyaml"}


def main() -> None:
    """Run the command with the arguments of this process, and end the process."""
    code: int | str | None = 128 + signal.SIGINT
    try:
        code = _main()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # before there was anything to stop
        os.write(2, b"error: stopped\n")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends as it is
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or nobody reads
        if not isinstance(error, BrokenPipeError):
            print(f"error: stdout: {error.strerror}", file=sys.stderr)  # noqa: T201
        _to_nowhere(1)
        code = code or 1
    sys.exit(code)


def _main() -> int:
    _open_what_is_closed()
    missing = [name for package, name in PACKAGES.items() if find_spec(package) is None]
    if missing:
        print(  # noqa: T201
            f"error: the command trainpipes needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    from trainpipes.cli.app import run
    from trainpipes.cli.console import spell_out_what_cannot_be_encoded

    spell_out_what_cannot_be_encoded()
    return run(sys.argv[1:])


def _open_what_is_closed() -> None:
    """Where the shell closed stdin, stdout or stderr, let it lead nowhere: a file that is opened later would
    take its number, and get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _to_nowhere(number)
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
