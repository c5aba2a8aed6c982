"""Nodes to text: YAML that readers of 1.1 and of 1.2 understand the same, and people read easily."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from trainpipes._internal.extra import need
from trainpipes.config.nodes import Items, Keyed, Node, Text
from trainpipes.config.scalars import is_only_text

__all__ = ["emitted"]

#: Characters of a list or mapping that is written in one line, at most.
WIDTH = 72
#: Ends of lines for YAML 1.1, and characters like any other for 1.2: written as escapes.
_BREAKS = "\x85\u2028\u2029\r"


def emitted(root: Node, comments: list[str]) -> str:
    """A document as text.

    Args:
        root: its node.
        comments: lines on top.
    """
    need("yaml", "to_yaml")
    import yaml

    class Emitter(yaml.emitter.Emitter):
        """Writes texts with a tag without quotes, too, where they need none."""

        def choose_scalar_style(self) -> Any:
            event: Any = self.event
            chosen = super().choose_scalar_style()
            if chosen != "'" or event.style or event.tag is None or self.simple_key_context:
                return chosen
            found: Any = self.analysis
            fits = found.allow_flow_plain if self.flow_level else found.allow_block_plain
            return "" if fits and not found.empty and not found.multiline else chosen

    stream = io.StringIO()
    writer = Emitter(stream, allow_unicode=True, width=1 << 30)
    writer.emit(yaml.StreamStartEvent())
    writer.emit(yaml.DocumentStartEvent(explicit=False))
    for event in _events(root, yaml, 0):
        writer.emit(event)
    writer.emit(yaml.DocumentEndEvent(explicit=False))
    writer.emit(yaml.StreamEndEvent())
    head = "".join(f"# {line}\n" for line in comments)
    return head + stream.getvalue()


def _events(node: Node, yaml: Any, depth: int, key: bool = False) -> Iterator[Any]:
    tag = node.tag
    if tag is not None and tag.startswith("!!"):
        tag = f"tag:yaml.org,2002:{tag[2:]}"
    if isinstance(node, Text):
        yield _scalar(node, tag, yaml, key)
        return
    if node.tag == "!pipeline":
        depth = 0
    flow = depth > 2 and _width(node) <= WIDTH
    if isinstance(node, Items):
        yield yaml.SequenceStartEvent(None, tag, tag is None, flow_style=flow or not node.items)
        for one in node.items:
            yield from _events(one, yaml, depth + 1)
        yield yaml.SequenceEndEvent()
    if isinstance(node, Keyed):
        yield yaml.MappingStartEvent(None, tag, tag is None, flow_style=flow or not node.pairs)
        for name, one in node:
            yield from _events(name, yaml, depth + 1, key=True)
            yield from _events(one, yaml, depth + 1)
        yield yaml.MappingEndEvent()


def _scalar(node: Text, tag: str | None, yaml: Any, key: bool) -> Any:
    text = node.text
    if tag is not None:
        style = '"' if any(mark in text for mark in _BREAKS) else None
        return yaml.ScalarEvent(None, tag, (False, False), text, style=style)
    if node.plain:
        return yaml.ScalarEvent(None, None, (True, False), text)
    style = None if is_only_text(text) else "'"
    if "\n" in text and not key:
        style = "|"
    if any(mark in text for mark in _BREAKS):
        style = '"'
    return yaml.ScalarEvent(None, None, (style is None, True), text, style=style)


def _width(node: Node) -> float:
    """About how many characters a node takes in one line; infinite where it can't stand in one."""
    own = len(node.tag or "") + 2
    if node.tag == "!pipeline":
        return float("inf")
    if isinstance(node, Text):
        return float("inf") if "\n" in node.text else len(node.text) + 2
    if isinstance(node, Items):
        return own + sum(map(_width, node.items))
    assert isinstance(node, Keyed)
    return own + sum(_width(key) + _width(one) for key, one in node)
