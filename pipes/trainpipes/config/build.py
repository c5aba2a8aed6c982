"""Nodes to a pipeline: a recipe with its options, or stages one after the other."""

from __future__ import annotations

import inspect

from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.config.declared import parameters_of, types_of
from trainpipes.config.functions import is_name
from trainpipes.config.nodes import Items, Keyed, Node, Text, is_null, kind_of
from trainpipes.config.origin import joined
from trainpipes.config.read_values import Reader, Wanted
from trainpipes.config.stage_names import public_stages, starts_with
from trainpipes.config.steps import Step, need_options, placed, read_options
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.kinds.stage import Stage
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_registry import recipe_function
from trainpipes.sources.files.list_files import ListFiles

__all__ = ["build"]

KEYS = ("recipe", "options", "stages")


def build(reader: Reader, node: Node | None, path: str = "") -> Pipeline:
    """The pipeline of a document, or of a ``!pipeline`` in it.

    Args:
        reader: of the document.
        node: a mapping of ``recipe`` and ``options``, or of ``stages``.
        path: to it.

    Raises:
        ConfigError: it is none; says where.
    """
    origin = reader.origin
    if is_null(node):
        raise origin.error(None, path, "there is nothing in it: a config has recipe: or stages:")
    if not isinstance(node, Keyed):
        hint = (
            ", got a list: put it under stages:"
            if isinstance(node, Items)
            else f", got {kind_of(node)}"
        )
        raise origin.error(node, path, f"a config is a mapping with recipe: or stages:{hint}")
    if node.tag not in (None, "!!map", "!pipeline"):
        raise origin.error(node, path, f"a config has no tag, got {node.tag}")
    for key, _ in node:
        if key.text not in KEYS:
            raise origin.error(
                key,
                joined(path, key.text),
                f"there is no {shown(key.text)} in a config{nearest(key.text, KEYS)}; there are "
                "recipe, options and stages",
            )
    steps: list[Step] = []
    if node.get("recipe") is not None:
        steps.append(_recipe(reader, node, path))
    elif node.get("options") is not None:
        raise origin.error(
            node.get("options"),
            joined(path, "options"),
            "options are those of a recipe, and there is none",
        )
    elif node.get("stages") is None:
        raise origin.error(node, path, "a config has recipe: or stages:, and this has neither")
    steps += _stages(reader, node, path, after=bool(steps))
    return _made(reader, steps)


def _recipe(reader: Reader, node: Keyed, path: str) -> Step:
    origin, at = reader.origin, joined(path, "recipe")
    named = node.get("recipe")
    assert named is not None
    name = reader.read(named, Wanted("recipe", at, str))
    try:
        make = recipe_function(name)
    except ConfigError as error:
        raise origin.error(named, at, error) from error
    step = Step(name, make, named, at, prefix=joined(path, "options"))
    given = node.get("options")
    if given is None or is_null(given):
        given = Keyed(named.line)
    if not isinstance(given, Keyed) or given.tag not in (None, "!!map"):
        raise origin.error(
            given, step.prefix, f"options are a mapping of names, got {kind_of(given)}"
        )
    read_options(reader, step, given, f"recipe {name!r}")
    need_options(reader, step, f"recipe {name!r}")
    return step


def _stages(reader: Reader, node: Keyed, path: str, after: bool) -> list[Step]:
    given, at = node.get("stages"), joined(path, "stages")
    if given is None or (after and is_null(given)):
        return []
    good = isinstance(given, Items) and given.tag in (None, "!!seq")
    if not isinstance(given, Items) or not good or (not given.items and not after):
        what = "an empty list" if good else kind_of(given)
        raise reader.origin.error(
            given, at, f"stages are a list, the first one a source; got {what}"
        )
    steps: list[Step] = []
    for number, one in enumerate(given.items):
        steps += _stage(reader, one, f"{at}[{number}]", first=not (number or after))
    return steps


def _stage(reader: Reader, node: Node, path: str, first: bool) -> list[Step]:
    """The stage of an item of the list; two for a reader with its files."""
    origin = reader.origin
    if isinstance(node, Text) and node.tag is None:
        named, given = node, None
    elif isinstance(node, Keyed) and len(node.pairs) == 1 and node.tag is None:
        named, given = node.pairs[0]
    else:
        what = f"{len(node.pairs)} names" if isinstance(node, Keyed) else kind_of(node)
        raise origin.error(
            node,
            path,
            f"a stage is a name, or a name and its options, such as batch: 8; got {what}",
        )
    kind = _kind(reader, named, path)
    if isinstance(given, Text) and is_null(given) and given.text == "":
        given = None
    step = Step(named.text, kind, node, path, prefix=path)
    if first and not starts_with(kind) and kind.role != "reader":
        raise origin.error(
            named,
            path,
            f"the first stage is a source such as list_files or read_parquet, got {named.text}",
        )
    if first and kind.role == "reader":
        return _reader_with_files(reader, step, given)
    if not first and starts_with(kind):
        raise origin.error(named, path, f"{named.text} is a source, which only the first stage is")
    _give(reader, step, given, next(iter(parameters_of(kind)), None))
    need_options(reader, step, step.name)
    return [step]


def _kind(reader: Reader, named: Text, path: str) -> type[Stage]:
    known = public_stages()
    if named.text in known:
        return known[named.text]
    if not is_name(named.text):
        names = list(known)
        hint = nearest(named.text, names)
        raise reader.origin.error(
            named,
            path,
            f"there is no stage {shown(named.text)}{hint}; one of your own is package.module:Class",
        )
    kind = reader.function(named, path, named.text, "a stage")
    if not inspect.isclass(kind) or not issubclass(kind, Stage):
        raise reader.origin.error(
            named,
            path,
            f"{named.text} is no stage: one of your own is a class of trainpipes.RowStage or the like",
        )
    return kind


def _reader_with_files(reader: Reader, step: Step, given: Node | None) -> list[Step]:
    """``read_parquet: {files: ..., columns: ...}`` as ``trainpipes.read_parquet(files, ...)``."""
    listing = Step("list_files", ListFiles, step.node, step.path, prefix=step.path)
    files = given.get("files") if isinstance(given, Keyed) else given
    if files is None:
        raise reader.origin.error(
            step.node,
            step.path,
            f"{step.name} is the first stage, and needs its files: {step.name}: {{files: ...}}",
        )
    at = joined(step.path, "files")
    listing.nodes["urls"] = files
    listing.called["urls"] = "files"
    listing.options["urls"] = reader.read(
        files, Wanted(f"{step.name}(files)", at, types_of(ListFiles)["urls"])
    )
    rest: Node | None = None
    if isinstance(given, Keyed):
        rest = Keyed(given.line, pairs=[pair for pair in given if pair[0].text != "files"])
    _give(reader, step, rest, None)
    need_options(reader, step, step.name)
    return [listing, step]


def _give(reader: Reader, step: Step, given: Node | None, first: str | None) -> None:
    """Read the options of a stage: by name, or the first one."""
    if given is None:
        return
    if isinstance(given, Keyed) and (given.tag is None or given.tag == "!!map"):
        read_options(reader, step, given, step.name)
        return
    if first is None:
        raise reader.origin.error(
            given, step.path, f"{step.name} has no options, got {kind_of(given)}"
        )
    read_options(
        reader, step, Keyed(given.line, pairs=[(Text(given.line, text=first), given)]), step.name
    )


def _made(reader: Reader, steps: list[Step]) -> Pipeline:
    """The pipeline of steps whose options have been read."""
    pipeline: Pipeline | None = None
    for step in steps:
        known = parameters_of(step.make)
        if reader.storage_options is not None and "storage_options" in known:
            step.options["storage_options"] = dict(reader.storage_options)
            reader.used_storage = True
        try:
            made = step.make(**step.options)
            if pipeline is not None:
                pipeline = pipeline.then(made)
            else:
                pipeline = made if isinstance(made, Pipeline) else Pipeline([made])
        except (TrainpipesError, TypeError, ValueError, OverflowError) as error:
            problem = placed(reader, step, error)
            if problem is error:
                raise
            raise problem from error
    assert pipeline is not None
    return pipeline
