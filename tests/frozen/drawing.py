"""A chain while it is drawn."""

from __future__ import annotations

from typing import Any, ClassVar

from frozen.draws import Draws

__all__ = ["Drawing", "Stage"]

Stage = list[Any]


class Drawing:
    """A chain while it is drawn.

    Attributes:
        columns: kinds of the columns by name: "number", "real", "nulls" (numbers and nulls), "text",
            "ids", "even ids" (of one length), "bytes", "picture" (a file), "image", "vector", "flag";
            None where rows are no dicts.
        python: whether rows are Python's own, not columns.
        stream: whether rows cannot be listed.
        numbered: whether rows can be read by their numbers.
    """

    def __init__(self, draws: Draws) -> None:
        self.d = draws
        self.source: Stage = []
        self.stages: list[Stage] = []
        self.columns: dict[str, str] | None = None
        self.python = False
        self.stream = False
        self.numbered = False
        self.scalar = "dict"
        self.shards = 1
        self.ragged = False
        self.endless = False
        self.finite_uncounted = False
        self.shuffled = False
        self.vocabulary = 300
        self.told = False
        self.packed = False
        self.repeated = False
        self.padless = False
        self.sampled = False
        self.long = 1

    def add(self, name: str, **options: Any) -> None:
        self.stages.append([name, {k if k != "by_place" else "": v for k, v in options.items()}])

    def of(self, *kinds: str) -> list[str]:
        """Columns of these kinds."""
        return [name for name, kind in (self.columns or {}).items() if kind in kinds]

    FULL: ClassVar = {
        "x": "number", "text": "text", "answer": "text", "tokens": "ids", "label": "text",
        "score": "nulls", "flag": "flag",
    }  # fmt: skip
