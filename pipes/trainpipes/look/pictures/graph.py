"""``pipe.graph()``: the chain as a drawing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainpipes._internal.shown import shown
from trainpipes.errors import ConfigError
from trainpipes.look.pictures.chain import chain_of
from trainpipes.look.pictures.mermaid import mermaid
from trainpipes.look.pictures.svg import svg
from trainpipes.pipeline import Pipeline

__all__ = ["Graph", "graph"]


@dataclass(frozen=True, repr=False)
class Graph:
    """A drawing of a pipeline's stages. In a notebook it shows as a picture; ``print`` gives it as Mermaid.

    Attributes:
        mermaid: a text that GitHub, GitLab and mkdocs draw, in a block of the language ``mermaid``.
        svg: a picture, for light and dark schemes.
        stages: how many there are.
    """

    mermaid: str
    svg: str
    stages: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file.

        Args:
            path: that ends with ".svg" for the picture, or with ".mmd" for Mermaid.

        Raises:
            ConfigError: it ends with something else.
        """
        kinds = {".svg": self.svg, ".mmd": self.mermaid}
        text = kinds.get(Path(path).suffix.lower())
        if text is None:
            raise ConfigError(
                f"graph().save(path) writes files that end with .svg or .mmd (Mermaid), got {shown(path)}"
            )
        Path(path).write_text(f"{text}\n", encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.mermaid

    def __repr__(self) -> str:
        many = f"{self.stages} stage{'s' * (self.stages != 1)}"
        return f'a drawing of {many}: save("pipeline.svg") writes it, print() gives it as Mermaid'


def graph(pipeline: Pipeline, counts: bool) -> Graph:
    """See ``Pipeline.graph``."""
    chain = chain_of(pipeline, counts)
    return Graph(mermaid(chain), svg(chain), len(chain.boxes))
