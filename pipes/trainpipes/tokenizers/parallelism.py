"""Who works in parallel: the thread pool of the ``tokenizers`` package, or threads of ours.

The pool does not survive a fork: a child that uses its parent's hangs. So
``TOKENIZERS_PARALLELISM`` is set in the parent (to what holds anyway), and "false" in every forked
child and DataLoader worker. What the user has set stays.
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
    """Say how many threads of ours encode at once in this process; with more than one, the pool is
    off.
    """
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
