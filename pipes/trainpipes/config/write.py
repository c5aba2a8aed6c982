"""``to_yaml``: a pipeline as it is written down."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainpipes.config.declared import parameters_of
from trainpipes.config.emit import emitted
from trainpipes.config.functions import name_of
from trainpipes.config.load import loads
from trainpipes.config.nodes import Items, Keyed, Node, Text
from trainpipes.config.stage_names import public_stages
from trainpipes.config.tokenizer_objects import tokenizer_way_out
from trainpipes.config.write_values import Unwritable, Writer
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, same
from trainpipes.kinds.stage import Stage
from trainpipes.pipeline import Pipeline
from trainpipes.sources.arrow.from_arrow import FromArrow
from trainpipes.sources.hf.from_hf import FromHf
from trainpipes.sources.memory.from_dataset import FromDataset
from trainpipes.sources.memory.from_iterable import FromIterable
from trainpipes.sources.memory.from_tensors import FromTensors
from trainpipes.sources.memory.from_torchdata import FromTorchdata
from trainpipes.version import __version__

__all__ = ["to_yaml"]

#: The option of a source with its rows.
_IN_MEMORY: dict[type, str] = {
    FromArrow: "table", FromDataset: "dataset", FromHf: "dataset", FromIterable: "factory",
    FromTensors: "tensors", FromTorchdata: "node",
}  # fmt: skip
_ROWS = (list, tuple, dict, range, np.ndarray, torch.Tensor)


def to_yaml(pipeline: Pipeline, path: str | os.PathLike[str] | None = None) -> str:
    """A pipeline as YAML, which ``load`` reads as the same pipeline. See ``Pipeline.to_yaml``."""
    left_out: list[str] = []
    text = emitted(_node(pipeline, left_out), [f"trainpipes {__version__}"])
    if left_out:
        head, rest = text.split("\n", 1)
        text = (
            f"{head}\n# storage_options are not written: tp.load(path, storage_options=...)\n{rest}"
        )
    _check(pipeline, text)
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
        raise ConfigError(
            f"to_yaml(path): {path} cannot be written: {error}", path=str(path)
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _node(pipeline: Pipeline, left_out: list[str]) -> Keyed:
    if pipeline._ranks is not None:
        raise ConfigError(
            "to_yaml() writes what all ranks share, and distributed(...) is of one of them: write the "
            "pipeline before, and call distributed() on what tp.load gives"
        )
    stages = [_stage(stage, left_out) for stage in pipeline.stages]
    return Keyed(pairs=[(Text(text="stages"), Items(items=stages))])


def _stage(stage: Stage, left_out: list[str]) -> Node:
    kind, name = type(stage), stage.name
    ours = public_stages().get(name) is kind
    if not ours:
        try:
            name = name_of(kind)
        except ValueError as error:
            raise ConfigError(
                f"to_yaml(): {stage.name} is a stage of your own, and {error}: define its class at the top "
                "of a module, and the config names it package.module:Class",
                stage=str(stage),
            ) from None

    def inner(pipeline: Pipeline) -> Node:
        found = _node(pipeline, left_out)
        found.tag = "!pipeline"
        return found

    writer = Writer(pipeline=inner, exact=not ours)
    pairs: list[tuple[Text, Node]] = []
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = getattr(stage, one.name)
        if one.name == "storage_options":
            left_out += [stage.name] * (value is not None)
            continue
        if _is_default(stage, one, value):
            continue
        try:
            if _IN_MEMORY.get(kind) == one.name and isinstance(value, _ROWS):
                raise Unwritable("", "")
            pairs.append((Text(text=one.name), writer.node(value, name=one.name)))
        except Unwritable as error:
            why = f"{error.where}: {error.text}"
            if one.name == "tokenizer":
                why = f": {tokenizer_way_out(value)}"
            elif _IN_MEMORY.get(kind) == one.name:
                why = (
                    ": rows in memory have no place in a config: write them to files once, as with "
                    ".write_parquet(folder), and read these"
                )
            said = f"to_yaml(): {stage.name}({one.name})"
            raise ConfigError(f"{said}{why}", stage=str(stage)) from None
    first = next(iter(parameters_of(kind)), None)
    named = Text(text=name, plain=False, literal=True)
    if not pairs:
        return named
    if len(pairs) == 1 and pairs[0][0].text == first and _is_short(pairs[0][1]):
        return Keyed(pairs=[(named, pairs[0][1])])
    return Keyed(pairs=[(named, Keyed(pairs=pairs))])


def _is_default(stage: Stage, field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether an option is what it is where it is left out."""
    default = field.default
    if type(value) is type(default) and same(value, default):
        return True
    if value is not None or default is dataclasses.MISSING:
        return False
    others = {name: one for name, one in stage.options.items() if name != field.name}
    try:  # a stage may keep a default as None
        return getattr(type(stage)(**others), field.name) is None
    except (TypeError, ValueError):
        return False


def _is_short(node: Node) -> bool:
    """Whether a value may stand right after a stage's name."""
    return not isinstance(node, Keyed) or node.tag is not None


def _check(pipeline: Pipeline, text: str) -> None:
    """Raise unless a text reads as the same pipeline."""
    again = loads(text, name="to_yaml()", allow_imports=True)
    for there, here in zip(pipeline.stages, again.stages, strict=True):
        if there.options.get("storage_options") is not None:
            there = there.replaced(storage_options=None)
        for name, value in there.options.items():
            found = here.options[name]
            if not (same(value, found) and repr(_identity(value)) == repr(_identity(found))):
                raise ConfigError(
                    f"to_yaml(): {there.name}({name}) would not come back the same; keep it in code",
                    stage=str(there),
                )


def _identity(value: Any) -> Any:
    if isinstance(value, Pipeline):
        return [_identity(stage.options) for stage in value.stages]
    if isinstance(value, dict):
        return [(identify(key), _identity(one)) for key, one in value.items()]
    return [_identity(one) for one in value] if isinstance(value, list | tuple) else identify(value)
