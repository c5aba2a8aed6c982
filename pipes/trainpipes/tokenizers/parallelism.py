"""The thread pool of the ``tokenizers`` package, and forks.

The pool does not survive a fork: a child that uses its parent's hangs. The package therefore
switches it off in a child, and prints a warning there, if it was used before the fork and
``TOKENIZERS_PARALLELISM`` is not set. So it is set in the parent (to what holds anyway), and set
to "false" in every forked child and every DataLoader worker: as many workers as cores need no
pools of their own.
"""

from __future__ import annotations

import os

from torch.utils.data import get_worker_info

__all__ = ["settle"]

VARIABLE = "TOKENIZERS_PARALLELISM"

_registered = False


def settle() -> None:
    """Set the variable for this process and the children that it will fork."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True
        os.register_at_fork(after_in_child=_switch_off)
    if get_worker_info() is not None:
        _switch_off()
    else:
        os.environ.setdefault(VARIABLE, "true")


def _switch_off() -> None:
    os.environ[VARIABLE] = "false"
