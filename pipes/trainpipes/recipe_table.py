"""What recipes are installed, as a table: name, what for, options."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RecipeSummary", "RecipeTable", "option_texts"]

#: Columns of the table as text.
WIDTH = 100


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe.

    Args:
        name: by which ``recipe`` finds it.
        summary: the first line of its docstring, or why it cannot be used.
        options: those that it needs, then the others with their defaults.
        texts: what its docstring says of each option, by name.
    """

    name: str
    summary: str
    options: tuple[str, ...]
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The options that have no default."""
        return tuple(one for one in self.options if "=" not in one and not one.startswith("*"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The options that name columns of the rows, as their texts say."""
        return tuple(name for name, text in self.texts.items() if re.match(r"columns?\b", text))


def option_texts(doc: str | None) -> dict[str, str]:
    """What the section "Args:" of a docstring says of each argument.

    >>> option_texts("Counts.\\n\\nArgs:\\n    n: how far, or\\n        None.\\n    *step: each.")
    {'n': 'how far, or None.', 'step': 'each.'}
    """
    lines = (doc or "").expandtabs().splitlines()
    start = next((n for n, line in enumerate(lines) if line.strip() == "Args:"), len(lines))
    body = textwrap.dedent("\n".join(_indented(lines[start:])))
    found = re.findall(r"^\**(\w+)(?: \([^)]*\))?: ?(.*(?:\n[ \n].*)*)", body, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _indented(lines: list[str]) -> list[str]:
    """The lines after the first that stand further in than it does."""
    if not lines:
        return []
    depth, found = len(lines[0]) - len(lines[0].lstrip()), []
    for line in lines[1:]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        found.append(line)
    return found


class RecipeTable(tuple[RecipeSummary, ...]):
    """The recipes that are installed, by name. Shows itself as a table.

    >>> RecipeTable([RecipeSummary("count", "Numbers from 0.", ("n", "step=1"))])
    count   Numbers from 0.
            n, step=1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no recipes: no package that offers some is installed"
        indent = max(len(one.name) for one in self) + 3
        lines = []
        for one in self:
            texts = [one.summary, ", ".join(one.options)]
            told = [line for text in texts for line in textwrap.wrap(text, WIDTH - indent)]
            lines += [
                f"{'' if number else one.name:{indent}}{line}" for number, line in enumerate(told)
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        rows = [
            f"<tr><td><b>{html.escape(one.name)}</b></td><td>{html.escape(one.summary)}</td>"
            f"<td>{html.escape(', '.join(one.options))}</td></tr>"
            for one in self
        ]
        head = "<tr><th>recipe</th><th>what</th><th>options</th></tr>"
        return f"<table>{head}{''.join(rows)}</table>"
