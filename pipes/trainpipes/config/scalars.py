"""Which plain texts are numbers, bools and null: YAML 1.2's core schema.

``yes``, ``no``, ``on`` and ``off`` are text, as are ``12:30:45`` and ``2024-01-31``; ``1e-4`` is a float and
``010`` is ten. Readers of YAML 1.1 think otherwise of some of these, so that what is written is put in quotes
where one of the two takes a text for something else.
"""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["DIGITS", "as_plain", "is_only_text", "resolved"]

#: Digits of an integer, at most.
DIGITS = 400

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = {
    **{
        sign + name: float(sign + "inf")
        for sign in ("", "+", "-")
        for name in (".inf", ".Inf", ".INF")
    },
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
#: What YAML 1.1 takes for something else than text, beyond that.
_OLDER = re.compile(
    r"y|n|yes|no|on|off|<<|=|"
    r"[-+]?(?:0b[01_]+|0x[0-9a-f_]+|0o?[0-7_]+|[0-9][0-9_]*|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)|"
    r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]*(?:e[-+]?[0-9]+)?|"
    r"\d{4}-\d\d?-\d\d?.*",
    re.IGNORECASE,
)


def resolved(text: str) -> Any:
    """What a plain text is.

    Raises:
        ValueError: a number of too many digits.

    >>> [resolved(text) for text in ("1e-4", "010", "0x10", "yes", "~", "1.", ".inf", "12:30")]
    [0.0001, 10, 16, 'yes', None, 1.0, inf, '12:30']
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        if len(text) > DIGITS:
            raise ValueError(f"a number of {len(text):,} digits; {DIGITS} are the most")
        return int(text, 10 if text[:2] not in ("0o", "0x") else 0)
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _FLOAT.fullmatch(text):
        if len(text) > DIGITS:
            raise ValueError(f"a number of {len(text):,} digits; {DIGITS} are the most")
        return float(text)
    return text


def as_plain(value: bool | int | float | None) -> str:
    """How a value is written so that all readers understand the same.

    >>> [as_plain(value) for value in (None, True, 3, 1e-4, 1e16, float("-inf"))]
    ['null', 'true', '3', '0.0001', '1.0e+16', '-.inf']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(float(value))
    number, mark, power = text.partition("e")
    if mark and "." not in number:
        number += ".0"
    return f"{number}{mark}{power}"


def is_only_text(text: str) -> bool:
    """Whether readers of YAML 1.1 and of 1.2 take a plain text for text.

    >>> [is_only_text(text) for text in ("clean", "yes", "1e3", "0b1", "2024-01-31", "1_000")]
    [True, False, False, False, False, False]
    """
    if len(text) > DIGITS:
        return not text[0].isdigit() and text[0] not in "+-."
    return resolved(text) is text and not _OLDER.fullmatch(text)
