"""Optional packages: whether one is there, and what to type if it is not."""

from __future__ import annotations

from importlib.util import find_spec

from trainpipes.errors import MissingExtraError

__all__ = ["need"]


def need(package: str, what: str) -> None:
    """Raise unless a package is installed; nothing is imported.

    Raises:
        MissingExtraError: it is not; the extra has the package's name.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install trainpipes[{package}]"
        )
