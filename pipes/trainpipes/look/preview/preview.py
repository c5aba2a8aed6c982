"""Several items: what ``show()`` returns."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import whole_number
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import DataError
from trainpipes.look.preview.as_html import LEGEND, html_of
from trainpipes.look.preview.as_text import legend, text_of
from trainpipes.look.preview.item_view import ItemView, item_view
from trainpipes.look.preview.known_ids import KnownIds, known_ids
from trainpipes.look.preview.structure import as_mapping
from trainpipes.tokenizers.load import load

__all__ = ["Preview", "preview", "show", "show_item"]

#: Columns of a text that goes to no terminal.
WIDTH = 100
#: Items, and rows of each, at most: nobody reads more.
MOST = 1000


class Preview:
    """Items of a pipeline for human eyes. Prints as text, with colours on a terminal that has some, and shows
    itself as tables in a notebook.

    Attributes:
        items: what is shown of each.
    """

    def __init__(self, items: Sequence[ItemView]) -> None:
        self.items = tuple(items)

    def __len__(self) -> int:
        return len(self.items)

    def text(self, *, width: int = WIDTH, color: bool = False) -> str:
        """The items as text.

        Args:
            width: columns of a line, about.
            color: mark by a terminal's escapes what is learnt, and not by brackets.
        """
        parts = [text_of(view, width, color) for view in self.items]
        told = legend(self.items, color)
        return "\n\n".join([told, *parts] if told else parts)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types: of each item its values, its tokens, and its text in pieces."""
        return {"items": [view.to_dict() for view in self.items]}

    def __repr__(self) -> str:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        if not terminal:
            return self.text()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return self.text(width=shutil.get_terminal_size().columns, color=not plain)

    def _repr_html_(self) -> str:
        marked = any(row.pieces for view in self.items for row in view.texts)
        return (LEGEND if marked else "") + "".join(map(html_of, self.items))


def preview(
    items: Iterable[Any],
    plan: Plan | None = None,
    *,
    is_batch: bool = True,
    rows: int = 4,
    first: int = 0,
) -> Preview:
    """Items that are there already for human eyes.

    Args:
        items: batches, or rows.
        plan: of the pipeline that they come from: it knows the tokenizer.
        is_batch: whether they are batches.
        rows: of a batch, how many are shown as text.
        first: number of the first one.
    """
    known = known_ids(plan)
    return Preview(
        [
            item_view(item, known, first + k, is_batch=is_batch, rows=rows)
            for k, item in enumerate(items)
        ]
    )


def show(session: Session, count: int, rows: int) -> Preview:
    """The next items of a pipeline for human eyes: ``Pipeline.show``.

    Args:
        session: the pipeline's.
        count: how many.
        rows: of a batch, how many are shown as text.
    """
    whole_number(count, 1, "show(n)", "items to show", most=MOST)
    whole_number(rows, 1, "show(rows)", "rows of a batch to show", most=MOST)
    plan = session.plan
    found = preview(islice(session.coming(), count), plan, is_batch=makes_batches(plan), rows=rows)
    if not len(found):
        raise DataError(
            "show() shows the first items of the next epoch, and that gives nothing: see explain() for what "
            "the stages make of the rows"
        )
    return found


def show_item(item: Any, *, tokenizer: Any = None, rows: int = 4) -> Preview:
    """A batch, or a row, for human eyes: names, types, shapes, the least and the greatest number, text with
    what is learnt marked, images as images. Prints as text, and shows itself as tables in a notebook.

    For items of any origin; ``pipe.show()`` and ``loader.show()`` know the tokenizer by themselves. Nothing
    is printed whole that is long, and of large tensors only the first rows are looked at.

    Args:
        item: a batch: a dict or tuple of tensors or arrays, a tensor, an Arrow table, a list of rows; else it
            is taken for a row.
        tokenizer: decodes token ids, as ``tokenize`` takes it; None to show them as numbers.
        rows: of a batch, how many are shown as text.

    >>> import torch, trainpipes as tp
    >>> tp.show({"input_ids": torch.tensor([[72, 105], [111, 107]])}, tokenizer="bytes")
    batch  dict of 1, 2 rows
      input_ids  tensor int64  [2, 2]  72 to 111
      input_ids: 4 tokens
      note: no labels beside the token ids: nothing says which of them are learnt
      row 0  Hi
      row 1  ok
    """
    whole_number(rows, 1, "show(rows)", "rows of a batch to show", most=MOST)
    if isinstance(item, pa.Table | pa.RecordBatch):
        table = item.slice(0, MOST)
        view = item_view(table.to_pylist(), KnownIds(), None, is_batch=True, rows=rows)
        kind = (
            f"{type(item).__name__} of {item.num_columns:,} column{'s' * (item.num_columns != 1)}"
        )
        return Preview([dataclasses.replace(view, kind=kind, rows=item.num_rows)])
    known = KnownIds()
    if tokenizer is not None:
        known.engines["input_ids"] = load(tokenizer)
    return Preview([item_view(item, known, None, is_batch=_is_batch(item), rows=rows)])


def _is_batch(item: Any) -> bool:
    """Whether an item that nobody knows holds several rows."""
    named = as_mapping(item)
    if named is not None:
        return any(map(_is_batch, named.values()))
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.ndim > 0
    if isinstance(item, tuple):
        return any(map(_is_batch, item))
    return isinstance(item, list) and bool(item) and isinstance(item[0], Mapping | tuple | list)


def makes_batches(plan: Plan) -> bool:
    """Whether the items of a plan are batches."""
    chain = plan.chain
    return chain.batch is not None or chain.opener.makes_batches
