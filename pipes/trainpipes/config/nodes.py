"""What a document is before it is a pipeline: texts, lists and mappings, each with its line and tag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Items", "Keyed", "Node", "Text", "is_null", "kind_of"]


@dataclass
class Node:
    """A value of a document.

    Attributes:
        line: where it begins, from 1; None where it is not of the file.
        tag: ``!name``, or None where it has none. Those of YAML itself are ``!!name``.
        weight: the node and all below it, those of aliases counted where they are used.
        height: levels of lists and mappings, this one included.
    """

    line: int | None = None
    tag: str | None = None
    weight: int = field(default=1, compare=False)
    height: int = field(default=0, compare=False)


@dataclass
class Text(Node):
    """A scalar.

    Attributes:
        text: as it stands there.
        plain: whether it has no quotes, so that it may be a number, a bool or null.
        literal: whether a ``${NAME}`` in it is text like any other.
    """

    text: str = ""
    plain: bool = True
    literal: bool = False


@dataclass
class Items(Node):
    """A list."""

    items: list[Node] = field(default_factory=list)


@dataclass
class Keyed(Node):
    """A mapping; no key comes twice."""

    pairs: list[tuple[Text, Node]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Text, Node]]:
        return iter(self.pairs)

    def get(self, name: str) -> Node | None:
        """The value of a key, if it is there."""
        return next((value for key, value in self.pairs if key.text == name), None)

    def put(self, name: str, value: Node) -> None:
        """Set the value of a key."""
        for number, (key, _) in enumerate(self.pairs):
            if key.text == name:
                self.pairs[number] = key, value
                return
        self.pairs.append((Text(value.line, text=name, literal=True), value))


def is_null(node: Node | None) -> bool:
    """Whether a value is not there, or null."""
    return node is None or (
        isinstance(node, Text)
        and node.plain
        and node.tag in (None, "!!null")
        and node.text in ("", "~", "null", "Null", "NULL")
    )


def kind_of(node: Node | None) -> str:
    """What a value is, in words."""
    if is_null(node):
        return "null"
    kind = (
        "text" if isinstance(node, Text) else "a list" if isinstance(node, Items) else "a mapping"
    )
    return kind if node is None or node.tag is None else f"{kind} with the tag {node.tag}"
