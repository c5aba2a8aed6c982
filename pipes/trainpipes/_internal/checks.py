"""Options that are plain values, and optional packages: an error unless they are right, or installed.

What is to be typed for a package names the package itself, so that it works wherever this library came from:
an index, a wheel, a clone, or a folder on the path. ``pyproject.toml`` has the same packages as extras.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, MissingExtraError

#: The largest count that arrays of row numbers can hold.
LARGEST = 2**63 - 1
#: What pip calls a package, where it is not what Python calls it or not every version will do.
_REQUIREMENTS = {
    "PIL": "pillow",
    "duckdb": "'duckdb>=2,<3'",
    "gigatoken": "'gigatoken>=0.10,<0.11'",
    "ray": "'ray[train]>=2.40,<3'",
    "yaml": "pyyaml",
}


def whole_number(
    value: Any, least: int | None, option: str, meaning: str, most: int = LARGEST
) -> int:
    """``value``, an integer of ``least`` or more, and ``most`` or less; any integer where ``least`` is None;
    raises otherwise.

    Raises:
        ConfigError: it is none.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and not least <= value <= most)
    ):
        bound = "" if least is None else f" of {least} or more"
        if isinstance(value, int) and value > most:
            bound = f" of {most} or less"
        raise ConfigError(f"{option} is an integer{bound}, {meaning}; got {shown(value)}")
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
            f'{option} is a pyarrow.Schema, such as pa.schema([("x", pa.int64())]); got {shown(value)}'
        )
    if len(set(value.names)) < len(value.names):
        raise ConfigError(f"{option} names each column once, got {value.names}")
    return value


def byte_count(value: Any, least: int, option: str) -> int:
    """A number of bytes, or a text that says one, such as "512MB" or "4 GiB": powers of 1,024.

    Raises:
        ConfigError: it is neither, or less than ``least``.

    >>> byte_count("1.5 MB", 1, "memory_limit")
    1572864
    """
    found = value
    if isinstance(value, str):
        text = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
        if text is None:
            raise ConfigError(
                f'{option} must be a number of bytes, as 1000000, "512MB" or "4GB", got {shown(value)}'
            )
        found = int(float(text[1]) * 1024 ** " kmgt".index(text[2] or " "))
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < least:
        raise ConfigError(
            f'{option} must be {least:,} bytes or more, got {shown(value)}; say "512MB" or "4GB"'
        )
    return whole_number(found, least, option, "bytes")


def flag(value: Any, option: str) -> bool:
    """``value``, True or False; raises otherwise.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{option} is True or False, got {shown(value)}")
    return value


def local_path(value: Any, option: str) -> str:
    """``value``, a path on this machine, as text; raises otherwise.

    Raises:
        ConfigError: it is none, or a URL.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{option} is a path, got {shown(value)}")
    path = str(os.fspath(value))
    if "://" in path:
        raise ConfigError(
            f"{option} is a path on this machine, got {path!r}: write there, and copy it"
        )
    return path


def several(value: Any) -> bool:
    """Whether a value is a list, or another sequence whose order is always the same; a set is none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def column_name(value: Any, option: str) -> str:
    """``value``, the name of a column; raises otherwise.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{option} is the name of a column, got {shown(value)}")
    return value


def column_names(value: Any, option: str, least: int = 1) -> list[str]:
    """The names of one column or of several, each once, in their order; raises otherwise.

    Raises:
        ConfigError: it is neither a name nor a list of names, or one comes twice.
    """
    names = [value] if isinstance(value, str) else value
    good = several(names) and len(names) >= least
    if not good or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{option} is a column name or several in a list, got {shown(value)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{option} names each column once, got {shown(twice[0])} twice")
    return list(names)


def need(package: str, what: str) -> None:
    """Raise unless a package is installed; nothing is imported.

    Args:
        package: the name that it is imported by.
        what: needs it.

    Raises:
        MissingExtraError: it is not.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package}, which is not installed: {pip_install(package)}"
        )


def pip_install(package: str) -> str:
    """The command that installs a package.

    >>> pip_install("PIL")
    'pip install pillow'
    """
    return f"pip install {_REQUIREMENTS.get(package, package)}"
