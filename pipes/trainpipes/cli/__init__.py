"""The command ``trainpipes``. Modules import torch in the functions that need it, so that help answers at
once.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

__all__ = ["main"]

#: Packages that the command itself needs, by the name for import, and the name for pip.
PACKAGES = {"click": "click", "yaml": "pyyaml"}


def main() -> None:
    """Run the command with the arguments of this process, and end the process."""
    code = 130
    try:
        _open_what_is_closed()
        if missing := _missing():
            sys.exit(f"error: {', '.join(missing)} not installed: pip install {' '.join(missing)}")
        from trainpipes.cli.app import run

        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # as when modules are imported
        os.write(2, b"error: stopped\n")
    except OSError as error:  # of the flush: a full disk, or nobody reads
        if not isinstance(error, BrokenPipeError):
            os.write(2, f"error: stdout: {error.strerror}\n".encode())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = code or 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter would print it at its end
    sys.exit(code)


def _missing() -> list[str]:
    """The names for pip of packages that are not installed. In a function of its own: Python 3.13 does not
    look for a handler at all places of a comprehension in a ``try``.
    """
    return [name for package, name in PACKAGES.items() if find_spec(package) is None]


def _open_what_is_closed() -> None:
    """Let streams that the shell closed lead nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
