"""Optional packages: whether one is there, and what to type if it is not.

What is to be typed names the package itself, so that it works wherever this library came from: an index, a
wheel, a clone, or a folder on the path. ``pyproject.toml`` has the same packages as extras.
"""

from __future__ import annotations

from importlib.util import find_spec

from trainpipes.errors import MissingExtraError

__all__ = ["need", "pip_install"]

#: What pip calls a package, where it is not what Python calls it or not every version will do.
_REQUIREMENTS = {
    "PIL": "pillow",
    "gigatoken": "'gigatoken>=0.10,<0.11'",
    "ray": "'ray[train]>=2.40,<3'",
    "yaml": "pyyaml",
}


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
