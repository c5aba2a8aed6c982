"""Who works in parallel: the thread pool of ``tokenizers``, or our threads.

The pool does not survive a fork: a child that uses its parent's hangs. So
``TOKENIZERS_PARALLELISM`` is set in the parent, and "false" in forked children and DataLoader
workers, unless the user has set it.
"""

from __future__ import annotations

import os

from torch.utils.data import get_worker_info

VARIABLE = "TOKENIZERS_PARALLELISM"

_registered = False
_ours: str | None = None  # what the variable was last set to here


def settle() -> None:
    """Set the variable for this process and the children that it will fork."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True
        os.register_at_fork(after_in_child=_switch_off)
    if get_worker_info() is not None:
        _switch_off()
    elif VARIABLE not in os.environ:
        _set("true")


def take_turns(threads: int) -> None:
    """Say how many of our threads encode at once; more than one turns the pool off."""
    settle()
    if os.environ.get(VARIABLE) == _ours and get_worker_info() is None:
        _set("false" if threads > 1 else "true")


def _set(value: str) -> None:
    global _ours
    os.environ[VARIABLE] = _ours = value


def _switch_off() -> None:
    global _ours
    _ours = None  # for good
    os.environ[VARIABLE] = "false"
