"""All that is shown of one item: its values, its tokens as text, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainpipes._internal.shown import shown
from trainpipes.look.preview.facts import Facts, facts_of
from trainpipes.look.preview.images import pictures
from trainpipes.look.preview.known_ids import KnownIds
from trainpipes.look.preview.legible import legible
from trainpipes.look.preview.pieces import RowOfTokens, row_of_tokens
from trainpipes.look.preview.structure import as_mapping, leaves
from trainpipes.look.preview.token_grids import TokenGrid, token_grids

__all__ = ["ItemView", "TokenCounts", "item_view"]


@dataclass(frozen=True)
class TokenCounts:
    """How much of a column of token ids is learnt, and how much is padding.

    Attributes:
        name: of the column.
        layout: how targets stand to ids: see ``targets``; "" where nothing says what is learnt.
        cells: B * L.
        tokens: of these, those that are no padding.
        learnt: targets of the loss; None where nothing says so.
    """

    name: str
    layout: str
    cells: int
    tokens: int
    learnt: int | None

    @property
    def padding(self) -> int:
        return self.cells - self.tokens

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "layout": self.layout or None, "cells": self.cells, "tokens": self.tokens,
            "padding": self.padding, "learnt": self.learnt,
        }  # fmt: skip


@dataclass(frozen=True)
class ItemView:
    """What is shown of one item.

    Attributes:
        title: "batch 0", "row 3".
        kind: what the item is: "dict of 3", "tuple of 2", "tensor".
        rows: in a batch; None where that cannot be told.
        values: what it is made of.
        more: whether it has more values than are listed.
        counts: of each column of token ids.
        texts: of its first rows, or of the row.
        inner: its first rows, where it is a list of them.
        notes: what stands out.
        pictures: small ones of images, by the name of the value, PNG in base64.
    """

    title: str
    kind: str
    rows: int | None
    values: tuple[Facts, ...]
    more: bool = False
    counts: tuple[TokenCounts, ...] = ()
    texts: tuple[RowOfTokens, ...] = ()
    inner: tuple[ItemView, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: Mapping[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title, "kind": self.kind, "rows": self.rows,
            "values": [value.to_dict() for value in self.values], "more_values": self.more,
            "tokens": [counts.to_dict() for counts in self.counts],
            "texts": [row.to_dict() for row in self.texts],
            "items": [view.to_dict() for view in self.inner], "notes": list(self.notes),
        }  # fmt: skip


def item_view(
    item: Any, known: KnownIds, number: int | None, *, is_batch: bool, rows: int = 4, name: str = ""
) -> ItemView:
    """What is to be shown of an item.

    Args:
        item: as the pipeline gives it.
        known: what the pipeline says of its columns.
        number: of the item, for the title; None for an item by itself.
        is_batch: whether it is a batch, and not a row.
        rows: of a batch, how many are shown as text.
        name: what the title calls it, if not "batch" or "row".
    """
    title = name or ("batch" if is_batch else "row")
    if number is not None:
        title += f" {number:,}"
    kind = _kind(item)
    if is_batch and _is_list_of_rows(item):
        inner = tuple(item_view(row, known, k, is_batch=False) for k, row in enumerate(item[:rows]))
        return ItemView(title, kind, len(item), (), inner=inner)
    found, more = leaves(item, of_row=not is_batch)
    values = dict(found)
    grids = token_grids(values, known, of_row=not is_batch)
    count = _rows(values, grids) if is_batch else None
    texts = [
        row_of_tokens(grid, k)
        for k in range(rows if is_batch else 1)
        for grid in grids
        if k < len(grid.ids)
    ]
    small = {key: pictures(key, value) for key, value in values.items()}
    return ItemView(
        title, kind, count,
        tuple(_with_class(facts_of(key, value), value, known) for key, value in found),
        more,
        tuple(_counts(grid) for grid in grids),
        tuple(texts),
        notes=tuple(_notes(grids, values if is_batch else None)),
        pictures={legible(key, 80): found for key, found in small.items() if found},
    )  # fmt: skip


def _kind(item: Any) -> str:
    named = as_mapping(item)
    kind = type(item).__name__
    several = named is not None or isinstance(item, list | tuple)
    return f"{kind} of {len(item):,}" if several and hasattr(item, "__len__") else kind


def _is_list_of_rows(item: Any) -> bool:
    """Whether a batch is a list of rows, as ``batch()`` gives where nothing collates them."""
    return isinstance(item, list) and bool(item) and as_mapping(item[0]) is not None


def _rows(values: Mapping[str, Any], grids: list[TokenGrid]) -> int | None:
    """B."""
    for value in [*(values[grid.name] for grid in grids), *values.values()]:
        shape = _shape(value)
        if shape is not None and len(shape) > 1:
            return int(shape[0])
        if isinstance(value, list):
            return len(value)
    return next(
        (int(shape[0]) for shape in map(_shape, values.values()) if shape and len(shape) == 1), None
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array; of a nested tensor, B and as many dimensions as it has."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return (value.size(0), *[-1] * (value.ndim - 1))
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _with_class(facts: Facts, value: Any, known: KnownIds) -> Facts:
    """Of classes, the names of the first ones."""
    names = known.classes.get(facts.name.rpartition(".")[2])
    if not names:
        return facts
    numbers = value.tolist() if getattr(value, "ndim", None) == 1 else value
    some = numbers[:8] if isinstance(numbers, list) else [numbers]
    if not all(isinstance(one, int) for one in some):
        return facts
    text = ", ".join(legible(names.get(one, shown(one)), 40) for one in some)
    more = ", …" if isinstance(numbers, list) and len(numbers) > len(some) else ""
    return Facts(facts.name, facts.type, facts.shape, facts.low, facts.high, text + more)


def _counts(grid: TokenGrid) -> TokenCounts:
    learnt = None if grid.learnt is None else grid.learnt_count
    return TokenCounts(legible(grid.name, 80), grid.layout, int(grid.ids.size), grid.tokens, learnt)


def _notes(grids: list[TokenGrid], batch: Mapping[str, Any] | None) -> list[str]:
    """What stands out: of a row, nothing about what it lacks."""
    found = []
    for grid in grids:
        name = legible(grid.name, 80)
        if grid.learnt_padding:
            found.append(
                f"{name}: {grid.learnt_padding:,} targets are on padding, and the loss counts them: labels "
                "are -100 there"
            )
        if grid.learnt is not None and not grid.learnt_count and grid.layout != "own":
            found.append(f"{name}: no token is learnt")
    told = any(word in name for name in batch or () for word in ("label", "target"))
    if batch is not None and grids and not told:
        found.append("no labels beside the token ids: nothing says which of them are learnt")
    return found
