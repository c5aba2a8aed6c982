"""Messages about unknown names, and warnings that a process gives once."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Sequence

from trainpipes.errors import SchemaError

#: How functions begin that read data, here and elsewhere.
BEGINNINGS = ("read_", "from_", "load_", "open_", "scan_", "list_")
#: Packages whose lines a warning does not point at.
OURS = ("trainpipes", "torch")
_warned: set[object] = set()


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name close to one of ``names``, else nothing.

    >>> nearest("shufle", ["shuffle", "repeat"]), nearest("from_csv", ["from_arrow", "read_csv"])
    (" (did you mean 'shuffle'?)", " (did you mean 'read_csv'?)")
    """
    format = next((name.removeprefix(b) for b in BEGINNINGS if name.startswith(b)), "")
    same = [one for one in names if one in [f"{b}{format}" for b in BEGINNINGS if format]]
    begun = [
        one for one in names if f"{one}_".startswith(f"{name}_") or f"{name}_".startswith(f"{one}_")
    ]
    close = same or difflib.get_close_matches(name, names, n=2, cutoff=0.6) or begun
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def need_columns(
    present: Sequence[str], wanted: Sequence[str], caller: object, path: str | None = None
) -> None:
    """Raise unless all wanted columns are present."""
    known = frozenset(present)
    missing = [name for name in wanted if name not in known]
    if not missing:
        return
    said = ", ".join(f"{name!r}{nearest(name, present)}" for name in missing)
    where = f" in {path}" if path else ""
    raise SchemaError(
        f"{caller}: no column {said}{where}; there are {list(present)}",
        path=path,
        stage=str(caller),
    )


def no_columns(found: str, caller: object) -> SchemaError:
    """The error of a stage that works on columns."""
    return SchemaError(
        f"{caller} works on columns, so that each row must be a dict, got {found}; make dicts with map() "
        "first",
        stage=str(caller),
    )


def has_warned(key: object) -> bool:
    """Whether this process has given a warning with this key."""
    return key in _warned


def warn_once(message: str, key: object = None) -> None:
    """Warn of something once in this process, at the line of the user's that led to it."""
    key = key or message
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=_users_level())


def _users_level() -> int:
    level, frame = 2, sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] in OURS and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level
