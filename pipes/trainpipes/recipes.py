"""``recipe``: prebuilt pipelines by name.

A recipe is a function that returns a ``Pipeline``. Packages offer theirs as entry points of the group
``trainpipes.recipes``; so does the one that comes with this library, which imports none of them
itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ParamSpec

from trainpipes.errors import ConfigError
from trainpipes.naming import nearest
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.options import spelt
from trainpipes.shown import shown

__all__ = ["GROUP", "recipe", "renamed"]

P = ParamSpec("P")

#: The entry point group in which packages offer recipes.
GROUP = "trainpipes.recipes"


def recipe(name: str, /, **options: Any) -> Pipeline:
    """The pipeline of a recipe that is installed.

    Args:
        name: of the recipe: "sft", "seq2seq", or one that another package offers.
        options: the recipe's own, by name.

    Raises:
        ConfigError: no recipe has that name, it cannot be imported, or it does not take these
            options.

    >>> import trainpipes as tp
    >>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": "2"}] * 8)
    >>> batch, *_ = tp.recipe("sft", files=sums, tokenizer="bytes", batch_size=4)
    >>> batch["input_ids"].shape
    torch.Size([4, 8])
    """
    build = _load(_find(name))
    _check(name, inspect.signature(build), options)
    pipeline = build(**options)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"recipe {name!r} returns a trainpipes Pipeline, got {type(pipeline).__name__} from "
            f"{build.__module__}.{build.__qualname__}"
        )
    return pipeline


def renamed(**names: str) -> Callable[[Callable[P, Pipeline]], Callable[P, Pipeline]]:
    """Have a recipe know older names of its options, which are warned about.

    Args:
        names: the name now of each older one.
    """

    def knowing(build: Callable[P, Pipeline]) -> Callable[P, Pipeline]:
        @functools.wraps(build)
        def built(*args: P.args, **options: P.kwargs) -> Pipeline:
            return build(*args, **spelt(build.__name__, names, options))

        return built

    return knowing


def _check(name: str, signature: inspect.Signature, options: dict[str, Any]) -> None:
    parameters = signature.parameters
    plain = [p.replace(annotation=p.empty) for p in parameters.values()]
    shown = f"{name}{inspect.Signature(plain)}"
    if not any(p.kind is p.VAR_KEYWORD for p in plain):
        for option in options:
            if option not in parameters:
                raise ConfigError(
                    f"recipe {name!r} has no option {option!r}{nearest(option, list(parameters))}; it "
                    f"is {shown}"
                )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"recipe {name!r}: {error}; it is {shown}") from None


def _installed() -> dict[str, list[EntryPoint]]:
    """All recipes by name, sorted; those that several packages offer under one name together."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        # A source tree and an installed copy of it may both be on the path.
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: list(found[name].values()) for name in sorted(found)}


def _find(name: str) -> EntryPoint:
    installed = _installed()
    if not installed:
        raise ConfigError(
            f"no recipe {name!r}: no package that offers recipes is installed, and a source tree "
            "on the path does not count; pip install it (pip install -e . in the source tree)"
        )
    if name not in installed:
        raise ConfigError(
            f"no recipe {name!r}{nearest(str(name), list(installed))}; installed are "
            f"{', '.join(installed)}"
        )
    if len(installed[name]) > 1:
        places = " and ".join(point.value for point in installed[name])
        raise ConfigError(
            f"recipe {name!r} is offered more than once, as {places}; import the one you mean"
        )
    return installed[name][0]


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        build = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"recipe {point.name!r} is installed as {point.value}, which cannot be imported: {error}"
        ) from error
    if not callable(build):
        raise ConfigError(
            f"recipe {point.name!r} is a function that returns a Pipeline, got {shown(build)} at "
            f"{point.value}"
        )
    return build  # type: ignore[no-any-return]
