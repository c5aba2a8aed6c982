"""Optional packages: whether one is there, and what to type if it is not."""

from __future__ import annotations

from importlib.util import find_spec

from trainpipes.errors import MissingExtraError

__all__ = ["need"]


def need(package: str, what: str, install: str | None = None) -> None:
    """Raise unless a package is installed; nothing is imported.

    Args:
        package: the name that it is imported by.
        what: needs it.
        install: what pip is to install; by default the extra of the package's name.

    Raises:
        MissingExtraError: it is not.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install {install or f'trainpipes[{package}]'}"
        )
