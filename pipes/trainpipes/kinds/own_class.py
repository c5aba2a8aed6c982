"""What a class of stages of the user's own must not be."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from trainpipes.errors import ConfigError

__all__ = ["check_class", "is_ours", "refuse_old"]

#: What classes had when a stage was a node with an ``__init__`` of its own.
_BEFORE = ("__init__", "__post_init__", "begin", "bind", "open_source")


def is_ours(kind: type) -> bool:
    """Whether a class is one of this library's."""
    return kind.__module__.split(".")[0] == "trainpipes"


def refuse_old(kind: type, root: type) -> None:
    """Raise for a class of the user's that is written as stages were before they were dataclasses.

    Args:
        kind: the class.
        root: ``Stage``.
    """
    found = [name for name in _BEFORE if name in vars(kind)]
    if is_ours(kind) or not (found or root in kind.__bases__):
        return
    parameters = list(
        inspect.signature(vars(kind).get("__init__", lambda: None)).parameters.values()
    )
    lines = [f"class {kind.__name__}(trainpipes.RowStage):"]
    for parameter in parameters:
        if parameter.name not in ("self", "source") and parameter.kind.name[:3] != "VAR":
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            kinds = parameter.annotation
            said = kinds if isinstance(kinds, str) else getattr(kinds, "__name__", "object")
            lines.append(f"    {parameter.name}: {'object' if said == '_empty' else said}{default}")
    lines.append("    def apply(self, row): ...")
    raise ConfigError(
        f"{kind.__name__} {f'defines {found[0]}()' if found else 'is of no kind of stage'}, and a stage is a "
        "dataclass of its options, of one of the kinds: list the options as fields, and define apply() of a "
        "RowStage, TableStage or BatchStage:\n" + "\n".join(lines)
    )


def check_class(kind: Any, root: type) -> None:
    """Raise for a class of the user's whose options have names that mean something else."""
    if is_ours(kind):
        return
    bases: list[Any] = [base for base in kind.__mro__ if is_ours(base) and base is not root]
    known = {field.name for base in bases for field in dataclasses.fields(base)}
    ours = {name for base in (*bases, root) for name in vars(base)} - known
    names = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(names & ours):
        raise ConfigError(
            f"{kind.__name__}: every stage has {name!r}, so that an option needs another name; to set it for "
            f"the class, leave its type out: {name} = ..."
        )
    for name in sorted(kind.free - names):
        raise ConfigError(
            f"{kind.__name__}: free is a frozenset of options, and there is no {name!r}"
        )
