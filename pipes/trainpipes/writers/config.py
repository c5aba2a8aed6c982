"""``Pipeline.to_yaml``: a pipeline as the YAML that ``read`` reads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.checks import need
from trainpipes.columns.columns import text_of
from trainpipes.engine.processes.executor_options import name_of_executor
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, is_secret, shown, without_url_secrets
from trainpipes.filesystems.places import write_text
from trainpipes.filesystems.retry import Retry, given
from trainpipes.interfaces.options import STANDARD, arrow_schema, declared_kinds, same, with_scalars
from trainpipes.interfaces.quarantine import Quarantine
from trainpipes.interfaces.stage import Stage, stage_classes
from trainpipes.recipe_registry import recipe_function
from trainpipes.version import __version__

#: Characters of a list or mapping that is written on a single line, at most.
WIDTH = 72
#: Sources whose first option holds the rows.
_IN_MEMORY = (
    "from_arrow", "from_dataset", "from_hf", "from_iterable", "from_tensors", "from_torchdata",
)  # fmt: skip
#: Where keys in options name columns, labels or sources; but those of a catalog.
_OURS = ("trainpipes", "trainpipes_recipes")
#: Ways out for values that have no form.
_IN_CODE = "this pipeline belongs in code"
_SAVED = 'save it, as with save_pretrained(folder) or save("tokenizer.json"), and give that path'
_IN_FILES = "write them to files once, as with .write_parquet(folder), and read these"
_SECRET = (
    "a URL with a user, a password or values in its query may hold a secret: give it with storage_options, "
    "or write ${VARIABLE} there, by hand"
)
_LISTED = (
    'give it as a list, such as [["x", ">", 20], ["lang", "in", ["en", "de"]]] '
    "(see pyarrow.parquet.filters_to_expression)"
)


def to_yaml(pipeline: Record, path: str | os.PathLike[str] | None = None) -> str:
    """A pipeline as YAML, which ``load`` reads as the same pipeline. See ``Pipeline.to_yaml``."""
    need("yaml", "to_yaml")
    import yaml

    writer = _Writer()
    root = _node(writer.document(pipeline))
    head = f"# trainpipes {__version__}\n"
    if writer.left_out:
        head += "# storage_options are not written: tp.load(path, storage_options=...)\n"
    text = head + yaml.serialize(root, Dumper=_dumper(), allow_unicode=True, width=1 << 30)
    if path is not None:
        write_text(path, text, "to_yaml")
    return text


class _Block(dict[str, Any]):
    """A mapping that is written with a key on each line, and so is its parent."""

    def __repr__(self) -> str:
        return "\n"


@dataclasses.dataclass
class _Tagged:
    """A value under a YAML tag, such as ``!import``."""

    tag: str
    value: Any

    def __repr__(self) -> str:
        return f"{self.tag} {self.value}"


def _dumper() -> Any:
    """PyYAML's safe dumper: readers of YAML 1.1 and of 1.2 understand its text alike."""
    from yaml import SafeDumper

    def style(dumper: Any) -> Any:  # names after a tag need no quotes
        named = str(dumper.event.tag).startswith("!")
        return "" if named else SafeDumper.choose_scalar_style(dumper)

    return with_scalars(SafeDumper, choose_scalar_style=style)


def _node(value: Any) -> Any:
    """A value as a node of PyYAML's, on a single line where that is short."""
    import yaml

    if isinstance(value, _Tagged):
        node = _node(value.value)
        node.tag = value.tag
        return node
    text = repr(value)
    short = len(text) <= WIDTH and re.search(r"\n|\\n", text) is None
    if isinstance(value, dict):
        pairs = [(_node(key), _node(inner)) for key, inner in value.items()]
        return yaml.MappingNode(f"{STANDARD}map", pairs, flow_style=short)
    if isinstance(value, list):
        return yaml.SequenceNode(f"{STANDARD}seq", list(map(_node, value)), flow_style=short)
    scalar: Any = yaml.representer.SafeRepresenter().represent_data(value)
    if isinstance(value, str):
        scalar.style = "|" if "\n" in value else "'" if value.lower() in ("y", "n") else None
        if re.search("[\x85\u2028\u2029\r]", value):  # ends of lines for YAML 1.1 alone
            scalar.style = '"'
    return scalar


@dataclasses.dataclass
class _Writer:
    """Makes plain values of a pipeline, which PyYAML can write."""

    left_out: bool = False

    def document(self, pipeline: Record) -> _Block:
        if pipeline._ranks is not None:
            way = "write the pipeline before, and call distributed() on what tp.load gives"
            rule = "what all ranks share is written, and distributed(...) is of one of them"
            raise ConfigError(f"to_yaml(): {rule}: {way}")
        block, stages = _Block(), pipeline.stages
        if pipeline._recipe is not None:
            name, options, count = pipeline._recipe
            stages = stages[count:]
            block["recipe"] = name
            if written := self.options(name, options, recipe_function(name)):
                block["options"] = written
        if stages:
            block["stages"] = [self.stage(stage) for stage in stages]
        return block

    def stage(self, stage: Stage) -> Any:
        kind, name = type(stage), stage.name
        ours, first = stage_classes().get(name) is kind, next(iter(stage.options), "")
        if not ours:
            try:
                name = name_of(kind)
            except ValueError as error:
                raise ConfigError(f"to_yaml(): {stage.name}: {error}", stage=str(stage)) from None
        if ours and name in _IN_MEMORY and not inspect.isroutine(stage.options[first]):
            said = f"{name}({first}): rows in memory have no place in a config: {_IN_FILES}"
            raise ConfigError(f"to_yaml(): {said}", stage=str(stage))
        options = dict(self.options(stage.name, stage.options, kind))
        alone = list(options) == [first] and not isinstance(options[first], dict | None)
        return _Block({name: options[first] if alone else options}) if options else name

    def options(self, caller: str, options: Mapping[str, Any], kind: Any) -> _Block:
        """Those that are not as the parameters of ``kind`` have them anyway."""
        block, kinds = _Block(), declared_kinds(kind)
        known, ours = inspect.signature(kind).parameters, kind.__module__.split(".")[0] in _OURS
        for name, value in options.items():
            default = known[name].default if name in known else inspect.Parameter.empty
            if name == "storage_options":
                self.left_out |= value is not None
            elif not (type(value) is type(default) and same(value, default)):
                try:
                    declared = _as_declared(value, kinds.get(name, []))
                    block[name] = self.value(declared, name, of_data=ours and name != "catalog")
                except ConfigError:  # of a pipeline within this
                    raise
                except ValueError as error:
                    raise ConfigError(f"to_yaml(): {caller}({name}): {error}") from None
        return block

    def value(self, value: Any, name: str = "", of_data: bool = False) -> Any:
        """A plain value; raises ValueError for a value that has no form. Keys of mappings may be ``of_data``:
        names of columns, labels or sources, which tell nothing of secrets.
        """
        if value is None or isinstance(value, bool):
            return value
        if is_secret(name):
            raise ValueError(f"{name!r} may be a secret: write ${{VARIABLE}} there, by hand")
        if isinstance(value, int | float):  # perhaps of NumPy
            return int(value) if isinstance(value, int) else float(value)
        value = str(value) if isinstance(value, Path) else value
        if isinstance(value, str) and str(value) == value:  # as an enum's is not
            left = without_url_secrets(value)
            if left != value or re.search(r"://[^\s'\"/?#]*@", left.replace("://…@", "://")):
                raise ValueError(_SECRET)
            return str(value).replace("${", "$${")
        if isinstance(value, Retry):
            value = given(value)
        if hasattr(type(value), "map_unordered"):
            return name_of_executor(value)
        if isinstance(value, Quarantine):
            self.left_out |= value.storage_options is not None
            value = {"quarantine": value.given()}
        if isinstance(value, Mapping):
            names = [(key, "" if of_data else str(key), inner) for key, inner in value.items()]
            return {_key(key): self.value(inner, name, of_data) for key, name, inner in names}
        if isinstance(value, list | tuple):
            return [self.value(inner, "", of_data) for inner in value]
        if isinstance(value, Record):
            return _Tagged("!pipeline", self.document(value))
        return _named(value, name)


def _as_declared(value: Any, kinds: list[Any]) -> Any:
    """What a dtype or a schema is made of; other options as they are."""
    if isinstance(value, torch.dtype) and torch.dtype in kinds:
        return str(value).removeprefix("torch.")
    if not (isinstance(value, pa.Schema) and pa.Schema in kinds):
        return value
    types = {field.name: str(field.type) for field in value}
    with suppress(ValueError):
        if arrow_schema(types).equals(value, check_metadata=True):
            return types
    subject = "a schema with metadata, with columns that may not be null, or of types beyond a name or a list"
    raise ValueError(f"{subject}, has no form in a config: {_IN_CODE}")


def _key(key: Any) -> Any:
    if key is None or type(key) in (str, bool, int, float):
        return key
    raise ValueError(f"a key must be text or a number, got {shown(key)}; {_IN_CODE}")


def _named(value: Any, option: str) -> _Tagged:
    if inspect.isroutine(value) or inspect.isclass(value):
        return _Tagged("!function", name_of(value))
    kind, way = f"{type(value).__module__}.{type(value).__qualname__}", _IN_CODE
    subject = f"an object of {kind}"
    if option == "tokenizer":
        subject, way = f"a tokenizer that is an object ({kind})", _SAVED
        if name := getattr(value, "name_or_path", ""):
            way = f"give its name, {shown(name)}, or {way}"
    elif isinstance(value, pc.Expression):
        subject, way = f"the expression {shown(text_of(value))}", _LISTED
    raise ValueError(f"{subject} has no form in a config: {way}")


def name_of(value: Any) -> str:
    """A function or class as ``package.module:function``, for a config.

    >>> import json
    >>> name_of(json.dumps)
    'json:dumps'
    """
    module = getattr(value, "__module__", None) or "builtins"
    path = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        named = functools.reduce(getattr, path.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        named = None
    if module == "__main__" or (named is not value and named != value):
        way = "define it at the top of a module, and the config names it package.module:function"
        raise ValueError(f"a config cannot import {module}:{path}: {way}")
    return f"{module}:{path}"
