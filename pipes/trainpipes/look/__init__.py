"""How you look at a pipeline, its rows, its files and its states."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpipes.look.inspect import inspect_files

__all__ = ["inspect_files"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name != "inspect_files":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainpipes.look.inspect import inspect_files

    return inspect_files
