"""A chain as Mermaid text, which GitHub, GitLab and mkdocs draw: https://mermaid.js.org."""

from __future__ import annotations

from collections.abc import Sequence

from trainpipes.look.pictures.chain import Box, Chain

__all__ = ["mermaid"]

#: What Mermaid would take for its own, in a text.
_ESCAPED = {ord(c): f"#{ord(c)};" for c in '#"<>&`\\'}


def mermaid(chain: Chain) -> str:
    """The text of a drawing of a chain."""
    text = _Text()
    last = text.chain(chain)
    text.nodes.append('    training(["training loop"])')
    text.edge(last, "training", chain.result)
    if chain.dealt:
        text.nodes.append("    end")
    return "\n".join(["flowchart TB", *text.nodes, *text.edges])


class _Text:
    """Boxes first, then lines: one that is drawn within a frame would pull its ends into it."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.edges: list[str] = []
        self._count = 0

    def edge(self, first: str, second: str, label: str) -> None:
        self.edges.append(f'    {first} -->|"{label.translate(_ESCAPED)}"| {second}')

    def chain(self, chain: Chain) -> str:
        """Write a chain; returns the name of its last box. A frame around what is dealt is left open."""
        names: list[str] = []
        for number, box in enumerate(chain.boxes):
            own = self._box(box)
            if names:
                self.edge(names[-1], own, str(chain.boxes[number - 1].flow))
            names.append(own)
            if chain.dealt == number + 1:
                self.nodes.append(f'    subgraph dealt["{chain.dealt_to}"]')
        return names[-1]

    def _box(self, box: Box) -> str:
        ends: list[tuple[str, str]] = []
        if box.crowded:
            frame = self._name()
            self.nodes.append(f'    subgraph {frame}["{len(box.branches)} pipelines"]')
            self.nodes.append("    direction LR")
            for branch in box.branches:
                self._node((branch.label, *branch.card))
            self.nodes.append("    end")
            ends.append((frame, ""))
        else:
            ends += [(self.chain(branch.chain), branch.label) for branch in box.branches]
        own = self._node((box.name, *box.lines))
        for end, label in ends:
            self.edge(end, own, label or str(box.flow))
        return own

    def _node(self, lines: Sequence[str]) -> str:
        own = self._name()
        label = "<br/>".join(line.translate(_ESCAPED) for line in lines)
        self.nodes.append(f'    {own}["{label}"]')
        return own

    def _name(self) -> str:
        self._count += 1
        return f"stage{self._count}"
