"""Nodes to values: what an option of a stage or a recipe is given."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.shown import shown
from trainpipes.config.declared import fits, members, said
from trainpipes.config.environment import expanded
from trainpipes.config.functions import REFUSED, imported, is_name
from trainpipes.config.nodes import Items, Keyed, Node, Text, kind_of
from trainpipes.config.origin import Origin, joined
from trainpipes.config.scalars import resolved
from trainpipes.config.tagged import READERS
from trainpipes.pipeline import Pipeline

__all__ = ["Reader", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """What a value is to be.

    Args:
        asker: whose it is, as messages say it: ``shuffle(buffer_size)``.
        path: where it stands.
        declared: its type.
        own_words: what the stage itself says of a value of another type, if it says something.
    """

    asker: str
    path: str
    declared: Any = Any
    own_words: Callable[[Any], str | None] | None = None

    def within(self, path: str, suffix: str, declared: Any) -> Wanted:
        return Wanted(f"{self.asker}{suffix}", path, declared)


@dataclass
class Reader:
    """Reads the values of one document.

    Args:
        origin: of it.
        allow_imports: whether functions may be imported.
        storage_options: for all stages that take them.
        build: makes a pipeline of a node.

    Attributes:
        used_storage: whether a stage took the storage options.
    """

    origin: Origin
    allow_imports: bool
    storage_options: Mapping[str, Any] | None
    build: Callable[[Reader, Node, str], Pipeline]
    used_storage: bool = field(default=False)

    def text(self, node: Text, path: str) -> str:
        """The text of a scalar, with what variables hold."""
        if node.literal:
            return node.text
        try:
            return expanded(node.text)
        except ValueError as error:
            raise self.origin.error(node, path, error) from None

    def function(self, node: Node, path: str, name: str, asker: str) -> Any:
        """A function or class by its name."""
        if not is_name(name):
            raise self.origin.error(
                node, path, f"{asker} is named package.module:function, got {shown(name)}"
            )
        if not self.allow_imports:
            raise self.origin.error(node, path, f"{asker} {REFUSED.format(name=name)}")
        try:
            return imported(name)
        except ValueError as error:
            raise self.origin.error(node, path, f"{asker}: {error}") from error

    def read(self, node: Node, wanted: Wanted) -> Any:
        """The value of a node.

        Raises:
            ConfigError: it is not what is wanted; says where.
        """
        value = self._value(node, wanted)
        if not fits(value, wanted.declared):
            hint = ""
            if any(member is str for member in members(wanted.declared)) and isinstance(
                value, bool | int | float
            ):
                hint = "; in quotes it is text"
            given = "null" if value is None else shown(value)
            text = f"{wanted.asker} is {said(wanted.declared)}, got {given}{hint}"
            own = None
            if wanted.own_words is not None and not hint and "(!" not in said(wanted.declared):
                own = wanted.own_words(value)
            raise self.origin.error(node, wanted.path, own or text)
        return value

    def _value(self, node: Node, wanted: Wanted) -> Any:
        if node.tag is not None and not node.tag.startswith("!!"):
            return self._tagged(node, wanted)
        kinds = members(wanted.declared)
        if isinstance(node, Text):
            return self._scalar(node, wanted, kinds)
        if isinstance(node, Items):
            inner = _item_type(kinds)
            self._standard(node, wanted, "!!seq")
            return [
                self.read(one, wanted.within(f"{wanted.path}[{n}]", f"[{n}]", inner))
                for n, one in enumerate(node.items)
            ]
        assert isinstance(node, Keyed)
        self._standard(node, wanted, "!!map")
        if pa.Schema in kinds and not any(fits({}, kind) for kind in kinds):
            return self._tagged(node, wanted, "!schema")
        return self.mapping(node, wanted, _item_type(kinds, Mapping))

    def mapping(self, node: Keyed, wanted: Wanted, inner: Any = Any) -> dict[Any, Any]:
        """A mapping as a dict; keys without quotes may be numbers."""
        found: dict[Any, Any] = {}
        for key, one in node:
            name = self.key(key, wanted.path)
            if name in found:
                raise self.origin.error(
                    key, wanted.path, f"the key {shown(name)} stands here twice"
                )
            within = wanted.within(joined(wanted.path, str(name)), f"[{name!r}]", inner)
            found[name] = self.read(one, within)
        return found

    def key(self, key: Text, path: str) -> Any:
        """What a key is: text, or without quotes also a number, a bool or null."""
        if key.tag is not None and key.tag.startswith("!!"):
            return self._typed(key, key.text, path)
        return self._resolved(key, key.text, path) if key.plain else key.text

    def _resolved(self, node: Text, text: str, path: str) -> Any:
        try:
            return resolved(text)
        except ValueError as error:
            raise self.origin.error(node, path, error) from None

    def _standard(self, node: Node, wanted: Wanted, tag: str) -> None:
        if node.tag not in (None, tag):
            raise self.origin.error(
                node,
                wanted.path,
                f"{node.tag} stands before a value of its kind, got {kind_of(node)}",
            )

    def _scalar(self, node: Text, wanted: Wanted, kinds: tuple[Any, ...]) -> Any:
        text = self.text(node, wanted.path)
        if node.tag is not None:
            return self._typed(node, text, wanted.path)
        value = self._resolved(node, text, wanted.path) if node.plain else text
        if not isinstance(value, str) or any(_is_text(value, kind) for kind in kinds):
            return value
        filters = pc.Expression in kinds
        if any(_is_callable(kind) for kind in kinds) and (is_name(value) or not filters):
            return self.function(node, wanted.path, value, wanted.asker)
        meant = {torch.dtype: "!dtype", pa.DataType: "!type", pc.Expression: "!expression"}
        for kind, tag in meant.items():
            if kind in kinds:
                return self._tagged(node, wanted, tag)
        return value

    def _typed(self, node: Text, text: str, path: str) -> Any:
        """A scalar with a tag of YAML's own."""
        if node.tag == "!!str":
            return text
        if node.tag == "!!binary":
            try:
                return base64.b64decode("".join(text.split()), validate=True)
            except (binascii.Error, ValueError):
                raise self.origin.error(node, path, "!!binary is base64, and this is not") from None
        kinds = {"!!int": int, "!!float": float, "!!bool": bool, "!!null": type(None)}
        value = self._resolved(node, text, path)
        if node.tag == "!!float" and type(value) is int:
            value = float(value)
        if type(value) is not kinds.get(str(node.tag)):
            raise self.origin.error(node, path, f"{shown(text)} is no {str(node.tag)[2:]}")
        return value

    def _tagged(self, node: Node, wanted: Wanted, tag: str | None = None) -> Any:
        return READERS[tag or str(node.tag)](self, node, wanted)


def _is_text(value: str, kind: Any) -> bool:
    """Whether a text is meant as text where that type is declared."""
    if kind in (Any, object, str, os.PathLike) or get_origin(kind) in (Literal, os.PathLike):
        return fits(value, kind)
    return get_origin(kind) is Sequence and fits(value, kind)


def _is_callable(kind: Any) -> bool:
    return getattr(get_origin(kind) or kind, "__name__", "") == "Callable"


def _item_type(kinds: tuple[Any, ...], over: type = Sequence) -> Any:
    """The declared type of what is in a list or mapping; Any if there are several."""
    found = []
    for kind in kinds:
        origin, parts = get_origin(kind), get_args(kind)
        if kind is Any or not parts or not isinstance(origin, type):
            found += [Any] if kind is Any else []
        elif issubclass(origin, Mapping):
            found += [parts[1]] if over is Mapping else []
        elif over is Sequence and origin in (Sequence, Iterable, list):
            found.append(parts[0])
        elif over is Sequence and origin is tuple:
            found.append(parts[0] if parts[1:] == (...,) or len(set(parts)) == 1 else Any)
    return found[0] if len(found) == 1 else Any
