"""``recipe``: prebuilt pipelines by name; ``recipes``: which there are.

A recipe is a function that returns a ``Pipeline``. Packages offer theirs as entry points of the group
``trainpipes.recipes``; so does the one that comes with this library, which imports none of them
itself.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_table import RecipeSummary, RecipeTable, option_texts

__all__ = ["GROUP", "find", "load", "recipe", "recipe_function", "recipes"]

#: Kinds of parameters that can be given by name.
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

#: The entry point group in which packages offer recipes.
GROUP = "trainpipes.recipes"


def recipe(name: str, /, *arguments: Any, **options: Any) -> Pipeline:
    """The pipeline of a recipe that is installed.

    Args:
        name: of the recipe: "sft", "seq2seq", or one that another package offers.
        arguments: the recipe's first options, in its order: the files, as a rule.
        options: the recipe's own, by name.

    Raises:
        ConfigError: no recipe has that name, it cannot be imported, or it does not take these
            options.

    >>> import trainpipes as tp
    >>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": "2"}] * 8)
    >>> batch, *_ = tp.recipe("sft", sums, tokenizer="bytes", batch_size=4)
    >>> batch["input_ids"].shape
    torch.Size([4, 8])
    """
    build = recipe_function(name)
    signature = inspect.signature(build)
    options = {**_named(name, signature, arguments, options), **options}
    _check(name, signature, options)
    pipeline = build(**options)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"recipe {name!r} returns a trainpipes Pipeline, got {type(pipeline).__name__} from "
            f"{build.__module__}.{build.__qualname__}"
        )
    return pipeline


def recipe_function(name: str) -> Callable[..., Any]:
    """The function that makes the pipeline of a recipe.

    Raises:
        ConfigError: no recipe has that name, or it cannot be imported.
    """
    return load(find(name))


def recipes() -> RecipeTable:
    """The recipes that are installed: name, the first line of what it does, its options. Imports them all.

    >>> import trainpipes as tp
    >>> [recipe.name for recipe in tp.recipes() if recipe.name in ("seq2seq", "sft")]
    ['seq2seq', 'sft']
    """
    return RecipeTable(_summary(name, points) for name, points in _installed().items())


class RecipeDoc(str):
    """``recipe``'s docstring, with the recipes that are installed when it is shown: reading all of
    theirs takes longer than importing this package."""

    __slots__ = ()

    def expandtabs(self, tabsize: Any = 8) -> str:  # with which inspect.getdoc starts
        listed = textwrap.indent(repr(recipes()), "    ")
        return f"{self}\n\n    Installed are:\n\n{listed}\n".expandtabs(tabsize)


recipe.__doc__ = RecipeDoc(recipe.__doc__)


def _named(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """What is given by position, by name."""
    ordered = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = ordered[: len(arguments)]
    twice = [option for option in taken if option in options]
    if len(arguments) > len(ordered) or twice:
        got = f"{len(arguments)}" if not twice else f"{twice[0]!r} by name, too"
        raise ConfigError(
            f"recipe {name!r} takes {', '.join(ordered) or 'no option'} by position, got {got}: "
            "give the others by name"
        )
    return dict(zip(taken, arguments, strict=True))


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
    needed = [p.name for p in plain if p.default is p.empty and p.kind in BY_NAME]
    missing = [option for option in needed if option not in options]
    if missing:
        raise ConfigError(f"recipe {name!r} needs {' and '.join(missing)}; it is {shown}")
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


def _summary(name: str, points: list[EntryPoint]) -> RecipeSummary:
    if len(points) > 1:
        places = " and ".join(point.value for point in points)
        return RecipeSummary(name, f"offered more than once, as {places}", ())
    try:
        build = load(points[0])
    except ConfigError as error:
        return RecipeSummary(name, str(error), ())
    first = (inspect.getdoc(build) or points[0].value).splitlines()[0]
    parameters = inspect.signature(build).parameters.values()
    options = tuple(str(p.replace(annotation=p.empty)) for p in parameters)
    return RecipeSummary(name, first, options, option_texts(inspect.getdoc(build)))


def find(name: str) -> EntryPoint:
    """The recipe of a name, not yet imported.

    Raises:
        ConfigError: there is none, or several packages offer one.
    """
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


def load(point: EntryPoint) -> Callable[..., Any]:
    """A recipe, imported.

    Raises:
        ConfigError: that is impossible, or it is no function.
    """
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
