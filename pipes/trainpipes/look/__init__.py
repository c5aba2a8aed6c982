"""How you look at a pipeline, its rows, its files and its states."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpipes.look.checkpoint import (
        Fit,
        FoundState,
        StateSummary,
        fits,
        read_states,
        summarize,
    )
    from trainpipes.look.inspect import inspect_files
    from trainpipes.look.inspect_result import Inspection

__all__ = [
    "Fit", "FoundState", "Inspection", "StateSummary", "fits", "inspect_files", "read_states",
    "summarize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "inspect" if name in ("Inspection", "inspect_files") else "checkpoint"
    return getattr(import_module(f"trainpipes.look.{module}"), name)
