"""``recipe``: prebuilt pipelines by name; ``recipes``: which there are.

A recipe is a function that returns a ``Pipeline``. Packages offer theirs as entry points of the group
``trainpipes.recipes``; so does the one that comes with this library, which imports none of them
itself.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainpipes._internal.messages import nearest
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import copied
from trainpipes.pipeline import Pipeline

#: The entry point group in which packages offer recipes.
GROUP = "trainpipes.recipes"

#: Columns of the table as text.
WIDTH = 100


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe.

    Args:
        name: by which ``recipe`` finds it.
        summary: the first line of its docstring, or why it cannot be used.
        options: those that it needs, then the others with their defaults.
        texts: what its docstring says of each option, by name.
    """

    name: str
    summary: str
    options: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The options that have no default."""
        return tuple(one for one in self.options if "=" not in one and not one.startswith("*"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The options that name columns of the rows, as their texts say."""
        return tuple(name for name, text in self.texts.items() if re.match(r"columns?\b", text))


class RecipeTable(tuple[RecipeSummary, ...]):
    """The recipes that are installed, by name. Prints itself as a table.

    >>> RecipeTable([RecipeSummary("count", "Numbers from 0.", ("n", "step=1"))])
    count   Numbers from 0.
            n, step=1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no recipes: no package that offers some is installed"
        indent = max(len(one.name) for one in self) + 3
        lines = []
        for one in self:
            texts = [one.summary, ", ".join(one.options)]
            wrapped = [line for text in texts for line in textwrap.wrap(text, WIDTH - indent)]
            lines += [f"{'' if n else one.name:{indent}}{line}" for n, line in enumerate(wrapped)]
        return "\n".join(lines)


def recipe(name: str, /, *arguments: Any, **options: Any) -> Pipeline:
    """The pipeline of a recipe that is installed; ``recipes()`` lists them.

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
    _check(name, signature, arguments, options)
    given = dict(signature.bind(*arguments, **options).arguments)
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            given |= given.pop(one.name, {})
    pipeline = build(*arguments, **options)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"recipe {name!r} must return a trainpipes Pipeline, got {type(pipeline).__name__} from "
            f"{build.__module__}.{build.__qualname__}"
        )
    made = Pipeline(pipeline._stages, pipeline._ranks, pipeline._members)
    made._recipe = name, copied(given), len(made._stages)  # for to_yaml()
    return made


def recipes() -> RecipeTable:
    """The recipes that are installed: name, the first line of what it does, its options. Imports them all.

    >>> import trainpipes as tp
    >>> [recipe.name for recipe in tp.recipes() if recipe.name in ("seq2seq", "sft")]
    ['seq2seq', 'sft']
    """
    return RecipeTable(_summary(name, points) for name, points in _installed().items())


def recipe_function(name: str) -> Callable[..., Any]:
    """The function that makes the pipeline of a recipe.

    Raises:
        ConfigError: no recipe has that name, or it cannot be imported.
    """
    return load(find(name))


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
        raise ConfigError(f"recipe {name!r} is {_twice(installed[name])}; import the one you mean")
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
            f"recipe {point.name!r} must be a function that returns a Pipeline, got {shown(build)} at "
            f"{point.value}"
        )
    return build  # type: ignore[no-any-return]


def _installed() -> dict[str, list[EntryPoint]]:
    """All recipes by name, sorted; those that several packages offer under one name together."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        # A source tree and an installed copy of it may both be on the path.
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: list(found[name].values()) for name in sorted(found)}


def _twice(points: list[EntryPoint]) -> str:
    return f"offered more than once, as {' and '.join(point.value for point in points)}"


def _check(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise unless a recipe takes these options; say which it takes."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    ordered = [p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = ordered[: len(arguments)]
    twice = [option for option in given if option in options]
    if len(arguments) > len(ordered) or twice:
        got = f"{twice[0]!r} by name, too" if twice else f"{len(arguments)}"
        raise ConfigError(
            f"recipe {name!r} takes {', '.join(ordered) or 'no option'} by position, got {got}: "
            "give the others by name"
        )
    takes = f"it is {name}{inspect.Signature(plain)}"
    if not any(p.kind is p.VAR_KEYWORD for p in plain):
        for option in options:
            if option not in signature.parameters:
                hint = nearest(option, list(signature.parameters))
                raise ConfigError(f"recipe {name!r} has no option {option!r}{hint}; {takes}")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in plain if p.default is p.empty and p.kind not in variadic]
    missing = [option for option in needed if option not in options and option not in given]
    if missing:
        raise ConfigError(f"recipe {name!r} needs {' and '.join(missing)}; {takes}")


def _summary(name: str, points: list[EntryPoint]) -> RecipeSummary:
    if len(points) > 1:
        return RecipeSummary(name, _twice(points))
    try:
        build = load(points[0])
    except ConfigError as error:
        return RecipeSummary(name, str(error))
    doc = inspect.getdoc(build) or points[0].value
    parameters = inspect.signature(build).parameters.values()
    options = tuple(str(p.replace(annotation=p.empty)) for p in parameters)
    return RecipeSummary(name, doc.splitlines()[0], options, _option_texts(doc))


def _option_texts(doc: str) -> dict[str, str]:
    """What the section "Args:" of a docstring says of each argument.

    >>> _option_texts("Counts.\\n\\nArgs:\\n    n: how far, or\\n        None.\\n    *step: each.")
    {'n': 'how far, or None.', 'step': 'each.'}
    """
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)*)", doc + "\n", re.MULTILINE)
    body = textwrap.dedent(section[1]) if section else ""
    found = re.findall(r"^\**(\w+)(?: \([^)]*\))?: ?(.*(?:\n[ \n].*)*)", body, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
