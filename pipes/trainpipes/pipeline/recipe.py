"""``recipe``: the pipeline of a recipe."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from trainpipes._internal.checks import copied, flag
from trainpipes._internal.messages import nearest
from trainpipes.engine.record import of_recipe
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import in_our_words
from trainpipes.pipeline.chain import Pipeline
from trainpipes.recipe_registry import recipe_function


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
    return of_recipe(pipeline, name, copied(given))


def _bound(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The options that a recipe is given, by name; raises unless it takes them."""
    known = signature.parameters
    plain = [parameter.replace(annotation=parameter.empty) for parameter in known.values()]
    takes = f"it is {name}{inspect.Signature(plain)}"
    rest = next(
        (parameter.name for parameter in plain if parameter.kind is parameter.VAR_KEYWORD), None
    )
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
