"""``recipes``: which prebuilt pipelines there are.

A recipe is a function, an entry point of ``trainpipes.recipes``, that returns a ``Pipeline``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainpipes._internal.messages import WIDTH, nearest, table
from trainpipes.errors import ConfigError, shown

#: The entry point group in which packages offer recipes.
GROUP = "trainpipes.recipes"


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe.

    Args:
        name: by which ``recipe`` finds it.
        summary: the first line of its docstring, or why it cannot be used.
        options: those that it needs, then the others with their defaults.
        texts: its docstring's texts of options, by name.
    """

    name: str
    summary: str
    options: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The options that have no default."""
        return tuple(
            option for option in self.options if "=" not in option and not option.startswith("*")
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The options that name columns of the rows, as their texts say."""
        return tuple(name for name, text in self.texts.items() if re.match(r"columns?\b", text))


class RecipeTable(tuple[RecipeSummary, ...]):
    """The recipes that are installed, by name. Prints itself as a table.

    >>> RecipeTable([RecipeSummary("count", "Numbers from 0.", ("n", "step=1"))])
    count  Numbers from 0.
           n, step=1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no recipes: no package that offers some is installed"
        rows = [(recipe.name, recipe.summary, ", ".join(recipe.options)) for recipe in self]
        pairs = [pair for name, *texts in rows for pair in zip((name, ""), texts, strict=True)]
        return table([pair for pair in pairs if pair[1]], WIDTH)


def recipes() -> RecipeTable:
    """The recipes that are installed: name, the first line of its docstring, its options. Imports them all.

    >>> import trainpipes as tp
    >>> [recipe.name for recipe in tp.recipes() if recipe.name in ("seq2seq", "sft")]
    ['seq2seq', 'sft']
    """
    return RecipeTable(map(_summary, _installed()))


def recipe_function(name: str) -> Callable[..., Any]:
    """The function that makes the pipeline of a recipe.

    Raises:
        ConfigError: no recipe has that name, several packages offer it, or it cannot be imported.
    """
    installed = _installed()
    if not installed:
        raise ConfigError(
            f"no recipe {name!r}: no package that offers recipes is installed, and a source tree "
            "on the path does not count; pip install it (pip install -e . in the source tree)"
        )
    if name not in [*installed]:  # which may be anything
        raise ConfigError(
            f"no recipe {name!r}{nearest(str(name), list(installed))}; installed are "
            f"{', '.join(installed)}"
        )
    point, *others = installed[name]
    if others:
        several = " and ".join(installed_point.value for installed_point in installed[name])
        raise ConfigError(
            f"recipe {name!r} is offered more than once, as {several}; import the one you mean"
        )
    try:
        build = point.load()
    except Exception as error:  # the package's own, of any kind
        raise ConfigError(
            f"recipe {name!r} is installed as {point.value}, which cannot be imported: {error}"
        ) from error
    if not callable(build):
        raise ConfigError(
            f"recipe {name!r} must be a function that returns a Pipeline, got {shown(build)} at "
            f"{point.value}"
        )
    return build  # type: ignore[no-any-return]


def _installed() -> dict[str, list[EntryPoint]]:
    """All recipes by name, sorted; those that several packages offer under the same name together."""
    points: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        # A source tree and an installed copy of it may both be on the path.
        points.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: list(points[name].values()) for name in sorted(points)}


def _summary(name: str) -> RecipeSummary:
    try:
        build = recipe_function(name)
    except ConfigError as error:
        return RecipeSummary(name, str(error))
    doc = inspect.getdoc(build) or build.__module__
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
    entries = re.findall(r"^\**(\w+)(?: \([^)]*\))?: ?(.*(?:\n[ \n].*)*)", body, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
