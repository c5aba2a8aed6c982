"""The pipeline of a document: its recipe with the options, its stages, and changes of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_origin

from trainpipes import start
from trainpipes._internal.messages import nearest
from trainpipes._internal.text import shown
from trainpipes.config.document import Document, Node, expanded, joined, path_steps, resolved
from trainpipes.config.values import (
    MADE,
    declared_types,
    fits,
    imported,
    is_name,
    members,
    type_text,
)
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.kinds.stage import Stage
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_registry import recipe, recipe_function

_KEYS = ("recipe", "options", "stages")


@dataclass
class _Step:
    """A stage or a recipe that is to be made."""

    name: str
    kind: Callable[..., Any]
    make: Callable[..., Any]
    node: Node
    path: str
    prefix: str
    nodes: dict[str, Node]
    options: dict[str, Any] = field(default_factory=dict)


class Reader:
    """Reads one document."""

    def __init__(
        self,
        name: str,
        allow_imports: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.document = Document(name, ("!function", "!pipeline"))
        self.used_storage = False
        self._error = self.document.error
        self._allow_imports = allow_imports
        self._storage_options = storage_options

    def change(self, root: Node, path: str, value: Any) -> None:
        steps, node = path_steps(path), root
        for at, step in enumerate(steps):
            if at > 1 and steps[at - 2] == "stages" and isinstance(steps[at - 1], int):
                node = self._stage_parts(node, path, first=steps[at - 1] == 0)[2]
            if node.value is None and isinstance(step, str):
                node.value = {}
            there, last = node.value, at == len(steps) - 1
            if isinstance(step, int):
                good = isinstance(there, list) and step < len(there)
            else:
                new = last or (at == 0 and step == "options")
                good = isinstance(there, dict) and (new or step in there)
            if not good:
                names = [str(key) for key in there] if isinstance(there, dict) else []
                has = f"it has {', '.join(names)}" if names else f"it is {node}"
                said = f"there is no {shown(step)}{nearest(str(step), names)}; {has}"
                raise self._error(Node(None), path, said)
            if last:
                there[step] = Node.of(value)
            elif isinstance(step, str):
                node = there.setdefault(step, Node({}))
            else:
                node = there[step]

    # Nodes to values

    def value(self, node: Node, path: str) -> Any:
        if node.tag == "!pipeline":
            return self.pipeline(Node(node.value, node.line), path)
        value = node.value
        if isinstance(value, str) and "${" in value and node.line is not None:
            try:
                value = expanded(value)
                value = value if node.quoted else resolved(value)
            except ValueError as error:
                raise self._error(node, path, error) from None
        elif isinstance(value, dict):
            value = {key: self.value(one, joined(path, key)) for key, one in value.items()}
        elif isinstance(value, list):
            value = [self.value(one, f"{path}[{n}]") for n, one in enumerate(value)]
        return self._imported(value, node, path) if node.tag else value

    def _imported(self, name: Any, node: Node, path: str) -> Any:
        try:
            return imported(name, self._allow_imports)
        except ValueError as error:
            raise self._error(node, path, error) from error

    def _read_options(self, step: _Step) -> _Step:
        """Read the options of a step, as what they are declared; which there are, it says when it is made."""
        types = declared_types(step.kind)
        for name, node in step.nodes.items():
            at = joined(step.prefix, name)
            if name == "storage_options":
                way = "tp.load(path, storage_options=...), so that credentials are in no file"
                raise self._error(node, at, f"storage_options are not part of a config: {way}")
            step.options[name] = self._option(step, name, node, at, types.get(name, Any))
        takes = inspect.signature(step.kind).parameters
        if self._storage_options is not None and "storage_options" in takes:
            step.options["storage_options"] = dict(self._storage_options)
            self.used_storage = True
        return step

    def _option(self, step: _Step, name: str, node: Node, at: str, declared: Any) -> Any:
        value = self.value(node, at)
        kinds = [get_origin(one) or one for one in members(declared)]
        if isinstance(value, str) and is_name(value) and Callable in kinds and str not in kinds:
            return self._imported(value, node, at)  # where no tag is needed
        if fits(value, declared):
            return value
        make = next((MADE[kind] for kind in kinds if kind in MADE), None)
        if make is not None:
            try:
                return make(value)
            except ValueError as error:
                raise self._error(node, at, error) from error
        hint = "; in quotes it is text" if str in kinds and isinstance(value, int | float) else ""
        rule = f"{step.name}({name}) must be {type_text(declared)}"
        raise self._error(node, at, f"{rule}, got {shown(value)}{hint}")

    # Values to a pipeline

    def pipeline(self, node: Node, path: str = "") -> Pipeline:
        """The pipeline of a document, or of a ``!pipeline`` in it."""
        given = node.value
        if not isinstance(given, dict) or node.tag or not given.keys() & {"recipe", "stages"}:
            rule = "a config must be a mapping with recipe: or stages:"
            raise self._error(node, path, f"{rule}, got {node}")
        for key, one in given.items():
            if key not in _KEYS:
                said = f"there is no {shown(key)} in a config{nearest(str(key), _KEYS)}"
                raise self._error(one, joined(path, key), f"{said}; there are {', '.join(_KEYS)}")
            if key == "options" and "recipe" not in given:
                said = "options are those of a recipe: name one"
                raise self._error(one, joined(path, key), said)
        pipeline = None
        for step in list(self._steps(given, path)):
            pipeline = self._made(pipeline, step)
        if pipeline is None:
            said = "a config must have a recipe or some stages, got none"
            raise self._error(node, path, said)
        return pipeline

    def _steps(self, given: Mapping[str, Node], path: str) -> Iterator[_Step]:
        stages, at = given.get("stages", Node(None)), joined(path, "stages")
        if "recipe" in given:
            yield self._recipe(given["recipe"], given.get("options", Node(None)), path)
        if not isinstance(stages.value or [], list) or stages.tag:
            raise self._error(stages, at, f"stages must be a list, got {stages}")
        for number, node in enumerate(stages.value or []):
            yield self._stage(node, f"{at}[{number}]", not number and "recipe" not in given)

    def _recipe(self, node: Node, options: Node, path: str) -> _Step:
        at, prefix = joined(path, "recipe"), joined(path, "options")
        name = self.value(node, at)
        try:
            function = recipe_function(str(name))
        except ConfigError as error:
            raise self._error(node, at, error) from error
        if not isinstance(options.value or {}, dict) or options.tag:
            raise self._error(options, prefix, f"options must be a mapping, got {options}")
        make, nodes = partial(recipe, name), options.value or {}
        return self._read_options(_Step(name, function, make, node, at, prefix, nodes))

    def _stage(self, node: Node, path: str, first: bool) -> _Step:
        """The stage of an item of the list; a reader that comes first lists its files, too."""
        name, kind, options = self._stage_parts(node, path, first)
        starts = kind.role in ("files", "source")
        if starts and not first:
            raise self._error(node, path, f"{name} is a source, which only the first stage is")
        step = _Step(name, kind, kind, node, path, path, options.value)
        if first and kind.role == "reader":
            if "files" not in options.value:
                said = f"{name} as the first stage needs its files: {name}: {{files: ...}}"
                raise self._error(node, path, said)
            step.make = getattr(start, name)
        elif first and not starts:
            said = f"the first stage must be a source such as list_files, got {name}"
            raise self._error(node, path, said)
        return self._read_options(step)

    def _stage_parts(self, node: Node, path: str, first: bool) -> tuple[str, type[Stage], Node]:
        """The name of a stage, its class, and its options by name, as they then stand there."""
        if isinstance(node.value, str) and not node.tag:
            node.value = {node.value: Node(None, node.line)}
        if not isinstance(node.value, dict) or len(node.value) != 1 or node.tag:
            rule = "a stage must be a name, or a name and its options such as batch: 8"
            raise self._error(node, path, f"{rule}; got {node}")
        ((name, options),) = node.value.items()
        kind = self._stage_class(str(name), node, path)
        if not isinstance(options.value, dict) or options.tag:
            takes: list[str] = list(inspect.signature(kind).parameters)
            takes = ["files"] if first and kind.role == "reader" else takes
            if options.value is not None and not takes:
                raise self._error(node, path, f"{name} has no options, got {options}")
            inner = {} if options.value is None else {takes[0]: options}
            options = node.value[name] = Node(inner, options.line)
        return name, kind, options

    def _stage_class(self, name: str, node: Node, path: str) -> type[Stage]:
        known = start.stage_classes()
        if name in known:
            return known[name]
        if not is_name(name):
            hint = nearest(name, list(known))
            own = "one of your own is package.module:Class"
            raise self._error(node, path, f"there is no stage {shown(name)}{hint}; {own}")
        found = self._imported(name, node, path)
        if not inspect.isclass(found) or not issubclass(found, Stage):
            raise self._error(node, path, f"{name} must be a class of stages, got {shown(found)}")
        return found

    def _made(self, pipeline: Pipeline | None, step: _Step) -> Pipeline:
        """A pipeline with one more step, whose options have been read."""
        try:
            made = step.make(**step.options)
            if isinstance(made, Pipeline):
                return made
            return Pipeline([made]) if pipeline is None else pipeline.then(made)
        except TrainpipesError as error:
            error.message = f"{self._place(step, error)}{error.message}"
            error.path = error.path or self.document.name
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{self._place(step, error)}{error}", path=self.document.name
            ) from error

    def _place(self, step: _Step, error: Exception) -> str:
        """Where the option stands that an error of a stage or recipe is about; else the step."""
        text = str(error)
        asked = re.match(r"(\w+)\((\w+)\)", text)
        for name, node in step.nodes.items():
            value = step.options[name]
            if f"has no option {name!r}" in text:
                about = True
            elif asked is None:
                about = re.match(rf"(?:\w+ takes|a) {re.escape(str(name))} ", text) is not None
                named = rf"(?<![\w/]){re.escape(str(value))}(?![\w/])"
                about = about or (isinstance(value, str) and re.search(named, text) is not None)
            else:
                about = asked[2] in (name, "urls" if name == "files" else name)
                about = about and (asked[1] == step.name or shown(value) in text)
            if about:
                return self.document.at(node, joined(step.prefix, name))
        return self.document.at(step.node, step.path)
