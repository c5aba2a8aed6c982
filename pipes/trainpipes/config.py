"""Pipelines as YAML: ``load`` reads a config, ``Pipeline.to_yaml`` writes one. See docs/config.md."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import torch

from trainpipes import start
from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.kinds.stage import Stage, snake_case
from trainpipes.kinds.stage_kinds import Source
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_registry import recipe, recipe_function
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.stage_methods import Method

__all__ = ["load", "loads", "parse_change"]

#: Bytes of a document, values in it (those of aliases counted wherever they are used), and levels, at most.
LARGEST, MOST, DEEPEST = 1 << 20, 100_000, 64
_KEYS = ("recipe", "options", "stages")


def load(
    path: str | os.PathLike[str],
    *,
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    """The pipeline of a YAML file: a recipe with its options, or stages. See docs/config.md.

    Nothing that the file names is imported or run, unless ``allow_imports`` says so. ``${NAME}`` and
    ``${NAME:-default}`` stand for environment variables.

    Args:
        path: of the file.
        allow_imports: import functions and classes that the file names as ``package.module:function``. Only
            for files that you would run as a program.
        storage_options: for all stages that read files, as fsspec takes them; a config holds none.
        changes: other values for some of the file's, by their paths: ``{"options.batch_size": 16,
            "stages[2].buffer_size": 100}``. ``trainpipes.config.parse_change`` reads one of a command line.

    Raises:
        ConfigError: something in it is not as it must be; names the file, the line and the path of the
            value: ``train.yaml:7: stages[3].buffer_size: ...``.
        MissingExtraError: PyYAML is not installed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp(), "train.yaml")
    >>> _ = path.write_text("stages:\\n- list_files: ${DATA:-data}/*.parquet\\n- take: 3\\n")
    >>> tp.load(path)
    list_files('data/*.parquet')
      .take(3)
    >>> tp.load(path, changes={"stages[1].count": 5}).stages[1]
    take(5)
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"load(path) must be the path of a YAML file, got {shown(path)}; of a text, "
            "trainpipes.config.loads(text) makes the pipeline"
        )
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            text = file.read(LARGEST + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: a config must be UTF-8: {error}", path=name) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config {name!r} cannot be read: {error}", path=name) from error
    given = {"storage_options": storage_options, "changes": changes}
    return loads(text, name=name, allow_imports=allow_imports, **given)


def loads(
    text: str,
    *,
    name: str = "config",
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    """The pipeline of a YAML text. See ``load``.

    Args:
        text: what a file would hold.
        name: what errors call it.
        allow_imports: see ``load``.
        storage_options: see ``load``.
        changes: see ``load``.

    >>> loads("stages: [{list_files: data}, {take: 3}]")
    list_files('data')
      .take(3)
    """
    if not isinstance(text, str):
        raise ConfigError(f"loads(text) must be text, got {shown(text)}")
    reader = _Reader(name, allow_imports, storage_options)
    root = reader.parsed(text)
    for path, value in (changes or {}).items():
        reader.change(root, path, value)
    pipeline = reader.pipeline(root)
    if storage_options and not reader.used_storage:
        raise reader.error(None, "", "storage_options were given, and no stage of it takes any")
    return pipeline


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
    path_steps(path)
    reader = _Reader(f"the change {path}")
    return path, reader.value(reader.parsed(value), path)


# Text to nodes: YAML's grammar, and nothing that its tags could do


@dataclass
class Node:
    """A value of a document.

    Attributes:
        value: a scalar, a list of nodes, or a dict of nodes.
        line: where it, or its key, stands, from 1; None where it is of ``changes``.
        tag: ``!name``, or "".
        quoted: whether it is a text that stays one, whatever its variables hold.
    """

    value: Any
    line: int | None
    tag: str = ""
    quoted: bool = False

    def __str__(self) -> str:
        kinds = {dict: "a mapping", list: "a list", NoneType: "nothing"}
        return f"{self.tag} {kinds.get(type(self.value)) or shown(self.value)}".strip()


def _integer(text: str) -> int:
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


#: YAML 1.2's core schema: `yes` and `12:30` are text, `1e-4` is a float, `010` is ten.
SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _integer),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _float,
    ),
}
_STANDARD = "tag:yaml.org,2002:"
_OF_YAML = ("!!bool", "!!float", "!!int", "!!map", "!!null", "!!seq", "!!str")


def add_scalars(kind: Any) -> None:
    """Have a loader or a dumper of PyYAML take texts for numbers, bools and null as ``SCALARS`` says."""
    for name, (rule, _) in SCALARS.items():
        kind.add_implicit_resolver(f"{_STANDARD}{name}", re.compile(rf"(?:{rule})\Z"), None)


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    add_scalars(Loader)
    return Loader


def _resolved(text: str) -> Any:
    """What a text without quotes is; raises ValueError for a number of thousands of digits.

    >>> [_resolved(text) for text in ("1e-4", "010", "0x10", "yes", "~", "1.", ".inf", "12:30")]
    [0.0001, 10, 16, 'yes', None, 1.0, inf, '12:30']
    """
    reads = [read for rule, read in SCALARS.values() if re.fullmatch(rule, text)]
    return reads[0](text) if reads else text


def _expanded(text: str) -> str:
    """A text with what environment variables hold; raises ValueError for one that is not set.

    >>> _expanded("${NO_SUCH_FOLDER:-data}/*.parquet $${x} $5")
    'data/*.parquet ${x} $5'
    """

    def put(place: re.Match[str]) -> str:
        if place[0] == "$$":
            return "$"
        named = re.fullmatch(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", place[0], re.DOTALL)
        if named is None:
            said = "a variable is ${NAME} or ${NAME:-default}, and $${ stands for ${"
            raise ValueError(f"{said}; got {shown(place[0])}")
        name, default = named.groups()
        found = os.environ.get(name, default)
        if found is None:
            raise ValueError(
                f"the environment variable {name} is not set: set it, or write ${{{name}:-default}}"
            )
        return found or default or ""

    return re.sub(r"\$\$(?=\{)|\$\{[^}]*\}?", put, text)


_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]|\[\"([^\"]*)\"\]")


def path_steps(path: str) -> tuple[str | int, ...]:
    """The names and numbers of a path.

    Raises:
        ConfigError: it is no path.

    >>> path_steps("stages[2].columns['a b']")
    ('stages', 2, 'columns', 'a b')
    """
    found: list[str | int] = []
    at = 0
    while at < len(path) or not at:
        step = _STEP.match(path, at)
        if step is None or (not at and step[0][0] in ".["):
            example = "options.batch_size or stages[2].buffer_size"
            raise ConfigError(f"{shown(path)} is no path: it is written as {example}")
        name, number, *quoted = step.groups()
        names = [one for one in (name, *quoted) if one is not None]
        found.append(names[0] if names else int(number))
        at = step.end()
    return tuple(found)


def _joined(path: str, name: Any) -> str:
    """The path of what is called ``name`` within ``path``."""
    if not str(name).replace("-", "_").isidentifier():
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else str(name)


# Stages, recipes, and the types of their options


@functools.cache
def stage_classes() -> dict[str, type[Stage]]:
    """The class of each stage of ours, by the name that it has in a chain."""
    kinds: list[Any] = [one._stage for one in vars(Pipeline).values() if isinstance(one, Method)]
    for module in (inspect.getmodule(Pipeline), start):
        kinds += [one for one in vars(module).values() if inspect.isclass(one)]
    found = [kind for kind in kinds if issubclass(kind, Stage) and kind not in (Stage, Source)]
    return {snake_case(kind.__name__): kind for kind in found}


def declared_types(make: Any) -> dict[str, Any]:
    """The types that the options of a stage or recipe are declared with."""
    try:
        return get_type_hints(make)
    except Exception:  # of types that are only there for type checkers
        return {}


def _members(declared: Any) -> tuple[Any, ...]:
    union = get_origin(declared) in (Union, UnionType)
    return get_args(declared) if union else (declared,)


def fits(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type; what lists and mappings hold is for the stage to say.

    >>> fits(3, float), fits(True, int), fits("no", bool), fits(None, int | None)
    (True, False, False, True)
    """
    return any(_fits(value, one) for one in _members(declared))


def _fits(value: Any, declared: Any) -> bool:
    kind: Any = get_origin(declared) or declared
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(declared))
    if not isinstance(kind, type) or kind in (Any, object):  # or a type variable
        return True
    if isinstance(value, bool):
        return kind is bool
    also: dict[Any, Any] = {float: (int, float), os.PathLike: (str, Path), tuple: (list, tuple)}
    try:
        return isinstance(value, also.get(kind, kind))
    except TypeError:  # a protocol that can't be asked
        return True


def _said(declared: Any) -> str:
    """A declared type as text.

    >>> _said(int | None), _said(Mapping[str, Any] | None)
    ('int | None', 'Mapping[str, Any] | None')
    """
    said = " | ".join(map(inspect.formatannotation, _members(declared)))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", said).replace("NoneType", "None")


@dataclass
class _Step:
    """A stage or a recipe that is to be made.

    Args:
        name: of it.
        make: the stage's class, or the recipe.
        node: where it stands.
        path: of it.
        prefix: of the paths of its options.
        nodes: of its options, by name.
        options: their values, by name.
    """

    name: str
    make: Callable[..., Any]
    node: Node
    path: str
    prefix: str
    nodes: dict[str, Node]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make).parameters)


@dataclass
class _Reader:
    """Reads one document.

    Args:
        name: of it, in errors.
        allow_imports: whether functions may be imported.
        storage_options: for all stages that take them.

    Attributes:
        used_storage: whether one took them.
        count: values so far.
    """

    name: str
    allow_imports: bool = False
    storage_options: Mapping[str, Any] | None = None
    used_storage: bool = False
    count: int = 0

    def at(self, node: Node | None, path: str) -> str:
        """``train.yaml:7: stages[3].buffer_size: ``, with what there is of it."""
        place = "" if node is None else ", changes" if node.line is None else f":{node.line}"
        return f"{self.name}{place}: {path}: " if path else f"{self.name}{place}: "

    def error(self, node: Node | None, path: str, text: Any) -> ConfigError:
        return ConfigError(f"{self.at(node, path)}{text}", path=self.name)

    # Text to nodes

    def parsed(self, text: str) -> Node:
        """The nodes of a text; raises ConfigError where it is no YAML, or too much of it."""
        need("yaml", "tp.load")
        import yaml

        if len(text) > LARGEST:
            raise self.error(None, "", f"a config must have at most {LARGEST:,} bytes")
        try:
            root = yaml.compose(text, Loader=_loader())
        except (yaml.YAMLError, RecursionError) as error:
            mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
            number = text.count("\n", 0, position) if mark is None else mark.line
            parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
            said = " ".join(filter(None, parts)) or str(error)
            line = text.split("\n")[number : number + 1]
            hint = "; within {} and [] put ${NAME} in quotes" if "${" in "".join(line) else ""
            raise self.error(Node(None, number + 1), "", f"this is no YAML: {said}{hint}") from None
        return Node(None, 1) if root is None else self._node(root)

    def _node(self, given: Any, depth: int = 1) -> Node:
        """A node of PyYAML's as one of ours; those of aliases come once for each use."""
        self.count += 1
        node = Node(None, given.start_mark.line + 1, given.tag.replace(_STANDARD, "!!"))
        if self.count > MOST or depth > DEEPEST:
            raise self.error(
                node, "", f"a config must have at most {MOST:,} values and {DEEPEST} levels"
            )
        known = _OF_YAML if node.tag.startswith("!!") else (*_TAGS, "!function", "!pipeline")
        if node.tag not in known:
            hint = f"{nearest(node.tag, known)}; there are {', '.join(known)}"
            raise self.error(node, "", f"there is no tag {shown(node.tag)}{hint}")
        if given.id == "sequence":
            node.value = [self._node(one, depth + 1) for one in given.value]
        elif given.id == "mapping":
            node.value = {}
            for key, one in given.value:
                name, inner = self._key(key), self._node(one, depth + 1)
                inner.line = key.start_mark.line + 1
                if name in node.value:
                    raise self.error(inner, "", f"the key {shown(name)} stands here twice")
                node.value[name] = inner
        else:
            node.quoted = given.style is not None
            node.value = self._scalar(node, given.value)
        if node.tag.startswith("!!"):
            node.tag = ""
        return node

    def _scalar(self, node: Node, text: str) -> Any:
        kind = node.tag.removeprefix("!!")
        try:
            return SCALARS[kind][1](text) if kind in SCALARS else text
        except ValueError as error:
            raise self.error(node, "", f"{shown(text)} is no {kind}: {error}") from None

    def _key(self, key: Any) -> Any:
        node = Node(None, key.start_mark.line + 1, key.tag.replace(_STANDARD, "!!"))
        if key.id != "scalar" or node.tag not in _OF_YAML:
            raise self.error(node, "", "a key must be text or a number, without a tag of ours")
        if key.value == "<<" and key.style is None:
            raise self.error(node, "", "merge keys (<<) are not of YAML 1.2: write the options out")
        return self._scalar(node, key.value)

    # Changes

    def change(self, root: Node, path: str, value: Any) -> None:
        """Give another value to what is at a path."""
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
                raise self.error(Node(None, None), path, said)
            if last:
                there[step] = _given(value)
            elif isinstance(step, str):
                node = there.setdefault(step, _given({}))
            else:
                node = there[step]

    # Nodes to values

    def value(self, node: Node, path: str) -> Any:
        """The value of a node; raises ConfigError where it has none."""
        if node.tag == "!pipeline":
            return self.pipeline(Node(node.value, node.line), path)
        value = node.value
        if isinstance(value, str) and "${" in value and node.line is not None:
            try:
                value = _expanded(value)
                value = value if node.quoted else _resolved(value)
            except ValueError as error:
                raise self.error(node, path, error) from None
        elif isinstance(value, dict):
            value = {key: self.value(one, _joined(path, key)) for key, one in value.items()}
        elif isinstance(value, list):
            value = [self.value(one, f"{path}[{n}]") for n, one in enumerate(value)]
        return self._meant(node.tag, value, node, path) if node.tag else value

    def _meant(self, tag: str, value: Any, node: Node, path: str) -> Any:
        """What a value with a tag stands for."""
        try:
            return self._imported(value) if tag == "!function" else _TAGS[tag](value)
        except (TypeError, ValueError) as error:
            raise self.error(node, path, error) from error

    def _imported(self, name: Any) -> Any:
        """A function or class by its name; raises ValueError."""
        if not isinstance(name, str) or not _is_name(name):
            raise ValueError(f"a function must be named package.module:function, got {shown(name)}")
        if not self.allow_imports:
            raise ValueError(
                f"{name} would be imported, and a config imports nothing by itself: if you trust it, "
                "tp.load(path, allow_imports=True), or --allow-imports in the shell"
            )
        module, _, inner = name.partition(":")
        try:
            if module == "__main__":
                raise ImportError("other programs cannot import what the script itself defines")
            return functools.reduce(getattr, inner.split("."), importlib.import_module(module))
        except Exception as error:  # whatever a module does when it is imported
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name} cannot be imported ({said})") from error

    def _read_options(self, step: _Step) -> _Step:
        """Read the options of a step, each of which it must know, as what they are declared."""
        known, types = step.parameters, declared_types(step.make)
        takes = ", ".join(name for name in known if name != "storage_options") or "none"
        any_name = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for name, node in step.nodes.items():
            at = _joined(step.prefix, name)
            if name == "storage_options":
                way = "tp.load(path, storage_options=...), so that credentials are in no file"
                raise self.error(node, at, f"storage_options are not part of a config: {way}")
            if name not in known and not any_name:
                elsewhere = getattr(step.make, "elsewhere", {}).get(name)
                hint = f": {elsewhere}" if elsewhere else nearest(str(name), list(known))
                said = f"{step.name} has no option {shown(name)}{hint}; it takes {takes}"
                raise self.error(node, at, said)
            step.options[name] = self._option(step, name, node, at, types.get(name, Any))
        needed = [name for name, one in known.items() if one.default is one.empty]
        missing = [name for name in needed if name not in step.options and not any_name]
        if missing:
            said = f"{step.name} needs {' and '.join(missing)}; it takes {takes}"
            raise self.error(step.node, step.path, said)
        return step

    def _option(self, step: _Step, name: str, node: Node, at: str, declared: Any) -> Any:
        value = self.value(node, at)
        kinds = [get_origin(one) or one for one in _members(declared)]
        if isinstance(value, str) and _is_name(value) and Callable in kinds and str not in kinds:
            return self._meant("!function", value, node, at)  # where no tag is needed
        if fits(value, declared):
            return value
        if isinstance(value, str) and torch.dtype in kinds:
            return self._meant("!dtype", value, node, at)
        if isinstance(value, dict) and pa.Schema in kinds:
            return self._meant("!schema", value, node, at)
        hint = "; in quotes it is text" if str in kinds and isinstance(value, int | float) else ""
        rule = f"{step.name}({name}) must be {_said(declared)}"
        raise self.error(node, at, f"{rule}, got {shown(value)}{hint}")

    # Values to a pipeline

    def pipeline(self, node: Node, path: str = "") -> Pipeline:
        """The pipeline of a document, or of a ``!pipeline`` in it."""
        given = node.value
        if not isinstance(given, dict) or node.tag or not given.keys() & {"recipe", "stages"}:
            rule = "a config must be a mapping with recipe: or stages:"
            raise self.error(node, path, f"{rule}, got {node}")
        for key, one in given.items():
            if key not in _KEYS:
                said = f"there is no {shown(key)} in a config{nearest(str(key), _KEYS)}"
                raise self.error(one, _joined(path, key), f"{said}; there are {', '.join(_KEYS)}")
            if key == "options" and "recipe" not in given:
                raise self.error(one, _joined(path, key), "options are those of a recipe: name one")
        steps = list(self._steps(given, path))
        if not steps:
            raise self.error(node, path, "a config must have a recipe or some stages, got none")
        return self._made(steps)

    def _steps(self, given: Mapping[str, Node], path: str) -> Iterator[_Step]:
        stages, at = given.get("stages", Node(None, None)), _joined(path, "stages")
        if "recipe" in given:
            yield self._recipe(given["recipe"], given.get("options", Node(None, None)), path)
        if not isinstance(stages.value or [], list) or stages.tag:
            raise self.error(stages, at, f"stages must be a list, got {stages}")
        for number, node in enumerate(stages.value or []):
            yield from self._stage(node, f"{at}[{number}]", not number and "recipe" not in given)

    def _recipe(self, node: Node, options: Node, path: str) -> _Step:
        at, prefix = _joined(path, "recipe"), _joined(path, "options")
        name = self.value(node, at)
        try:
            make = recipe_function(str(name))
        except ConfigError as error:
            raise self.error(node, at, error) from error
        if not isinstance(options.value or {}, dict) or options.tag:
            raise self.error(options, prefix, f"options must be a mapping, got {options}")
        return self._read_options(_Step(name, make, node, at, prefix, options.value or {}))

    def _stage(self, node: Node, path: str, first: bool) -> Iterator[_Step]:
        """The stage of an item of the list; before a reader that comes first, its files."""
        name, kind, options = self._stage_parts(node, path, first)
        starts = kind.role in ("files", "source")
        if starts and not first:
            raise self.error(node, path, f"{name} is a source, which only the first stage is")
        if first and kind.role == "reader":
            if "files" not in options.value:
                said = f"{name} as the first stage needs its files: {name}: {{files: ...}}"
                raise self.error(node, path, said)
            files = options.value["files"]
            options = Node({k: v for k, v in options.value.items() if k != "files"}, options.line)
            found = {"urls": self.value(files, _joined(path, "files"))}
            yield _Step("list_files", ListFiles, node, path, path, {"files": files}, found)
        elif first and not starts:
            said = f"the first stage must be a source such as list_files, got {name}"
            raise self.error(node, path, said)
        yield self._read_options(_Step(name, kind, node, path, path, options.value))

    def _stage_parts(self, node: Node, path: str, first: bool) -> tuple[str, type[Stage], Node]:
        """The name of a stage, its class, and its options by name, as they then stand there."""
        if isinstance(node.value, str) and not node.tag:
            node.value = {node.value: Node(None, node.line)}
        if not isinstance(node.value, dict) or len(node.value) != 1 or node.tag:
            rule = "a stage must be a name, or a name and its options such as batch: 8"
            raise self.error(node, path, f"{rule}; got {node}")
        ((name, options),) = node.value.items()
        kind = self._stage_class(str(name), node, path)
        if not isinstance(options.value, dict) or options.tag:
            takes: list[str] = list(inspect.signature(kind).parameters)
            takes = ["files"] if first and kind.role == "reader" else takes
            if options.value is not None and not takes:
                raise self.error(node, path, f"{name} has no options, got {options}")
            inner = {} if options.value is None else {takes[0]: options}
            options = node.value[name] = Node(inner, options.line)
        return name, kind, options

    def _stage_class(self, name: str, node: Node, path: str) -> type[Stage]:
        known = stage_classes()
        if name in known:
            return known[name]
        if not _is_name(name):
            hint = nearest(name, list(known))
            own = "one of your own is package.module:Class"
            raise self.error(node, path, f"there is no stage {shown(name)}{hint}; {own}")
        found = self._meant("!function", name, node, path)
        if not inspect.isclass(found) or not issubclass(found, Stage):
            raise self.error(node, path, f"{name} must be a class of stages, got {shown(found)}")
        return found

    def _made(self, steps: list[_Step]) -> Pipeline:
        """The pipeline of steps whose options have been read."""
        pipeline: Pipeline | None = None
        for step in steps:
            if self.storage_options is not None and "storage_options" in step.parameters:
                step.options["storage_options"] = dict(self.storage_options)
                self.used_storage = True
            try:
                if not inspect.isclass(step.make):
                    pipeline = recipe(step.name, **step.options)
                    continue
                stage: Any = step.make(**step.options)
                pipeline = Pipeline([stage]) if pipeline is None else pipeline.then(stage)
            except TrainpipesError as error:
                error.message = f"{self._place(step, error)}{error.message}"
                error.path = error.path or self.name
                raise
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{self._place(step, error)}{error}", path=self.name) from error
        assert pipeline is not None
        return pipeline

    def _place(self, step: _Step, error: Exception) -> str:
        """Where the option stands that an error of a stage or recipe is about; else the step."""
        text = str(error)
        for name, node in step.nodes.items():
            value = step.options.get("urls" if name == "files" else name, step.options.get(name))
            asked = re.match(rf"(\w+)\({re.escape(str(name))}\)", text)
            about = asked is not None and (asked[1] == step.name or shown(value) in text)
            named = rf"(?<![\w/]){re.escape(str(value))}(?![\w/])"
            about = about or re.match(rf"(?:\w+ takes|a) {re.escape(str(name))} ", text) is not None
            if about or (asked is None and isinstance(value, str) and re.search(named, text)):
                return self.at(node, _joined(step.prefix, name))
        return self.at(step.node, step.path)


def _given(value: Any) -> Node:
    """A value of ``changes`` as a node."""
    if isinstance(value, dict):
        return Node({key: _given(one) for key, one in value.items()}, None)
    if isinstance(value, list | tuple):
        return Node([_given(one) for one in value], None)
    return Node(value, None)


def _is_name(text: str) -> bool:
    """Whether a text is ``package.module:function``."""
    name = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
    return re.fullmatch(f"{name}:{name}", text) is not None


# What tags stand for


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(str(name).removeprefix("torch."))  # getattr would import what is named
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a dtype must be one of torch such as float32, got {shown(name)}")
    return found


def arrow_type(text: Any) -> pa.DataType:
    """The Arrow type that a text names.

    Raises:
        ValueError: it names none.

    >>> arrow_type("list<list<int32>>")
    ListType(list<item: list<item: int32>>)
    """
    inner = re.fullmatch(r"list<(?:item: )?(.{1,200})>", str(text))
    if inner is not None:
        return pa.list_(arrow_type(inner[1]))
    try:
        return pa.type_for_alias(str(text))
    except ValueError:
        rule = "an Arrow type must be int64, string, timestamp[us], list<int32> or the like"
        raise ValueError(f"{rule}, got {shown(text)}") from None


def arrow_schema(value: Any) -> pa.Schema:
    """The schema of a mapping of names to types as text; raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"a schema must be a mapping such as {{x: int64}}, got {shown(value)}")
    return pa.schema([(str(name), arrow_type(kind)) for name, kind in value.items()])


_TAGS: dict[str, Callable[[Any], Any]] = {
    "!dtype": _dtype,
    "!path": Path,
    "!schema": arrow_schema,
    "!type": arrow_type,
}
