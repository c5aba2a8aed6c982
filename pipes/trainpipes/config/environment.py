"""Environment variables in texts of a document: ``${NAME}`` and ``${NAME:-default}``.

They are put in after the document is read, so that what they hold is text, or a number where nothing else
stands there and there are no quotes; never a list, a key or a tag. ``$${`` stands for ``${``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from trainpipes._internal.shown import shown

__all__ = ["escaped", "expanded"]

_PLACE = re.compile(r"\$(?:\$(?=\{)|\{([^}]*)(\}?))")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def expanded(text: str, variables: Mapping[str, str] | None = None) -> str:
    """A text with what the variables hold.

    Args:
        text: of a document.
        variables: instead of the environment.

    Raises:
        ValueError: one is not set, or has no name.

    >>> expanded("${DATA}/*.parquet ${N:-3} $${x} $5", {"DATA": "/data"})
    '/data/*.parquet 3 ${x} $5'
    """
    there = os.environ if variables is None else variables

    def put(place: re.Match[str]) -> str:
        if place[1] is None:
            return "$"
        named = _NAME.fullmatch(place[1])
        if named is None or not place[2]:
            raise ValueError(
                f"{shown(place[0])} is no variable: write ${{NAME}} or ${{NAME:-default}}, and $${{ for ${{"
            )
        name, default = named.groups()
        found = there.get(name)
        if default is not None and not found:
            return default
        if found is None:
            raise ValueError(
                f"the environment variable {name} is not set: set it, or write ${{{name}:-default}}"
            )
        return found

    return _PLACE.sub(put, text)


def escaped(text: str) -> str:
    """A text that reads as it is.

    >>> expanded(escaped("a ${b} $${c} $d")) == "a ${b} $${c} $d"
    True
    """
    return text.replace("${", "$${")
