"""Numbers of bytes in words, in the same units everywhere."""

from __future__ import annotations

__all__ = ["amount"]


def amount(count: float) -> str:
    """So many bytes.

    >>> amount(512), amount(40_960)
    ('512 B', '41.0 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
