"""Functions and methods that add a stage, with the parameters and the text of its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, overload

from trainpipes.interfaces.stage import Stage

if TYPE_CHECKING:
    from trainpipes.pipeline.chain import Pipeline

P = ParamSpec("P")


def written_as(
    function: Callable[..., Any], stage: Any, name: str, *own: inspect.Parameter
) -> Callable[..., Any]:
    """A function that makes a stage, with the parameters and the text of the stage's class."""
    given: Any = function
    given.__name__, given.__qualname__ = name.rsplit(".", 1)[-1], name
    given.__doc__, given.__module__ = stage.__doc__, stage.__module__
    taken = inspect.signature(stage).parameters.values()
    given.__signature__ = inspect.Signature([*own, *taken], return_annotation="Pipeline")
    return function


class Method(Generic[P]):
    """A method that adds a stage, with the parameters and the text of its class."""

    def __init__(self, stage: Callable[P, Stage]) -> None:
        self._stage = stage

    def __set_name__(self, owner: type, name: str) -> None:
        stage: Any = self._stage

        def add(pipeline: Pipeline, *args: Any, **options: Any) -> Pipeline:
            return pipeline.then(stage(*args, **options))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self._add = written_as(add, stage, f"{owner.__name__}.{name}", own)

    @overload
    def __get__(self, one: None, owner: Any) -> Callable[Concatenate[Pipeline, P], Pipeline]: ...
    @overload
    def __get__(self, one: Pipeline, owner: Any) -> Callable[P, Pipeline]: ...
    def __get__(self, one: Pipeline | None, owner: Any) -> Any:
        return self._add if one is None else MethodType(self._add, one)
