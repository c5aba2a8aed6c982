"""The pipeline of a document: its recipe with the options, its stages, and changes of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainpipes._internal.messages import nearest
from trainpipes.config import document
from trainpipes.errors import ConfigError, TrainpipesError, shown
from trainpipes.interfaces.options import declared_kinds
from trainpipes.interfaces.quarantine import Quarantine
from trainpipes.interfaces.stage import Stage, snake_case, stage_classes
from trainpipes.interfaces.stage_kinds import ReadingSource, Source
from trainpipes.pipeline import starts
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.recipe import recipe
from trainpipes.recipe_registry import recipe_function

_KEYS = ("recipe", "options", "stages")


@dataclass
class Reader(document.Document):
    """Makes the pipeline that a document describes."""

    allow_imports: bool = False
    storage_options: Mapping[str, Any] | None = None
    used_storage: bool = False

    def change(self, root: document.Node, path: str, value: Any) -> None:
        steps, node = document.path_steps(path), root
        for at, step in enumerate(steps):
            if at > 1 and steps[at - 2] == "stages":
                node = self._stage_parts(node, path, first=steps[at - 1] == 0)[2]
            if isinstance(step, str) and node.value is None:
                node.value = {}
            there, last = node.value, at == len(steps) - 1
            if at == 0 and step == "options" and isinstance(there, dict):
                there.setdefault(step, document.Node({}))
            good = isinstance(there, dict) and isinstance(step, str) and (last or step in there)
            if isinstance(there, list) and isinstance(step, int):
                good = step < len(there)
            names = [str(key) for key in there] if isinstance(there, dict) else []
            has = f"it has {', '.join(names)}" if names else f"it is {node}"
            said = f"there is no {shown(step)}{nearest(str(step), names)}; {has}"
            self.need(good, document.Node(None), path, said)
            if last:
                there[step] = document.Node.of(value)
            else:
                node = there[step]

    # Nodes to values

    def value(self, node: document.Node, path: str) -> Any:
        if node.tag == "!pipeline":
            return self.pipeline(document.Node(node.value, node.line), path)
        value = node.value
        if isinstance(value, dict):
            value = {
                key: self.value(inner, document.joined(path, key)) for key, inner in value.items()
            }
        elif isinstance(value, list):
            value = [self.value(inner, f"{path}[{n}]") for n, inner in enumerate(value)]
        elif isinstance(value, str) and "${" in value and node.line is not None:
            value = self._asked(node, path, document.expanded, value)
            value = value if node.quoted else self._asked(node, path, document.resolved, value)
        return self._imported(value, node, path) if node.tag else value

    def _asked(self, node: document.Node, path: str, call: Callable[..., Any], *given: Any) -> Any:
        """What a function says, whose ValueError then says where."""
        try:
            return call(*given)
        except ValueError as error:
            raise self.error(node, path, error) from error

    def _imported(self, name: Any, node: document.Node, path: str) -> Any:
        return self._asked(node, path, document.imported, name, self.allow_imports)

    def _option(self, node: document.Node, path: str, kinds: list[Any]) -> Any:
        value = self.value(node, path)
        calls = Callable in kinds and str not in kinds
        if calls and isinstance(value, str) and document.is_name(value):
            return self._imported(value, node, path)  # where no tag is needed
        make = next((document.MADE[kind] for kind in kinds if kind in document.MADE), None)
        if make is None or value is None or type(value) in kinds:
            return value
        return self._asked(node, path, make, value)

    # Values to a pipeline

    def pipeline(self, node: document.Node, path: str = "") -> Pipeline:
        """The pipeline of a document, or of a ``!pipeline`` in it."""
        given, pipeline = node.value, None
        has = isinstance(given, dict) and not node.tag and given.keys() & {"recipe", "stages"}
        rule = "a config must be a mapping with recipe: or stages:"
        self.need(has, node, path, f"{rule}, got {node}")
        for key, value in given.items():
            if key not in _KEYS:
                said = f"there is no {shown(key)} in a config{nearest(str(key), _KEYS)}; there are "
                hint = f"; an option of the recipe is options.{key}" if "recipe" in given else ""
                raise self.error(
                    value, document.joined(path, key), f"{said}{', '.join(_KEYS)}{hint}"
                )
        options, stages = (given.get(key, document.Node(None)) for key in ("options", "stages"))
        if "recipe" in given:
            pipeline = self._recipe(given["recipe"], options, path)
        elif "options" in given:
            said = "options are those of a recipe: name one"
            raise self.error(options, document.joined(path, "options"), said)
        at, good = (
            document.joined(path, "stages"),
            isinstance(stages.value or [], list) and not stages.tag,
        )
        self.need(good, stages, at, f"stages must be a list, got {stages}")
        for number, stage in enumerate(stages.value or []):
            pipeline = self._stage(stage, f"{at}[{number}]", pipeline)
        if pipeline is None:
            said = "a config must have a recipe or some stages, got none"
            raise self.error(node, path, said)
        return pipeline

    def _recipe(self, node: document.Node, options: document.Node, path: str) -> Pipeline:
        at, prefix = document.joined(path, "recipe"), document.joined(path, "options")
        name = self.value(node, at)
        try:
            function = recipe_function(str(name))
        except ConfigError as error:
            raise self.error(node, at, error) from error
        good = isinstance(options.value or {}, dict) and not options.tag
        self.need(good, options, prefix, f"options must be a mapping, got {options}")
        make, given = partial(recipe, name), options.value or {}
        return self._made(make, function, node, at, given, prefix)

    def _stage(self, node: document.Node, path: str, before: Pipeline | None) -> Pipeline:
        """The stages so far and an item of the list; a reader that comes first lists its files."""
        name, kind, options = self._stage_parts(node, path, before is None)
        reads = issubclass(kind, ReadingSource)
        first = issubclass(kind, Source) and not reads
        if before is not None:
            said = f"{name} is a source, which only the first stage is"
            self.need(not first, node, path, said)
        else:
            said = f"the first stage must be a source such as list_files, got {name}"
            self.need(first or reads, node, path, said)
            said = f"{name} as the first stage needs its files: {name}: {{files: ...}}"
            self.need(first or "files" in options.value, node, path, said)

        def make(**given: Any) -> Pipeline:
            if before is None and reads:
                return getattr(starts, name)(**given)  # type: ignore[no-any-return]
            return Pipeline([kind(**given)]) if before is None else before.then(kind(**given))

        return self._made(make, kind, node, path, options.value, path)

    def _stage_parts(
        self, node: document.Node, path: str, first: bool
    ) -> tuple[str, type[Stage], document.Node]:
        """The name of a stage, its class, and its options by name, as they then stand there."""
        if isinstance(node.value, str) and not node.tag:
            node.value = {node.value: document.Node(None, node.line)}
        good = isinstance(node.value, dict) and len(node.value) == 1 and not node.tag
        rule = "a stage must be a name, or a name and its options such as batch: 8"
        self.need(good, node, path, f"{rule}; got {node}")
        ((name, options),) = node.value.items()
        kind = self._stage_class(str(name), node, path)
        if not isinstance(options.value, dict) or options.tag:
            takes: list[str] = list(inspect.signature(kind).parameters)
            takes = ["files"] if first and issubclass(kind, ReadingSource) else takes
            said = f"{name} has no options, got {options}"
            self.need(takes or options.value is None, node, path, said)
            inner = {} if options.value is None else {takes[0]: options}
            options = node.value[name] = document.Node(inner, options.line)
        return name, kind, options

    def _stage_class(self, name: str, node: document.Node, path: str) -> type[Stage]:
        known = stage_classes()
        if name in known:
            return known[name]
        if not document.is_name(name):
            hint = nearest(name, list(known))
            own = "one of your own is package.module:Class"
            raise self.error(node, path, f"there is no stage {shown(name)}{hint}; {own}")
        kind = self._imported(name, node, path)
        good = inspect.isclass(kind) and issubclass(kind, Stage)
        self.need(good, node, path, f"{name} must be a class of stages, got {shown(kind)}")
        return kind  # type: ignore[no-any-return]

    def _made(
        self,
        make: Callable[..., Pipeline],
        kind: Callable[..., Any],
        node: document.Node,
        path: str,
        nodes: Mapping[str, document.Node],
        prefix: str,
    ) -> Pipeline:
        """What a stage or a recipe makes of its options; an error says where they stand."""
        kinds, options = declared_kinds(kind), {}
        for name, one in nodes.items():
            at = document.joined(prefix, name)
            way = "tp.load(path, storage_options=...), so that credentials are in no file"
            said = f"storage_options are not part of a config: {way}"
            self.need(name != "storage_options", one, at, said)
            options[name] = self._option(one, at, kinds.get(name, []))
        takes = inspect.signature(kind).parameters
        if self.storage_options is not None and "storage_options" in takes:
            options["storage_options"] = dict(self.storage_options)
            self.used_storage = True
        for name, one in options.items():
            if self.storage_options and isinstance(one, Quarantine) and "://" in str(one.folder):
                options[name] = replace(one, storage_options=dict(self.storage_options))
                self.used_storage = True
        step = snake_case(getattr(kind, "__name__", ""))
        try:
            return make(**options)
        except Exception as error:
            about = _blamed(step, str(error), {name: options[name] for name in nodes})
            if about is not None:
                node, path = nodes[about], document.joined(prefix, about)
            if not isinstance(error, TrainpipesError):
                raise self.error(node, path, error) from error
            error.message = f"{self.at(node, path)}{error.message}"
            error.path = error.path or self.name
            raise


def _blamed(step: str, text: str, options: Mapping[str, Any]) -> str | None:
    """The option that an error names, as in ``batch(batch_size) must be``, or else gives the value of."""
    asked = re.match(r"(\w+)\((\w+)\)", text)
    if asked is not None:
        name = "files" if asked[2] == "urls" and "urls" not in options else asked[2]
        sure = name in options and (asked[1] == step or shown(options[name]) in text)
        return name if sure else None
    for name, value in options.items():
        named = rf"no option '{re.escape(str(name))}'|^\w+ (takes )?{re.escape(str(name))} "
        if isinstance(value, str) and len(value) > 2:
            named += rf"|(?<![\w/]){re.escape(value)}(?![\w/])"
        if re.search(named, text):
            return name
    return None
