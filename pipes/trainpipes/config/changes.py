"""Changes to a document: values by their paths, as ``--set`` on a command line gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.config.build import build
from trainpipes.config.compose import compose
from trainpipes.config.declared import parameters_of
from trainpipes.config.nodes import Items, Keyed, Node, Text, is_null, kind_of
from trainpipes.config.origin import Origin
from trainpipes.config.read_values import Reader, Wanted
from trainpipes.config.stage_names import public_stages
from trainpipes.config.write_values import Unwritable, Writer
from trainpipes.errors import ConfigError

__all__ = ["apply", "parse_change"]

_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]|\[\"([^\"]*)\"\]")


def parse_change(text: str) -> tuple[str, Any]:
    """The path and the value of ``path=value``, the value read as in a config: a number, true, null, a text
    in quotes or without, a list or mapping in brackets, ``${NAME}``, ``!dtype int32``.

    Args:
        text: as it is given on a command line.

    Returns:
        What ``load(..., changes={path: value})`` takes.

    Raises:
        ConfigError: there is no ``=``, or the value is no YAML.

    >>> parse_change("options.batch_size=16"), parse_change("stages[0].columns=[a, '1']")
    (('options.batch_size', 16), ('stages[0].columns', ['a', '1']))
    """
    path, mark, value = text.partition("=")
    path = path.strip()
    if not mark or not path:
        raise ConfigError(
            f"a change is path=value, such as options.batch_size=16 or stages[2].seed=1; got {shown(text)}"
        )
    steps_of(path)
    origin = Origin(f"the change {path}")
    node = compose(value, origin)
    if node is None:
        return path, None
    if _is_more(node):
        return path, _of_no_line(node)
    return path, Reader(origin, False, None, build).read(node, Wanted("a change", path))


def _is_more(node: Node) -> bool:
    """Whether a value is known only where it is loaded: one with a tag, or a variable."""
    if node.tag is not None:
        return True
    if isinstance(node, Text):
        return "${" in node.text
    if isinstance(node, Items):
        return any(map(_is_more, node.items))
    assert isinstance(node, Keyed)
    return any(_is_more(key) or _is_more(one) for key, one in node)


def steps_of(path: str) -> list[str | int]:
    """The names and numbers of a path.

    >>> steps_of("stages[2].columns['a b']")
    ['stages', 2, 'columns', 'a b']
    """
    found: list[str | int] = []
    at = 0
    while at < len(path) or not at:
        step = _STEP.match(path, at)
        if step is None or (not at and step[0][0] in ".["):
            raise ConfigError(
                f"{shown(path)} is no path: it is written as options.batch_size or stages[2].buffer_size"
            )
        found.append(
            int(step[2])
            if step[2]
            else next(one for one in (step[1], step[3], step[4]) if one is not None)
        )
        at = step.end()
    return found


def apply(root: Node | None, changes: Mapping[str, Any], origin: Origin) -> Node | None:
    """A document with some values changed.

    Raises:
        ConfigError: a path leads nowhere; says what is there.
    """
    for path, value in changes.items():
        node = value if isinstance(value, Node) else _of_no_line(_written(value, path, origin))
        steps = steps_of(path)
        root = _changed(root, steps, 0, path, node, origin)
    return root


def _written(value: Any, path: str, origin: Origin) -> Node:
    try:
        return Writer(expand=False).node(value)
    except Unwritable as error:
        raise _nowhere(origin, path, error.text) from None


def _changed(
    node: Node | None, steps: list[str | int], at: int, path: str, value: Node, origin: Origin
) -> Node:
    if at == len(steps):
        return value
    step = steps[at]
    said = _said(steps[:at]) or "the config"
    if isinstance(step, int):
        if not isinstance(node, Items) or step >= len(node.items):
            what = f"{len(node.items)} items" if isinstance(node, Items) else _kind(node)
            raise _nowhere(origin, path, f"{said} has no item {step}: it is {what}")
        items = list(node.items)
        items[step] = _changed(items[step], steps, at + 1, path, value, origin)
        return Items(node.line, node.tag, items=items)
    node = _as_options(node, steps, at)
    if is_null(node):
        node = Keyed(None)
    if not isinstance(node, Keyed):
        raise _nowhere(origin, path, f"{said} is {_kind(node)}, and has no {shown(step)}")
    if _is_stage(steps, at) and len(node.pairs) == 1:
        key, options = node.pairs[0]
        return Keyed(
            node.line, node.tag, pairs=[(key, _option(options, steps, at, path, value, origin))]
        )
    return _option(node, steps, at, path, value, origin)


def _option(
    node: Node, steps: list[str | int], at: int, path: str, value: Node, origin: Origin
) -> Keyed:
    assert isinstance(node, Keyed)
    step = str(steps[at])
    there = node.get(step)
    if there is None and at + 1 < len(steps) and not (at == 0 and step == "options"):
        names = [key.text for key, _ in node]
        said = _said(steps[:at]) or "the config"
        raise _nowhere(
            origin,
            path,
            f"{said} has no {shown(step)}{nearest(step, names)}; it has {', '.join(names) or 'nothing'}",
        )
    found = Keyed(node.line, node.tag, pairs=list(node.pairs))
    found.put(step, _changed(there, steps, at + 1, path, value, origin))
    return found


def _is_stage(steps: list[str | int], at: int) -> bool:
    return at >= 2 and steps[at - 2] == "stages" and isinstance(steps[at - 1], int)


def _as_options(node: Node | None, steps: list[str | int], at: int) -> Node | None:
    """A stage with its options by name, also where the document has its name alone, or its first option."""
    if not _is_stage(steps, at):
        return node
    if isinstance(node, Text):
        return Keyed(node.line, pairs=[(node, Keyed(node.line))])
    if isinstance(node, Keyed) and len(node.pairs) == 1:
        key, options = node.pairs[0]
        if isinstance(options, Keyed) and options.tag in (None, "!!map"):
            return node
        if isinstance(options, Text) and options.text == "" and options.plain:
            return Keyed(node.line, pairs=[(key, Keyed(options.line))])
        first = _first_option(key.text, reading=steps[at - 1] == 0)
        if first is not None:
            pair = Text(options.line, text=first), options
            return Keyed(node.line, pairs=[(key, Keyed(options.line, pairs=[pair]))])
    return node


def _first_option(name: str, reading: bool) -> str | None:
    kind = public_stages().get(name)
    if kind is None:
        return None
    return "files" if reading and kind.role == "reader" else next(iter(parameters_of(kind)), None)


def _said(steps: list[str | int]) -> str:
    found = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return found.lstrip(".")


def _kind(node: Node | None) -> str:
    return "nothing" if node is None else kind_of(node)


def _nowhere(origin: Origin, path: str, text: str) -> ConfigError:
    return ConfigError(f"{origin.name}, changes: {path}: {text}", path=origin.name)


def _of_no_line(node: Node) -> Node:
    """A node that is of no file."""
    node.line = None
    if isinstance(node, Items):
        for one in node.items:
            _of_no_line(one)
    if isinstance(node, Keyed):
        for key, one in node.pairs:
            key.line = None
            _of_no_line(one)
    return node
