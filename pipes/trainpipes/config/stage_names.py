"""Stages by the names that they have in a chain, as a pipeline's methods and the starting functions do."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from trainpipes import start
from trainpipes.kinds.stage import Stage, snake_case
from trainpipes.kinds.stage_kinds import Source
from trainpipes.pipeline import Pipeline
from trainpipes.stage_methods import Method

__all__ = ["public_stages", "starts_with"]


@functools.cache
def public_stages() -> dict[str, type[Stage]]:
    """The class of each stage of ours, by its name."""
    kinds = [method._stage for method in vars(Pipeline).values() if isinstance(method, Method)]
    for module in (inspect.getmodule(Pipeline), start):
        kinds += [value for value in vars(module).values() if _is_stage(value)]
    return {snake_case(kind.__name__): kind for kind in kinds if _is_stage(kind)}  # type: ignore[misc]


def _is_stage(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Stage) and value not in (Stage, Source)


def starts_with(kind: type[Stage]) -> bool:
    """Whether a stage of that class may be the first one."""
    return kind.role in ("files", "source")
