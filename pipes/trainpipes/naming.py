"""Messages about columns that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainpipes.errors import SchemaError

__all__ = ["need_columns", "nearest"]


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name close to one of ``names``, else nothing."""
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def need_columns(
    present: Sequence[str], wanted: Sequence[str], asker: object, path: str | None = None
) -> None:
    """Raise unless all wanted columns are present.

    Raises:
        SchemaError: names the missing ones, the nearest names, and all that are there.
    """
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    said = ", ".join(f"{name!r}{nearest(name, present)}" for name in missing)
    where = f" in {path}" if path else ""
    raise SchemaError(
        f"{asker}: no column {said}{where}; there are {list(present)}", path=path, stage=str(asker)
    )
