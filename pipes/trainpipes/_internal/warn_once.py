"""Warnings that a process gives once."""

from __future__ import annotations

import warnings

__all__ = ["has_warned", "warn_once"]

_warned: set[object] = set()


def has_warned(key: object) -> bool:
    """Whether this process has given a warning with this key."""
    return key in _warned


def warn_once(message: str, key: object = None, level: int = 3) -> None:
    """Warn of something once in this process.

    Args:
        message: what to say.
        key: what tells it from other warnings; the message, unless given.
        level: the call on the stack whose line is shown, as ``warnings.warn`` counts from here.
    """
    key = key or message
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=level)
