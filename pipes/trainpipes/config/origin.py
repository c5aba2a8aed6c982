"""Where a value of a document stands, and errors that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainpipes.config.nodes import Node
from trainpipes.errors import ConfigError

__all__ = ["Origin", "joined"]


@dataclass(frozen=True)
class Origin:
    """The document that values are of.

    Args:
        name: of the file, as messages call it.
    """

    name: str

    def at(self, node: Node | None, path: str = "") -> str:
        """``train.yaml:7: stages[3].buffer_size: ``, with what there is of it."""
        said = self.name
        if node is not None:
            said += ", changes" if node.line is None else f":{node.line}"
        return f"{said}: {path}: " if path else f"{said}: "

    def error(self, node: Node | None, path: str, text: Any) -> ConfigError:
        """What is wrong with a value.

        Args:
            node: the value; None for the document as a whole.
            path: to it, such as ``stages[3].buffer_size``.
            text: the rule, what was got, and the way out.
        """
        return ConfigError(f"{self.at(node, path)}{text}", path=self.name)


def joined(path: str, name: str) -> str:
    """The path of what is called ``name`` within ``path``.

    >>> joined("options", "files"), joined("", "stages"), joined("options.names", "a b")
    ('options.files', 'stages', "options.names['a b']")
    """
    if not name.replace("-", "_").isidentifier():
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else name
