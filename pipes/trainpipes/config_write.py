"""``Pipeline.to_yaml``: a pipeline as the YAML that ``config`` reads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.checks import need
from trainpipes._internal.secrets import is_secret, without_url_secrets
from trainpipes._internal.text import shown
from trainpipes.config import (
    add_scalars,
    arrow_schema,
    arrow_type,
    stage_classes,
)
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import same
from trainpipes.kinds.stage import Stage
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_registry import recipe_function
from trainpipes.sources.remote.retry import Retry
from trainpipes.version import __version__

#: Characters of a list or mapping that is written in one line, at most.
WIDTH = 72
#: Sources whose first option holds the rows.
_IN_MEMORY = (
    "from_arrow", "from_dataset", "from_hf", "from_iterable", "from_ray", "from_tensors",
    "from_torchdata",
)  # fmt: skip
_IN_CODE = "this pipeline belongs in code"


def to_yaml(pipeline: Pipeline, path: str | os.PathLike[str] | None = None) -> str:
    """A pipeline as YAML, which ``load`` reads as the same pipeline. See ``Pipeline.to_yaml``."""
    need("yaml", "to_yaml")
    import yaml

    writer = _Writer()
    document = writer.document(pipeline)
    head = f"# trainpipes {__version__}\n"
    if writer.left_out:
        head += "# storage_options are not written: tp.load(path, storage_options=...)\n"
    text = head + yaml.dump(
        document, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=1 << 30
    )
    if path is not None:
        _save(Path(path), text)
    return text


def _save(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"to_yaml(path): {path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


class _Block(dict[str, Any]):
    """A mapping that is written one key a line."""


@dataclasses.dataclass
class _Tagged:
    """A text or a block with a tag."""

    tag: str
    value: Any


@functools.cache
def _dumper() -> Any:
    """PyYAML's safe dumper: what it writes, readers of YAML 1.1 and of 1.2 understand the same."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_sequence(self, tag: str, value: Any, flow_style: bool | None = None) -> Any:
            return _laid_out(super().represent_sequence(tag, value, flow_style), flow_style)

        def represent_mapping(self, tag: str, value: Any, flow_style: bool | None = None) -> Any:
            return _laid_out(super().represent_mapping(tag, value, flow_style), flow_style)

        def choose_scalar_style(self) -> Any:
            """Names after a tag need no quotes."""
            event: Any = self.event
            tagged = str(event.tag).startswith("!")
            if tagged and re.fullmatch(r"[A-Za-z_][\w.]*(:[\w.]+)?", event.value):
                return ""
            return super().choose_scalar_style()

    add_scalars(Dumper)
    Dumper.add_representer(str, _text)
    Dumper.add_representer(_Block, _block)
    Dumper.add_representer(_Tagged, _tagged)
    return Dumper


def _laid_out(node: Any, flow_style: bool | None) -> Any:
    """A node of PyYAML's, in one line where that is short."""
    node.flow_style = flow_style is None and sum(map(_width, node.value)) <= WIDTH
    return node


def _width(node: Any) -> float:
    """About how many characters a node takes in one line; infinite where it can't stand in one."""
    if isinstance(node, tuple):
        return sum(map(_width, node))
    if isinstance(node.value, str):
        return float("inf") if "\n" in node.value else len(node.value) + 2
    return 2 + sum(map(_width, node.value)) if node.flow_style else float("inf")


def _text(dumper: Any, text: str) -> Any:
    style = "|" if "\n" in text else None
    if re.search("[\x85\u2028\u2029\r]", text):  # ends of lines for YAML 1.1 alone
        style = '"'
    elif text.lower() in ("y", "n"):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _block(dumper: Any, block: _Block) -> Any:
    return dumper.represent_mapping("tag:yaml.org,2002:map", dict(block), flow_style=False)


def _tagged(dumper: Any, given: _Tagged) -> Any:
    if isinstance(given.value, str):
        return dumper.represent_scalar(given.tag, given.value)
    block = isinstance(given.value, _Block)
    return dumper.represent_mapping(
        given.tag, dict(given.value), flow_style=False if block else None
    )


@dataclasses.dataclass
class _Writer:
    """Makes plain values of a pipeline, which PyYAML can write.

    Attributes:
        left_out: whether there are storage options, which are not written.
    """

    left_out: bool = False

    def document(self, pipeline: Pipeline) -> _Block:
        if pipeline._ranks is not None:
            raise ConfigError(
                "to_yaml(): what all ranks share is written, and distributed(...) is of one of them: write "
                "the pipeline before, and call distributed() on what tp.load gives"
            )
        found, stages = _Block(), pipeline.stages
        if pipeline._recipe is not None:
            name, options, count = pipeline._recipe
            stages = stages[count:]
            found["recipe"] = name
            known = inspect.signature(recipe_function(name)).parameters
            defaults = {name: one.default for name, one in known.items()}
            if given := self.options(name, options, defaults):
                found["options"] = given
        if stages:
            found["stages"] = [self.stage(stage) for stage in stages]
        return found

    def stage(self, stage: Stage) -> Any:
        kind, name = type(stage), stage.name
        ours = stage_classes().get(name) is kind
        if not ours:
            try:
                name = name_of(kind)
            except ValueError as error:
                raise ConfigError(f"to_yaml(): {stage.name}: {error}", stage=str(stage)) from None
        defaults = {one.name: one.default for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for option, default in defaults.items():
            if default is not dataclasses.MISSING and getattr(stage, option) is None:
                others = {name: one for name, one in stage.options.items() if name != option}
                defaults[option] = getattr(kind(**others), option)  # which may be kept as None
        first = next(iter(defaults), "")
        rows = getattr(stage, first, None)
        if ours and name in _IN_MEMORY and not inspect.isroutine(rows):
            raise ConfigError(
                f"to_yaml(): {name}({first}): rows in memory have no place in a config: write them to files "
                "once, as with .write_parquet(folder), and read these",
                stage=str(stage),
            )
        given = self.options(stage.name, stage.options, defaults)
        if not given:
            return name
        if list(given) == [first] and not isinstance(given[first], dict):
            return _Block({name: given[first]})
        return _Block({name: dict(given)})

    def options(
        self, asker: str, options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> _Block:
        """Options by name, without those that are their defaults."""
        found = _Block()
        for name, value in options.items():
            default = defaults.get(name, inspect.Parameter.empty)
            if name == "storage_options":
                self.left_out |= value is not None
            elif not (type(value) is type(default) and same(value, default)):
                try:
                    found[name] = self.value(value, name)
                except ValueError as error:
                    if isinstance(error, ConfigError):  # of a pipeline within this one
                        raise
                    raise ConfigError(f"to_yaml(): {asker}({name}): {error}") from None
        return found

    def value(self, value: Any, name: str) -> Any:
        """A plain value; raises ValueError for one that has no form."""
        if is_secret(name) and value is not None and not isinstance(value, bool):
            raise ValueError(f"{name!r} may be a secret: write ${{VARIABLE}} there, by hand")
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, str) and str(value) == value:  # as an enum's is not
            if _has_secret(value):
                raise ValueError(
                    "a URL with a user, a password or values in its query may hold a secret: give it with "
                    "storage_options, or write ${VARIABLE} there, by hand"
                )
            return str(value).replace("${", "$${")
        if isinstance(value, Mapping):
            return {_key(key): self.value(one, str(key)) for key, one in value.items()}
        if isinstance(value, Retry):
            return self.value(dataclasses.asdict(value), name)
        if isinstance(value, list | tuple):
            return [self.value(one, "") for one in value]
        if isinstance(value, Pipeline):
            return _Tagged("!pipeline", self.document(value))
        return _named(value, name)


def _key(key: Any) -> Any:
    if key is None or type(key) in (str, bool, int, float):
        return key
    raise ValueError(f"a key must be text or a number, got {shown(key)}; {_IN_CODE}")


def _named(value: Any, option: str) -> _Tagged:
    """A value that has a name, with its tag."""
    if isinstance(value, Path):
        return _Tagged("!path", str(value).replace("${", "$${"))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if option == "tokenizer" and not inspect.isroutine(value):
        raise ValueError(
            f"a tokenizer that is an object ({kind}) has no form in a config: save it, as with "
            'save_pretrained(folder) or save("tokenizer.json"), and give that path'
        )
    if isinstance(value, torch.dtype):
        return _Tagged("!dtype", str(value).removeprefix("torch."))
    if isinstance(value, pa.DataType):
        return _Tagged("!type", _arrow(value))
    if isinstance(value, pa.Schema):
        found = {one.name: _arrow(one.type) for one in value}
        if not arrow_schema(found).equals(value, check_metadata=True):
            said = "a schema with metadata, or columns that may not be null"
            raise ValueError(f"{said}, has no form in a config: {_IN_CODE}")
        return _Tagged("!schema", found)
    if isinstance(value, pc.Expression):
        raise ValueError(
            f"the expression {shown(str(value))} has no form in a config: give it as a list, such as "
            '[["x", ">", 20], ["lang", "in", ["en", "de"]]] (see pyarrow.parquet.filters_to_expression)'
        )
    if inspect.isroutine(value) or inspect.isclass(value):
        return _Tagged("!function", name_of(value))
    _refuse_parts_of_recipes(type(value))
    raise ValueError(f"an object of {kind} has no form in a config: {_IN_CODE}")


def _refuse_parts_of_recipes(value: Any) -> None:
    if str(getattr(value, "__module__", "")).startswith("trainpipes_recipes."):
        way = "make this pipeline by tp.recipe(name, ...), and the recipe is written"
        raise ValueError(f"{value.__qualname__} is part of a recipe: {way}")


def _arrow(kind: pa.DataType) -> str:
    text = str(kind)
    try:
        if arrow_type(text).equals(kind, check_metadata=True):
            return text
    except ValueError:
        pass
    raise ValueError(f"the Arrow type {text} has no form in a config: {_IN_CODE}")


def _has_secret(text: str) -> bool:
    left = without_url_secrets(text)
    bare = left.replace("://…@", "://")
    return left != text or re.search(r"://[^\s'\"/?#]*@", bare) is not None


def name_of(value: Any) -> str:
    """The name, ``package.module:function``, by which a config finds a function or a class.

    Raises:
        ValueError: it finds another, or none.

    >>> import json
    >>> name_of(json.dumps)
    'json:dumps'
    """
    module = getattr(value, "__module__", None) or "builtins"
    path = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        found = functools.reduce(getattr, path.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        found = None
    _refuse_parts_of_recipes(value)
    if module == "__main__" or (found is not value and found != value):
        raise ValueError(
            f"a config cannot import {module}:{path}: define it at the top of a module, and the config names "
            "it package.module:function"
        )
    return f"{module}:{path}"
