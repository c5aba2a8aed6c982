"""What a class of stages of the user's own must not be."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainpipes.errors import ConfigError


def is_ours(kind: type) -> bool:
    """Whether a class is one of this library's."""
    return kind.__module__.split(".")[0] == "trainpipes"


def check_kind(kind: type, root: type) -> None:
    """Raise for a class of the user's that is of no kind of stage, or has an ``__init__`` of its own."""
    if is_ours(kind):
        return
    if root in kind.__bases__:
        raise ConfigError(
            f"{kind.__name__} must be a kind of stage: subclass Source, RowStage, TableStage or BatchStage"
        )
    for name in sorted({"__init__", "__post_init__"} & vars(kind).keys()):
        raise ConfigError(
            f"{kind.__name__} must not define {name}(): a stage is a dataclass, so list its options as "
            "fields, and check them in check()"
        )


def check_options(kind: Any, root: type) -> None:
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
