"""The pipeline of a config: YAML 1.2 with the line of each value, ``${NAME}``, paths to values and types; its
recipe with the options, its stages, and changes of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

import pyarrow as pa
import torch

from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes.errors import ConfigError, TrainpipesError, shown
from trainpipes.interfaces import options
from trainpipes.interfaces.options import declared_kinds
from trainpipes.interfaces.quarantine import Quarantine
from trainpipes.interfaces.stage import Stage, snake_case, stage_classes
from trainpipes.interfaces.stage_kinds import ReadingSource, Source
from trainpipes.pipeline import starts
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.starts import recipe
from trainpipes.recipe_registry import recipe_function

#: Bytes of a document, values in it (those of aliases counted wherever they are used), and levels, at most.
LARGEST, MOST, DEEPEST = 1 << 20, 100_000, 64
SIZE = f"a config must have at most {LARGEST:,} bytes"
_OF_YAML = ("!!map", "!!seq", "!!str", *(f"!!{name}" for name in options.SCALARS))
TAGS = ("!function", "!pipeline")


@dataclass
class Node:
    """A value of a document; a value of a change has no line."""

    value: Any
    line: int | None = None
    tag: str = ""
    quoted: bool = False

    def __str__(self) -> str:
        kinds = {dict: "a mapping", list: "a list", NoneType: "nothing"}
        return f"{self.tag} {kinds.get(type(self.value)) or shown(self.value)}".strip()

    @classmethod
    def of(cls, value: Any) -> Node:
        if isinstance(value, dict):
            return cls({key: cls.of(inner) for key, inner in value.items()})
        return cls([cls.of(inner) for inner in value] if isinstance(value, list | tuple) else value)


@dataclass
class Document:
    """Reads a text, and says where in it something is."""

    name: str
    _count: int = field(default=0, init=False)

    def at(self, node: Node | None, path: str) -> str:
        """``train.yaml:7: stages[3].buffer_size: ``, with the known parts."""
        place = "" if node is None else ", changes" if node.line is None else f":{node.line}"
        return f"{self.name}{place}: {path}: " if path else f"{self.name}{place}: "

    def error(self, node: Node | None, path: str, text: Any) -> ConfigError:
        return ConfigError(f"{self.at(node, path)}{text}", path=self.name)

    def need(self, good: Any, node: Node | None, path: str, text: str) -> None:
        """Raise unless something is good."""
        if not good:
            raise self.error(node, path, text)

    def parse(self, text: str) -> Node:
        """The nodes of a text; raises ConfigError where it is no YAML, or too much of it."""
        need("yaml", "tp.load")
        import yaml

        self.need(len(text.encode(errors="surrogatepass")) <= LARGEST, None, "", SIZE)
        try:
            root = yaml.compose(
                text, options.with_scalars(yaml.SafeLoader, yaml_implicit_resolvers={})
            )
        except (yaml.YAMLError, RecursionError) as error:
            mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
            number = text.count("\n", 0, position) if mark is None else mark.line
            parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
            said = " ".join(filter(None, parts)) or str(error)
            in_braces = "${" in "".join(text.split("\n")[number : number + 1])
            hint = "; within {} and [] put ${NAME} in quotes" if in_braces else ""
            raise self.error(Node(None, number + 1), "", f"this is no YAML: {said}{hint}") from None
        return Node(None, 1) if root is None else self._node(root)

    def _node(self, parsed: Any, depth: int = 1, line: int | None = None) -> Node:
        """PyYAML's node as ours, at the line of its key; an alias's comes once for each use."""
        self._count += 1
        tag, quoted = (
            parsed.tag.replace(options.STANDARD, "!!"),
            getattr(parsed, "style", None) is not None,
        )
        node = Node(None, parsed.start_mark.line + 1, tag, quoted)
        rule = f"a config must have at most {MOST:,} values and {DEEPEST} levels"
        self.need(self._count <= MOST and depth <= DEEPEST, node, "", rule)
        known = _OF_YAML if tag.startswith("!!") else TAGS
        if tag not in known:
            hint = f"{nearest(tag, known)}; there are {', '.join(known)}"
            raise self.error(node, "", f"there is no tag {shown(tag)}{hint}")
        if parsed.id == "sequence":
            node.value = [self._node(inner, depth + 1) for inner in parsed.value]
        elif parsed.id == "mapping":
            node.value = {}
            for name, value in parsed.value:
                key = self._node(name, depth)
                rule = "a key must be text or a number, without a tag of ours"
                self.need(name.id == "scalar" and not key.tag, key, "", rule)
                if key.value in node.value:
                    raise self.error(key, "", f"the key {shown(key.value)} stands here twice")
                node.value[key.value] = self._node(value, depth + 1, key.line)
        else:
            kind = tag.removeprefix("!!")
            try:
                rule, read = options.SCALARS.get(kind, ("(?s:.*)", str))
                if not re.fullmatch(rule, parsed.value):
                    raise ValueError("YAML 1.2 writes it otherwise")
                node.value = read(parsed.value)
            except ValueError as error:
                said = f"{shown(parsed.value)} is no {kind}: {error}"
                raise self.error(node, "", said) from None
        node.tag = "" if tag.startswith("!!") else tag
        node.line = line or node.line
        return node


def has_comment(text: str) -> bool:
    """Whether a YAML text has a comment: a # that is in no token.

    >>> [has_comment(text) for text in ("part #1", "# 1", "a#1", "'part #1'", "[a, 'b #']")]
    [True, True, False, False, False]
    """
    import yaml

    tokens = [range(t.start_mark.index, t.end_mark.index) for t in yaml.scan(text)]
    return not all(any(at in t for t in tokens) for at, mark in enumerate(text) if mark == "#")


def resolved(text: str) -> Any:
    """What a text without quotes is; raises ValueError for a number of thousands of digits.

    >>> [resolved(text) for text in ("1e-4", "010", "0x10", "yes", "~", "1.", ".inf", "12:30")]
    [0.0001, 10, 16, 'yes', None, 1.0, inf, '12:30']
    """
    return next(
        (read(text) for rule, read in options.SCALARS.values() if re.fullmatch(rule, text)), text
    )


def expanded(text: str) -> str:
    """A text with the values of environment variables; raises ValueError for a variable that is not set.

    >>> expanded("${NO_SUCH_FOLDER:-data}/*.parquet $${x} $5")
    'data/*.parquet ${x} $5'
    """

    def put(place: re.Match[str]) -> str:
        name, default = place["name"], place["default"]
        if place[0] == "$$":
            return "$"
        if name is None:
            rule = "a variable is ${NAME} or ${NAME:-default}, and $${ stands for ${"
            raise ValueError(f"{rule}; got {shown(text)}")
        if (value := os.environ.get(name, default)) is None:
            way = f"set it, or write ${{{name}:-default}}"
            raise ValueError(f"the environment variable {name} is not set: {way}")
        return value or default or ""

    variable = r"\$\$(?=\{)|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?"
    return re.sub(variable, put, text)


_STEP = re.compile(r"""\.?([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]|\["([^"]*)"\]""")


def path_steps(path: str) -> list[str | int]:
    """The names and numbers of a path.

    >>> path_steps("stages[2].columns['a b']")
    ['stages', 2, 'columns', 'a b']
    """
    parts = list(_STEP.finditer(path)) if isinstance(path, str) else []
    if not parts or path[0] in ".[" or "".join(part[0] for part in parts) != path:
        example = "options.batch_size or stages[2].buffer_size"
        raise ConfigError(f"{shown(path)} is no path: it is written as {example}")
    return [int(part[2]) if part[2] else part[part.lastindex or 0] for part in parts]


def joined(path: str, name: Any) -> str:
    """The path of the value called ``name`` within ``path``."""
    if not str(name).replace("-", "_").isidentifier():
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else str(name)


# What options are made of


def is_name(text: str) -> bool:
    name = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
    return re.fullmatch(f"{name}:{name}", text) is not None


def imported(name: Any, allowed: bool) -> Any:
    """A function or class by its name; raises ValueError."""
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(f"a function must be named package.module:function, got {shown(name)}")
    if not allowed:
        way = "if you trust it, tp.load(path, allow_imports=True), or --allow-imports in the shell"
        raise ValueError(f"{name} would be imported, and a config imports nothing by itself: {way}")
    module, _, inner = name.partition(":")
    try:
        if module == "__main__":
            raise ImportError("other programs cannot import what the script itself defines")
        return functools.reduce(getattr, inner.split("."), importlib.import_module(module))
    except Exception as error:  # a module may do anything when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({said})") from error


def _dtype(name: Any) -> torch.dtype:
    dtype = vars(torch).get(str(name).removeprefix("torch."))  # getattr would import a module
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be one of torch such as float32, got {shown(name)}")
    return dtype


#: What the value of an option of such a type is made of.
MADE: dict[Any, Callable[[Any], Any]] = {
    torch.dtype: _dtype,
    pa.Schema: options.arrow_schema,
    Quarantine: Quarantine.of,
}


_KEYS = ("recipe", "options", "stages")


@dataclass
class Reader(Document):
    """Makes the pipeline that a document describes."""

    allow_imports: bool = False
    storage_options: Mapping[str, Any] | None = None
    used_storage: bool = False

    def change(self, root: Node, path: str, value: Any) -> None:
        steps, node = path_steps(path), root
        for at, step in enumerate(steps):
            if at > 1 and steps[at - 2] == "stages":
                node = self._stage_parts(node, path, first=steps[at - 1] == 0)[2]
            if isinstance(step, str) and node.value is None:
                node.value = {}
            there, last = node.value, at == len(steps) - 1
            if at == 0 and step == "options" and isinstance(there, dict):
                there.setdefault(step, Node({}))
            good = isinstance(there, dict) and isinstance(step, str) and (last or step in there)
            if isinstance(there, list) and isinstance(step, int):
                good = step < len(there)
            names = [str(key) for key in there] if isinstance(there, dict) else []
            has = f"it has {', '.join(names)}" if names else f"it is {node}"
            said = f"there is no {shown(step)}{nearest(str(step), names)}; {has}"
            self.need(good, Node(None), path, said)
            if last:
                there[step] = Node.of(value)
            else:
                node = there[step]

    # Nodes to values

    def value(self, node: Node, path: str) -> Any:
        if node.tag == "!pipeline":
            return self.pipeline(Node(node.value, node.line), path)
        value = node.value
        if isinstance(value, dict):
            value = {key: self.value(inner, joined(path, key)) for key, inner in value.items()}
        elif isinstance(value, list):
            value = [self.value(inner, f"{path}[{n}]") for n, inner in enumerate(value)]
        elif isinstance(value, str) and "${" in value and node.line is not None:
            value = self._asked(node, path, expanded, value)
            value = value if node.quoted else self._asked(node, path, resolved, value)
        return self._imported(value, node, path) if node.tag else value

    def _asked(self, node: Node, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; its ValueError then names the place in the file."""
        try:
            return call(*arguments)
        except ValueError as error:
            raise self.error(node, path, error) from error

    def _imported(self, name: Any, node: Node, path: str) -> Any:
        return self._asked(node, path, imported, name, self.allow_imports)

    def _option(self, node: Node, path: str, kinds: list[Any]) -> Any:
        value = self.value(node, path)
        calls = Callable in kinds and str not in kinds
        if calls and isinstance(value, str) and is_name(value):
            return self._imported(value, node, path)  # where no tag is needed
        make = next((MADE[kind] for kind in kinds if kind in MADE), None)
        if make is None or value is None or type(value) in kinds:
            return value
        return self._asked(node, path, make, value)

    # Values to a pipeline

    def pipeline(self, node: Node, path: str = "") -> Pipeline:
        """The pipeline of a document, or of a ``!pipeline`` in it."""
        fields, pipeline = node.value, None
        has = isinstance(fields, dict) and not node.tag and fields.keys() & {"recipe", "stages"}
        rule = "a config must be a mapping with recipe: or stages:"
        keys = isinstance(fields, dict) and fields and f"the keys {', '.join(map(shown, fields))}"
        self.need(has, node, path, f"{rule}, got {keys or node}")
        for key, value in fields.items():
            if key not in _KEYS:
                said = f"there is no {shown(key)} in a config{nearest(str(key), _KEYS)}; there are "
                hint = f"; an option of the recipe is options.{key}" if "recipe" in fields else ""
                raise self.error(value, joined(path, key), f"{said}{', '.join(_KEYS)}{hint}")
        options, stages = (fields.get(key, Node(None)) for key in ("options", "stages"))
        if "recipe" in fields:
            pipeline = self._recipe(fields["recipe"], options, path)
        elif "options" in fields:
            said = "options are those of a recipe: name one"
            raise self.error(options, joined(path, "options"), said)
        at, good = (
            joined(path, "stages"),
            isinstance(stages.value or [], list) and not stages.tag,
        )
        self.need(good, stages, at, f"stages must be a list, got {stages}")
        for number, stage in enumerate(stages.value or []):
            pipeline = self._stage(stage, f"{at}[{number}]", pipeline)
        if pipeline is None:
            said = "a config must have a recipe or some stages, got none"
            raise self.error(node, path, said)
        return pipeline

    def _recipe(self, node: Node, options: Node, path: str) -> Pipeline:
        at, prefix = joined(path, "recipe"), joined(path, "options")
        name = self.value(node, at)
        try:
            function = recipe_function(str(name))
        except ConfigError as error:
            raise self.error(node, at, error) from error
        good = isinstance(options.value or {}, dict) and not options.tag
        self.need(good, options, prefix, f"options must be a mapping, got {options}")
        make, recipe_options = partial(recipe, name), options.value or {}
        return self._made(make, function, node, at, recipe_options, prefix)

    def _stage(self, node: Node, path: str, before: Pipeline | None) -> Pipeline:
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

        def make(**stage_options: Any) -> Pipeline:
            if before is None and reads:
                return getattr(starts, name)(**stage_options)  # type: ignore[no-any-return]
            return (
                Pipeline([kind(**stage_options)])
                if before is None
                else before.then(kind(**stage_options))
            )

        return self._made(make, kind, node, path, options.value, path)

    def _stage_parts(self, node: Node, path: str, first: bool) -> tuple[str, type[Stage], Node]:
        """The name of a stage, its class, and its options by name, as they then stand there."""
        if isinstance(node.value, str) and not node.tag:
            node.value = {node.value: Node(None, node.line)}
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
            options = node.value[name] = Node(inner, options.line)
        return name, kind, options

    def _stage_class(self, name: str, node: Node, path: str) -> type[Stage]:
        known = stage_classes()
        if name in known:
            return known[name]
        if not is_name(name):
            hint = nearest(name, list(known))
            way = "one of your own is package.module:Class"
            raise self.error(node, path, f"there is no stage {shown(name)}{hint}; {way}")
        kind = self._imported(name, node, path)
        good = inspect.isclass(kind) and issubclass(kind, Stage)
        self.need(good, node, path, f"{name} must be a class of stages, got {shown(kind)}")
        return kind  # type: ignore[no-any-return]

    def _made(
        self,
        make: Callable[..., Pipeline],
        kind: Callable[..., Any],
        node: Node,
        path: str,
        nodes: Mapping[str, Node],
        prefix: str,
    ) -> Pipeline:
        """Call a stage or a recipe with its options; an error names the lines of these."""
        kinds, options = declared_kinds(kind), {}
        for name, value in nodes.items():
            at = joined(prefix, name)
            way = "tp.load(path, storage_options=...), so that credentials are in no file"
            said = f"storage_options are not part of a config: {way}"
            self.need(name != "storage_options", value, at, said)
            said = f"an option's name must be text, got {shown(name)}"
            self.need(isinstance(name, str), value, prefix, said)
            options[name] = self._option(value, at, kinds.get(name, []))
        takes = inspect.signature(kind).parameters
        if self.storage_options is not None and "storage_options" in takes:
            options["storage_options"] = dict(self.storage_options)
            self.used_storage = True
        for name, value in options.items():
            if (
                self.storage_options
                and isinstance(value, Quarantine)
                and "://" in str(value.folder)
            ):
                options[name] = replace(value, storage_options=dict(self.storage_options))
                self.used_storage = True
        step = snake_case(getattr(kind, "__name__", ""))
        try:
            return make(**options)
        except Exception as error:
            about = _blamed(step, str(error), {name: options[name] for name in nodes})
            if about is not None:
                node, path = nodes[about], joined(prefix, about)
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
