"""What recipes are installed, as a table: name, what for, options."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass

__all__ = ["RecipeSummary", "RecipeTable"]

#: Columns of the table as text.
WIDTH = 100


@dataclass(frozen=True)
class RecipeSummary:
    """One recipe.

    Args:
        name: by which ``recipe`` finds it.
        summary: the first line of its docstring, or why it cannot be used.
        options: those that it needs, then the others with their defaults.
    """

    name: str
    summary: str
    options: tuple[str, ...]


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
