"""The option ``columns`` of readers."""

from __future__ import annotations

from typing import Any

from trainpipes.errors import ConfigError
from trainpipes.shown import shown

__all__ = ["checked_columns"]


def checked_columns(columns: Any, asker: str) -> list[str] | None:
    """Names of columns as a list of its own; None for all.

    Raises:
        ConfigError: it is empty, names one twice, or is something else.
    """
    if columns is None:
        return None
    names = [columns] if isinstance(columns, str) else list(columns)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{asker}(columns) takes names of columns, or None for all, got {shown(columns)}"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{asker}(columns) names {twice!r} twice, got {names}")
    return names
