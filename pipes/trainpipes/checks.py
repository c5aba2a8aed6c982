"""Options that are plain values: refused unless they are what they must be."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trainpipes.errors import ConfigError

__all__ = ["checked_schema", "flag", "whole_number"]


def whole_number(value: Any, least: int | None, option: str, meaning: str) -> int:
    """``value``, an integer of ``least`` or more; raises otherwise.

    Raises:
        ConfigError: it is none.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f" of {least} or more"
        raise ConfigError(f"{option} is an integer{bound}, {meaning}; got {value!r}")
    return value


def checked_schema(value: Any, option: str) -> pa.Schema | None:
    """``value``, an Arrow schema with a name for each column, or None; raises otherwise.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    if not isinstance(value, pa.Schema) or not value.names:
        raise ConfigError(
            f'{option} is a pyarrow.Schema, such as pa.schema([("x", pa.int64())]); got {value!r}'
        )
    if len(set(value.names)) < len(value.names):
        raise ConfigError(f"{option} names each column once, got {value.names}")
    return value


def flag(value: Any, option: str) -> bool:
    """``value``, True or False; raises otherwise.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{option} is True or False, got {value!r}")
    return value
