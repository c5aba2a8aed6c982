"""Values to nodes: options as a config holds them, each so that it reads as what it was."""

from __future__ import annotations

import base64
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes import samplers
from trainpipes._internal.secret_text import is_secret
from trainpipes._internal.shown import shown
from trainpipes.config.arrow_types import type_text
from trainpipes.config.environment import escaped
from trainpipes.config.functions import name_of
from trainpipes.config.nodes import Items, Keyed, Node, Text
from trainpipes.config.printed_expressions import expression_text
from trainpipes.config.scalars import as_plain
from trainpipes.config.secret_values import secret_in
from trainpipes.kinds.options import argument_names
from trainpipes.pipeline import Pipeline

__all__ = ["Unwritable", "Writer"]

#: Numbers of an array that are settings; more are data.
MOST_NUMBERS = 4096
_MODULE = "define it at the top of a module, and the config names it package.module:function"
_IN_CODE = "keep this pipeline in code, or replace it by something with a name"


class Unwritable(ValueError):
    """A value that a config has no form for: says what it is, why, and the way out.

    Args:
        where: within the option: ``[2].fn``; nothing for the option itself.
        text: all of that.
    """

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}" if where else text)
        self.where = where
        self.text = text


@dataclass
class Writer:
    """Writes values.

    Args:
        expand: whether a ``${`` would be read as a variable, and is escaped.
        pipeline: makes the node of a pipeline.
        exact: whether a tuple stays one: it is an argument of somebody's function.
    """

    expand: bool = True
    pipeline: Callable[[Pipeline], Node] | None = None
    exact: bool = False

    def text(self, value: str, tag: str | None = None) -> Text:
        """A text that reads as it is."""
        written = escaped(value) if self.expand else value
        return Text(tag=tag, text=written, plain=False, literal=not self.expand)

    def node(self, value: Any, where: str = "", name: str = "") -> Node:
        """The node of a value.

        Args:
            value: any option of a stage, or a part of one.
            where: it is within the option.
            name: what it is called, which may say that it is a secret.

        Raises:
            Unwritable: it has none.
        """
        if self.expand and is_secret(name) and value is not None and not isinstance(value, bool):
            raise Unwritable(
                where,
                f"it is called {name!r} and may be a secret: write ${{VARIABLE}} there, by hand",
            )
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float):
            return self._number(value, where)
        if isinstance(value, str):
            if self.expand and (secret := secret_in(value)):
                raise Unwritable(
                    where,
                    f"{secret}: give it with storage_options, or write ${{VARIABLE}} there, by hand",
                )
            return self.text(str(value))
        if isinstance(value, bytes | bytearray):
            return Text(tag="!!binary", text=base64.b64encode(value).decode(), plain=False)
        if isinstance(value, Mapping):
            pairs = [
                (self._key(k, where), self.node(v, f"{where}[{k!r}]", str(k)))
                for k, v in value.items()
            ]
            return Keyed(pairs=pairs)
        if isinstance(value, list | tuple):
            tag = "!tuple" if self.exact and isinstance(value, tuple) else None
            return Items(tag=tag, items=self._all(list(value), where))
        if isinstance(value, set | frozenset):
            return Items(tag="!set", items=self._all(sorted(value, key=repr), where))
        return self._tagged(value, where)

    def _all(self, values: list[Any], where: str) -> list[Node]:
        return [self.node(one, f"{where}[{n}]") for n, one in enumerate(values)]

    def _number(self, value: bool | int | float | None, where: str) -> Text:
        if isinstance(value, int) and value.bit_length() > 1000:
            raise Unwritable(where, f"{shown(value)} is too large a number for a config")
        return Text(text=as_plain(value), literal=True)

    def _key(self, key: Any, where: str) -> Text:
        if isinstance(key, str):
            return Text(text=str(key), plain=False, literal=True)
        if isinstance(key, np.generic):
            key = key.item()
        if key is None or isinstance(key, bool | int | float):
            return self._number(key, where)
        raise Unwritable(where, f"a key is text or a number, got {shown(key)}; {_IN_CODE}")

    def _tagged(self, value: Any, where: str) -> Node:
        if isinstance(value, Path):
            return self.text(str(value), "!path")
        if isinstance(value, torch.dtype):
            return Text(tag="!dtype", text=str(value).removeprefix("torch."), plain=False)
        if isinstance(value, torch.device | np.dtype):
            raise Unwritable(where, f"give it by its name, '{value}', instead of {value!r}")
        if isinstance(value, pa.DataType | pa.Schema):
            return self._arrow(value, where)
        if isinstance(value, Pipeline) and self.pipeline is not None:
            return self.pipeline(value)
        if isinstance(value, samplers.RowSampler):
            return self._sampler(value, where)
        if isinstance(value, functools.partial):
            return self._partial(value, where)
        if isinstance(value, np.ndarray | torch.Tensor):
            return self._array(value, where)
        if type(value).__module__.startswith("pyarrow") and type(value).__name__ == "Expression":
            try:
                return self.text(expression_text(value), "!expression")
            except ValueError as error:
                raise Unwritable(where, str(error)) from None
        if inspect.isroutine(value) or inspect.isclass(value):
            try:
                return self.text(name_of(value), "!function")
            except ValueError as error:
                raise Unwritable(where, f"{error}: {_MODULE}") from None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._object(value, where)
        raise Unwritable(where, f"{_an(value)} has no form in a config; {_IN_CODE}")

    def _arrow(self, value: Any, where: str) -> Node:
        try:
            if isinstance(value, pa.DataType):
                return Text(tag="!type", text=type_text(value), plain=False, literal=True)
            pairs: list[tuple[Text, Node]] = []
            for one in value:
                needed = "" if one.nullable else " not null"
                pairs.append((self._key(one.name, where), self.text(type_text(one.type) + needed)))
        except ValueError as error:
            raise Unwritable(where, f"{error}; keep this pipeline in code") from None
        return Keyed(tag="!schema", pairs=pairs)

    def _exactly(self) -> Writer:
        return dataclasses.replace(self, exact=True)

    def _sampler(self, value: samplers.RowSampler, where: str) -> Node:
        kind = type(value)
        if getattr(samplers, kind.__name__, None) is not kind:
            raise Unwritable(where, f"{_an(value)} is a sampler of your own; {_IN_CODE}")
        pairs: list[tuple[Text, Node]] = []
        for one in inspect.signature(kind).parameters.values():
            given = getattr(value, "rows" if one.name in ("data_source", "dataset") else one.name)
            if given is one.default or (type(given) is type(one.default) and given == one.default):
                continue
            if isinstance(given, np.ndarray):
                given = self._few(given, where).tolist()
            pairs.append((self._key(one.name, where), self.node(given, f"{where}.{one.name}")))
        if not pairs:
            return Text(tag="!sampler", text=kind.__name__, plain=False, literal=True)
        name = Text(text=kind.__name__, plain=False, literal=True)
        return Keyed(tag="!sampler", pairs=[(name, Keyed(pairs=pairs))])

    def _few(self, value: Any, where: str) -> Any:
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if size > MOST_NUMBERS:
            raise Unwritable(
                where,
                f"an array of {size:,} numbers is data ({MOST_NUMBERS:,} are written); keep it in a file",
            )
        return value

    def _partial(self, value: functools.partial[Any], where: str) -> Node:
        exact = self._exactly()
        pairs: list[tuple[Text, Node]] = [
            (Text(text="function"), self.node(value.func, f"{where}.func"))
        ]
        if pairs[0][1].tag != "!function":
            raise Unwritable(where, f"a partial of {_an(value.func)}; {_MODULE}")
        pairs[0][1].tag = None
        if value.args:
            named = enumerate(zip(argument_names(value), value.args, strict=True))
            items = [exact.node(one, f"{where}[{n}]", name) for n, (name, one) in named]
            pairs.append((Text(text="arguments"), Items(items=items)))
        if value.keywords:
            pairs.append((Text(text="keywords"), exact.node(dict(value.keywords), where)))
        return Keyed(tag="!partial", pairs=pairs)

    def _object(self, value: Any, where: str) -> Node:
        kind = type(value)
        try:
            name = name_of(kind)
        except ValueError as error:
            raise Unwritable(where, f"{error}: {_MODULE}") from None
        pairs: list[tuple[Text, Node]] = []
        exact = self._exactly()
        for one in dataclasses.fields(value):
            given = getattr(value, one.name, None)
            default = one.default
            if not one.init or (type(given) is type(default) and given == default):
                continue
            pairs.append(
                (self._key(one.name, where), exact.node(given, f"{where}.{one.name}", one.name))
            )
        options: Node = Keyed(pairs=pairs) if pairs else Text(text="", literal=True)
        return Keyed(tag="!object", pairs=[(Text(text=name, plain=False), options)])

    def _array(self, value: Any, where: str) -> Node:
        tag = "!array" if isinstance(value, np.ndarray) else "!tensor"
        self._few(value, where)
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise Unwritable(where, f"an array of {value.dtype} is not written; {_IN_CODE}")
        if isinstance(value, torch.Tensor) and (value.is_complex() or value.is_quantized):
            raise Unwritable(where, f"a tensor of {value.dtype} is not written; {_IN_CODE}")
        dtype = self.text(str(value.dtype).removeprefix("torch."))
        numbers = self.node(value.tolist(), where)
        return Keyed(tag=tag, pairs=[(Text(text="dtype"), dtype), (Text(text="values"), numbers)])


def _an(value: Any) -> str:
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
