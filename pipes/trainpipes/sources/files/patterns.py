"""Patterns of paths, and names of files that are not data."""

from __future__ import annotations

__all__ = ["Found", "fixed_root", "has_magic", "hidden", "wild"]

#: Files as path, size (None where it is not known), and time of change or etag (empty where not known).
Found = dict[str, tuple[int | None, str]]


def hidden(name: str) -> bool:
    """Whether the name of a file or folder says that it is not data: ``.cache``, ``_SUCCESS``,
    ``_delta_log``; not ``_lang=en``, which is a partition."""
    return (
        name.startswith(".") or (name.startswith("_") and "=" not in name) or name == "lost+found"
    )


def wild(path: str) -> str:
    """The characters that make a pattern of a path."""
    return "*" if path.startswith(("http://", "https://")) else "*?["


def has_magic(path: str) -> bool:
    return any(c in path for c in wild(path))


def fixed_root(path: str) -> tuple[list[str], list[str]]:
    """The parts of a pattern before the first that is one, and the rest."""
    parts = path.strip("/").split("/")
    first = next(n for n, part in enumerate(parts) if has_magic(part))
    return parts[:first], parts[first:]
