"""``recipe``: prebuilt pipelines by name; ``recipes``: which there are.

A recipe is a function, an entry point of ``trainpipes.recipes``, that returns a ``Pipeline``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainpipes._internal.checks import copied, flag
from trainpipes._internal.messages import nearest
from trainpipes._internal.table import WIDTH, table
from trainpipes.errors import ConfigError
from trainpipes.errors.text import shown
from trainpipes.interfaces.options import in_our_words
from trainpipes.pipeline.chain import Pipeline

#: The entry point group in which packages offer recipes.
GROUP = "trainpipes.recipes"


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
    count  Numbers from 0.
           n, step=1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no recipes: no package that offers some is installed"
        rows = [(one.name, one.summary, ", ".join(one.options)) for one in self]
        pairs = [pair for name, *texts in rows for pair in zip((name, ""), texts, strict=True)]
        return table([pair for pair in pairs if pair[1]], WIDTH)


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
    build, options = recipe_function(name), copied(options)
    given = _bound(name, inspect.signature(build), arguments, options)
    ours = build.__module__.startswith("trainpipes_recipes.")
    with in_our_words(f"recipe {name}", given) if ours else nullcontext():
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
    return RecipeTable(map(_summary, _installed()))


def recipe_function(name: str) -> Callable[..., Any]:
    """The function that makes the pipeline of a recipe.

    Raises:
        ConfigError: no recipe has that name, several packages offer one, or it cannot be imported.
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
    point, *others = installed[name]
    if others:
        several = " and ".join(one.value for one in installed[name])
        raise ConfigError(
            f"recipe {name!r} is offered more than once, as {several}; import the one you mean"
        )
    try:
        build = point.load()
    except (ImportError, AttributeError) as error:
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
    """All recipes by name, sorted; those that several packages offer under one name together."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        # A source tree and an installed copy of it may both be on the path.
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: list(found[name].values()) for name in sorted(found)}


def _bound(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The options that a recipe is given, by name; raises unless it takes them."""
    known = signature.parameters
    plain = [one.replace(annotation=one.empty) for one in known.values()]
    takes = f"it is {name}{inspect.Signature(plain)}"
    rest = next((one.name for one in plain if one.kind is one.VAR_KEYWORD), None)
    for option in options:
        if option not in known and rest is None:
            hint = nearest(option, list(known))
            raise ConfigError(f"recipe {name!r} has no option {option!r}{hint}; {takes}")
    try:
        given = signature.bind(*arguments, **options).arguments
    except TypeError as error:
        raise ConfigError(f"recipe {name!r}: {error}; {takes}") from None
    for option, value in given.items():
        if known[option].annotation in (bool, "bool"):
            flag(value, f"{name}({option})")
    more: dict[str, Any] = given.pop(rest or "", {})
    return given | more


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
    found = re.findall(r"^\**(\w+)(?: \([^)]*\))?: ?(.*(?:\n[ \n].*)*)", body, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
