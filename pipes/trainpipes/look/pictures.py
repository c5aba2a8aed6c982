"""The pictures of a batch, which hold no place of their own in it: their sizes, and small ones to look at."""

from __future__ import annotations

import base64
import html
from collections.abc import MutableSequence, Sequence
from io import BytesIO
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from trainpipes.columns.lazy_batches import LazyBatches
from trainpipes.columns.run import Run

#: Pixels of a side of a small picture.
SIDE = 96


@runtime_checkable
class MakesPictures(Protocol):
    """A stage that makes batches of token ids and pictures."""

    @property
    def picture_token(self) -> int | None:
        """The token that stands for a part of a picture."""

    def pictures(self, rows: Sequence[Any]) -> list[list[Any]]:
        """Pillow's images in each row of the batch that is made of these rows."""


class Picture(NamedTuple):
    """A picture's size, and a small one as PNG."""

    width: int
    height: int
    png: bytes

    def __str__(self) -> str:
        return f"{self.width:,} x {self.height:,}"

    @property
    def html(self) -> str:
        data = base64.b64encode(self.png).decode("ascii")
        return f'<img src="data:image/png;base64,{data}" title="{html.escape(str(self))}">'


class WithRows(NamedTuple):
    """An item, and the rows that it was made of."""

    item: Any
    rows: Sequence[Any]


def with_rows(run: Run) -> MutableSequence[Any]:
    items, block, bounds = run.unroll(), run.block, run.bounds
    if bounds is None:
        bounds = np.arange(len(items) + 1, dtype=np.int64)

    def known(k: int) -> WithRows:
        first, stop = int(bounds[k]), int(bounds[k + 1])
        return WithRows(items[k], list(block.slice(first, stop - first).rows()))

    return LazyBatches(known, len(items))


def small(picture: Any) -> Picture:
    width, height = picture.size
    picture = picture.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    out = BytesIO()
    picture.save(out, "PNG")
    return Picture(width, height, out.getvalue())
