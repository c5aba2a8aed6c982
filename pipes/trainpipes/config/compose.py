"""Text to nodes: YAML's grammar, and nothing that its tags could do.

PyYAML reads the text and says what comes, one event after the other. No constructor of it is used, so that a
tag is a word and no call.
"""

from __future__ import annotations

from typing import Any

from trainpipes._internal.extra import need
from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.config.nodes import Items, Keyed, Node, Text
from trainpipes.config.origin import Origin

__all__ = ["LARGEST", "TAGS", "compose", "decoded"]

#: Bytes of a document, at most.
LARGEST = 1 << 20
#: Values of a document, at most, those of aliases counted wherever they are used.
MOST = 100_000
#: Lists and mappings within each other, at most.
DEEPEST = 64
_DEEP = f"lists and mappings lie more than {DEEPEST} deep in each other"

#: Tags of ours, and those of YAML itself that are read.
TAGS = (
    "!array", "!dtype", "!expression", "!function", "!object", "!partial", "!path", "!pipeline",
    "!sampler", "!schema", "!set", "!tensor", "!tuple", "!type",
)  # fmt: skip
_STANDARD = "tag:yaml.org,2002:"
_OF_YAML = ("!!binary", "!!bool", "!!float", "!!int", "!!map", "!!null", "!!seq", "!!str")


def decoded(data: bytes, origin: Origin) -> str:
    """Bytes as text."""
    if len(data) > LARGEST:
        raise origin.error(
            None,
            "",
            f"a config has {LARGEST:,} bytes at most, and this has more: keep data in files",
        )
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise origin.error(None, "", "a config is UTF-8, and this is UTF-16: save it as UTF-8")
    if b"\0" in data:
        raise origin.error(None, "", "a config is a text file of YAML, and this is binary")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise origin.error(
            Node(line),
            "",
            f"a config is UTF-8, and byte {data[error.start]:#04x} is not: save it as UTF-8",
        ) from None


def compose(text: str, origin: Origin) -> Node | None:
    """The node that a text is; None for one without anything.

    Raises:
        ConfigError: it is no YAML, or more than a document of settings needs.
        MissingExtraError: PyYAML is not installed.
    """
    need("yaml", "tp.load")
    import yaml

    if len(text) > LARGEST:
        raise origin.error(
            None, "", f"a config has {LARGEST:,} characters at most, and this has {len(text):,}"
        )
    try:
        return _Composer(origin, yaml).composed(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = text[error.position : error.position + 1]
        raise origin.error(
            Node(line),
            "",
            f"the character {character!a} may not stand in YAML: write it as an escape in quotes",
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise origin.error(Node(line), "", _problem(text, line, error)) from None


def _problem(text: str, line: int, error: Any) -> str:
    lines = text.split("\n")
    there = lines[line - 1] if line <= len(lines) else ""
    if "'\\t'" in str(error.problem) or there[: len(there) - len(there.lstrip())].count("\t"):
        return "a tab stands where YAML wants spaces: indent with spaces"
    said = " ".join(str(part) for part in (error.context, error.problem) if part)
    hint = ""
    if "${" in there and "flow" in said:
        hint = "; within {} and [] a ${NAME} has no place: write these options one a line"
    return f"this is no YAML: {said}{hint}"


class _Composer:
    """One document.

    Args:
        origin: of it.
        yaml: PyYAML.
    """

    def __init__(self, origin: Origin, yaml: Any) -> None:
        self._origin = origin
        self._yaml = yaml
        self._anchors: dict[str, Node] = {}
        self._open: list[tuple[Node, Text | None]] = []  # lists and mappings, with a key that waits

    def composed(self, text: str) -> Node | None:
        yaml = self._yaml
        root: Node | None = None
        documents = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._wrong(
                        line, "a config is one document, and here another begins: leave out ---"
                    )
                continue
            node: Node | None = None
            if isinstance(event, yaml.AliasEvent):
                node = self._aliased(event.anchor, line)
            elif isinstance(event, yaml.ScalarEvent):
                plain = event.style is None and event.implicit[0]
                node = Text(line, self._tag(event, line), text=event.value, plain=plain)
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                kind = Items if isinstance(event, yaml.SequenceStartEvent) else Keyed
                opened = kind(line, self._tag(event, line))
                self._check_key(line, opened)
                self._open.append((opened, None))
                if len(self._open) > DEEPEST:
                    raise self._wrong(line, _DEEP)
                self._name(event.anchor, opened, line)
                continue
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                node, _ = self._open.pop()
            else:
                continue
            if isinstance(event, yaml.ScalarEvent):
                self._name(event.anchor, node, line)
            if self._open:
                self._add(node, line)
            else:
                root = node
        return root

    def _wrong(self, line: int, text: str) -> Exception:
        return self._origin.error(Node(line), "", text)

    def _name(self, anchor: str | None, node: Node, line: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _aliased(self, anchor: str, line: int) -> Node:
        found = self._anchors.get(anchor)
        if found is None:
            raise self._wrong(line, f"*{anchor} names nothing: no &{anchor} stands before it")
        if any(node is found for node, _ in self._open):
            raise self._wrong(line, f"*{anchor} stands within what it names")
        return found

    def _check_key(self, line: int, node: Node) -> None:
        over, key = self._open[-1] if self._open else (None, None)
        if isinstance(over, Keyed) and key is None:
            raise self._wrong(line, "a key is text, and here it is a list or a mapping")

    def _add(self, node: Node, line: int) -> None:
        over, key = self._open[-1]
        over.weight += node.weight
        over.height = max(over.height, 1 + node.height)
        if over.height + len(self._open) > DEEPEST:
            raise self._wrong(line, _DEEP)
        if sum(one.weight for one, _ in self._open) > MOST:
            raise self._wrong(
                line,
                f"a config has {MOST:,} values at most, those of aliases counted wherever they stand",
            )
        if isinstance(over, Items):
            over.items.append(node)
        elif isinstance(over, Keyed) and key is None:
            self._open[-1] = over, self._key(over, node, line)
        elif isinstance(over, Keyed) and key is not None:
            over.pairs.append((key, node))
            self._open[-1] = over, None

    def _key(self, over: Keyed, node: Node, line: int) -> Text:
        if not isinstance(node, Text):
            raise self._wrong(line, "a key is text, and here it is a list or a mapping")
        if node.text == "<<" and node.plain:
            raise self._wrong(
                line, "merge keys (<<) are not part of YAML 1.2: write the options out"
            )
        if node.tag is not None and node.tag not in _OF_YAML:
            raise self._wrong(line, f"a key has no tag of its own, got {node.tag}")
        seen = self._keys_of(over)
        same = node.text, node.plain  # a number in quotes is another key
        if same in seen:
            raise self._wrong(
                line, f"the key {shown(node.text)} stands here twice, first in line {seen[same]}"
            )
        seen[same] = node.line
        return Text(line, node.tag, text=node.text, plain=node.plain, literal=True)

    def _keys_of(self, over: Keyed) -> dict[tuple[str, bool], int | None]:
        """Keys so far, with their lines; kept beside the mapping while it is open."""
        found: dict[tuple[str, bool], int | None] = vars(over).setdefault("_keys", {})
        return found

    def _tag(self, event: Any, line: int) -> str | None:
        tag = event.tag
        if tag is None or tag == "!":
            return None
        said = f"!!{tag.removeprefix(_STANDARD)}" if tag.startswith(_STANDARD) else tag
        if said not in TAGS and said not in _OF_YAML:
            known = _OF_YAML if str(said).startswith("!!") else TAGS
            raise self._wrong(
                line,
                f"there is no tag {shown(said)}{nearest(said, known)}; a config has {', '.join(TAGS)}",
            )
        return str(said)
