"""The command ``trainpipes``: ``trainpipes --help`` says what it does.

One module a command. They use what the library ``trainpipes`` offers, and import it, and torch with it, in
the functions that need it, so that help and completion answer at once.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

#: What the command itself works with, by the name that it is imported by, and what pip calls it.
PACKAGES = {"click": "click", "rich": "rich", "yaml": "pyyaml"}


def main() -> None:
    """Run the command with the arguments of this process, and end the process."""
    missing = [name for package, name in PACKAGES.items() if find_spec(package) is None]
    if missing:
        sys.exit(
            f"trainpipes: the command needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install {' '.join(missing)}"
        )
    from trainpipes_cli.app import run

    sys.exit(run(sys.argv[1:]))
