"""A row of tokens as text: in pieces, each of tokens that are the same to the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from trainpipes.look.preview.grids import Array
from trainpipes.look.preview.legible import legible
from trainpipes.look.preview.token_grids import TokenGrid
from trainpipes.tokenizers.engine import Engine

__all__ = ["Kind", "Piece", "RowOfTokens", "row_of_tokens"]

Kind = Literal["plain", "learnt", "document", "left_out", "padding"]

#: Tokens of a row that are shown, and of one piece; what is left out is counted.
ROW, PIECE = 400, 120
#: So few are not left out: to say so would take as much room.
SPARED = 16


@dataclass(frozen=True)
class Piece:
    """Some tokens that stand side by side.

    Attributes:
        kind: "plain", "learnt", "document" (another one begins here), "left_out" or "padding", of which
            there is a number and no text.
        text: of the tokens, as it is fit for a terminal.
        tokens: how many.
        truth: the text that the model is to guess, where it is another one.
    """

    kind: Kind
    text: str = ""
    tokens: int = 0
    truth: str | None = None

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "tokens": self.tokens}
        if self.kind in ("plain", "learnt"):
            found["text"] = self.text
        return found if self.truth is None else {**found, "truth": self.truth}


@dataclass(frozen=True)
class RowOfTokens:
    """One row of a column of token ids.

    Attributes:
        row: its number in the item.
        name: of the column.
        pieces: in order.
        documents: how many it holds.
    """

    row: int
    name: str
    pieces: tuple[Piece, ...]
    documents: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row, "name": self.name, "documents": self.documents,
            "pieces": [piece.to_dict() for piece in self.pieces],
        }  # fmt: skip


def row_of_tokens(grid: TokenGrid, row: int, most: int = ROW) -> RowOfTokens:
    """A row of a column, of which at most so many tokens are decoded: the start and the end of each piece,
    piece after piece."""
    starts = None if grid.starts is None else grid.starts[row]
    documents = 1 if starts is None else 1 + int(np.count_nonzero(starts))
    pieces = list(_pieces(grid, row, most))
    beyond = -1 if grid.beyond is None else int(grid.beyond[row])
    if beyond >= 0:
        place = len(pieces) - (bool(pieces) and pieces[-1].kind == "padding")
        pieces.insert(place, Piece("learnt", _decoded(grid.engine, [beyond]), 1))
    return RowOfTokens(row, grid.name, tuple(pieces), documents)


def _pieces(grid: TokenGrid, row: int, most: int) -> Iterator[Piece]:
    ids, there = grid.ids[row], grid.there[row]
    learnt = np.zeros(len(ids), dtype=np.bool_) if grid.learnt is None else grid.learnt[row]
    starts = np.zeros(len(ids), dtype=np.bool_) if grid.starts is None else grid.starts[row]
    # Tokens that are hidden have each a truth of their own.
    alone = learnt if grid.truth is not None else np.zeros(len(ids), dtype=np.bool_)
    kind = there.astype(np.int8) + learnt  # 0 padding; 1 a token or a target on padding, 2 both
    kind[learnt] = 2
    cuts = np.ones(len(ids), dtype=np.bool_)
    cuts[1:] = (kind[1:] != kind[:-1]) | starts[1:] | alone[1:] | alone[:-1]
    edges = [*np.flatnonzero(cuts).tolist(), len(ids)] if len(ids) else []
    left = most
    for k, (start, stop) in enumerate(pairwise(edges)):
        if starts[start]:
            yield Piece("document")
        if not kind[start]:
            yield Piece("padding", tokens=stop - start)
            continue
        if left <= 0 and stop < len(ids):
            yield from _rest(there[start:])
            return
        share = min(PIECE, max(left, 16))
        share = stop - start if stop - start <= share + SPARED else share
        left -= share
        name: Kind = "learnt" if kind[start] == 2 else "plain"
        truth = None
        if grid.truth is not None and name == "learnt":
            truth = _truth(grid, int(ids[start]), int(grid.truth[row, start]))
        context = max(0, start - 8) if k else 0
        yield from _shown(grid.engine, ids, (context, start, stop), share, name, truth)


def _rest(there: Array) -> Iterator[Piece]:
    """What comes after as much as is shown."""
    tokens = int(np.count_nonzero(there))
    yield Piece("left_out", tokens=tokens)
    if tokens < len(there):
        yield Piece("padding", tokens=len(there) - tokens)


def _truth(grid: TokenGrid, token: int, label: int) -> str | None:
    if grid.layout == "classes":
        return str(label)
    return None if token == label else _decoded(grid.engine, [label])


def _shown(
    engine: Engine | None,
    ids: Array,
    where: tuple[int, int, int],
    share: int,
    kind: Kind,
    truth: str | None,
) -> Iterator[Piece]:
    """Tokens as one piece; of many, their start, how many are left out, and their end."""
    context, start, stop = where
    if stop - start <= share:
        yield Piece(kind, _between(engine, ids, context, start, stop), stop - start, truth)
        return
    first = share - share // 2
    yield Piece(kind, _between(engine, ids, context, start, start + first), first)
    yield Piece("left_out", tokens=stop - start - share)
    rest = stop - share // 2
    yield Piece(kind, _between(engine, ids, max(context, rest - 8), rest, stop), stop - rest)


def _between(engine: Engine | None, ids: Array, context: int, start: int, stop: int) -> str:
    """The text of tokens ``start`` to ``stop``, as they stand after those before them: a space that belongs
    between them is there, and a character that both have a part of is not lost."""
    whole = _raw(engine, ids[context:stop].tolist())
    before = _raw(engine, ids[context:start].tolist()) if start > context else ""
    if whole is None or before is None:
        return _numbers(ids[start:stop].tolist())
    same = next(
        (k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)
    )
    return legible(whole[same:])


def _raw(engine: Engine | None, ids: list[int]) -> str | None:
    return None if engine is None else engine.decode(ids)


def _decoded(engine: Engine | None, ids: Sequence[int]) -> str:
    found = _raw(engine, list(ids))
    return _numbers(ids) if found is None else legible(found)


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
