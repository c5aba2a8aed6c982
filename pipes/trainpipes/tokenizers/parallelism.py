"""Who works in parallel: the thread pool of the ``tokenizers`` package, or threads of ours.

Its pool does not survive a fork: a child that uses its parent's hangs. The package therefore
switches it off in a child, and prints a warning there, if it was used before the fork and
``TOKENIZERS_PARALLELISM`` is not set. So it is set in the parent (to what holds anyway), and set
to "false" in every forked child and every DataLoader worker: as many workers as cores need no
pools of their own. Several threads of ours that encode at once need none either (``take_turns``).
``tokenizers`` reads the variable whenever it encodes. What the user has set stays.
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
    """Say how many threads of ours encode at once in this process from now on.

    With more than one, each encodes by itself, and the pool of ``tokenizers`` is off; with one (or
    none) it is on, and shares each run of texts out among the cores. In a worker it stays off.

    Args:
        threads: threads that call ``Tokenize.process`` at the same time.
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
