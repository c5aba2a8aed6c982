"""Items of a pipeline for people to read: ``pipe.show()``, ``loader.show()`` and ``tp.show(batch)``.

An item becomes an ``ItemView``, plain data. Views become lines of styled text, which are the same on a
terminal, in a notebook and in a file: rich, where it is installed, adds the colors.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import whole_number
from trainpipes._internal.text import columns_of, escaped, shown
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import DataError
from trainpipes.look.decoded import (
    MISSING,
    KnownIds,
    Piece,
    TokenGrid,
    known_ids,
    number_grid,
    pieces_of,
    token_grids,
)
from trainpipes.look.values import NAME, Facts, as_mapping, facts_of, leaves
from trainpipes.tokenizers.load import load

#: Columns where no terminal says how many it has.
WIDTH = 100
#: Items, and rows of each, at most: nobody reads more.
MOST = 1000
#: What the layouts of labels mean: see ``trainpipes.look.decoded``.
LAYOUTS = {
    "aligned": "the model shifts the labels",
    "masked": "labels are the tokens that were hidden",
    "own": "the targets are a text of their own",
    "mask": "a mask says which tokens are in the loss",
    "numbers": "labels are shown as numbers",
}
#: How each kind of piece is written, how rich draws it, and what the legend says of it.
MARKS = {
    "plain": ("{text}", "", ""),
    "loss": ("⟦{text}⟧", "green underline", "in the loss"),
    "masked": ("⟦{text}→{truth}⟧", "green underline", "in the loss: text hides label"),
    "document": (" ║ ", "dim", "another document begins"),
    "left_out": ("…{tokens:,}…", "dim", "tokens that are not printed"),
    "padding": ("‹{tokens:,} padding›", "dim", "padding, not printed"),
}

#: A text with its style; and a line of these after an indent, which are wrapped with the same one.
Styled = tuple[str, str]
Line = tuple[str, Sequence[Styled]]


# What is shown


@dataclass(frozen=True)
class TokenCounts:
    """How much of a column of token ids is in the loss, and how much is padding.

    Attributes:
        name: of the column.
        layout: how labels stand to ids: see ``trainpipes.look.decoded``; "" where nothing says what is in the
            loss.
        cells: B * L.
        tokens: of these, those that are no padding.
        padding: the others.
        in_loss: targets of the loss; None where nothing says so.
    """

    name: str
    layout: str
    cells: int
    tokens: int
    padding: int
    in_loss: int | None


@dataclass(frozen=True)
class RowText:
    """One row of a column of token ids: its number in the item, the column, and its pieces in order."""

    row: int
    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ItemView:
    """What is shown of one item.

    Attributes:
        title: "batch 0", "row 3".
        kind: what the item is: "dict of 3", "tuple of 2", "Tensor".
        rows: in a batch; None where that cannot be known.
        values: what it is made of.
        more_values: whether it has more than are listed.
        tokens: counts of each column of token ids.
        texts: of its first rows, or of the row.
        items: its first rows, where it is a list of them.
        notes: what stands out.
    """

    title: str
    kind: str
    rows: int | None
    values: tuple[Facts, ...] = ()
    more_values: bool = False
    tokens: tuple[TokenCounts, ...] = ()
    texts: tuple[RowText, ...] = ()
    items: tuple[ItemView, ...] = ()
    notes: tuple[str, ...] = ()


class Preview:
    """Items of a pipeline for people to read. Prints as text; in color on a terminal and in a notebook, where
    rich is installed (``pip install rich``).

    Attributes:
        items: what is shown of each.
    """

    def __init__(self, items: Sequence[ItemView]) -> None:
        self.items = tuple(items)

    def __len__(self) -> int:
        return len(self.items)

    def text(self, *, width: int = WIDTH) -> str:
        """The items as text, in lines of about so many columns."""
        return "\n".join("".join(text for text, _ in line) for line in self._lines(width))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types: of each item its values, its tokens, and its text in pieces."""
        return {"items": [dataclasses.asdict(view) for view in self.items]}

    def __repr__(self) -> str:
        if sys.stdout is None or not sys.stdout.isatty():
            return self.text()
        width = shutil.get_terminal_size().columns
        drawn = self._drawn(width, force_terminal=True)
        return self.text(width=width) if drawn is None else drawn.file.getvalue().rstrip("\n")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        found = {"text/plain": repr(self)}
        drawn = self._drawn(WIDTH, record=True)
        if drawn is not None:
            code = "<pre>{code}</pre>"
            found["text/html"] = drawn.export_html(inline_styles=True, code_format=code)
        return found

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self._lines(options.max_width):
            yield Text.assemble(*line, no_wrap=True, overflow="ignore")

    def _drawn(self, width: int, **options: Any) -> Any:
        """A console of rich that holds the items; None where rich is not installed."""
        if find_spec("rich") is None:
            return None
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width, force_jupyter=False, **options)
        console.print(self, soft_wrap=True, highlight=False)
        return console

    def _lines(self, width: int) -> Iterator[list[Styled]]:
        """Lines of at most ``width`` columns, as far as that goes."""
        legend = _legend(self.items)
        blocks = [[("", legend)]] if legend else []
        for k, block in enumerate([*blocks, *map(_lines_of, self.items)]):
            yield from [[]] if k else []
            for indent, line in block:
                wide = columns_of(indent)
                for j, part in enumerate(_wrapped(line, max(20, width - wide))):
                    yield [(" " * wide if j else indent, ""), *part]


def show(item: Any, *, tokenizer: Any = None, rows: int = 4) -> Preview:
    """A batch, or a row, for people to read: names, types, shapes, the least and the greatest number, and
    token ids as text with the tokens in the loss marked.

    For items of any origin; ``pipe.show()`` and ``loader.show()`` know the tokenizer by themselves. Nothing
    is printed whole that is long, and of large tensors only the first rows are looked at.

    Args:
        item: a batch: a dict or tuple of tensors or arrays, a tensor, an Arrow table, a list of rows;
            anything else is shown as a row.
        tokenizer: decodes token ids, as ``tokenize`` takes it; None to show them as numbers.
        rows: of a batch, how many are shown as text.

    >>> import torch, trainpipes as tp
    >>> tp.show({"input_ids": torch.tensor([[72, 105], [111, 107]])}, tokenizer="bytes")
    batch  dict of 1, 2 rows
      input_ids  tensor int64  [2, 2]  72 to 111
      input_ids: 4 tokens
      note: no labels beside the token ids: nothing says which of them are in the loss
      row 0  Hi
      row 1  ok
    """
    whole_number(rows, 1, "show(rows)", "rows of a batch to show", most=MOST)
    if isinstance(item, pa.Table | pa.RecordBatch):
        view = _view(item.slice(0, rows).to_pylist(), KnownIds(), "batch", is_batch=True, rows=rows)
        columns = f"column{'s' * (item.num_columns != 1)}"
        kind = f"{type(item).__name__} of {item.num_columns:,} {columns}"
        return Preview([dataclasses.replace(view, kind=kind, rows=item.num_rows)])
    known = KnownIds({} if tokenizer is None else {"input_ids": load(tokenizer)})
    is_batch = _is_batch(item)
    return Preview([_view(item, known, "batch" if is_batch else "row", is_batch, rows)])


def show_next(session: Session, count: int, rows: int) -> Preview:
    """The next items of a pipeline: ``Pipeline.show``.

    Args:
        session: the pipeline's.
        count: how many.
        rows: of a batch, how many are shown as text.
    """
    whole_number(count, 1, "show(n)", "items to show", most=MOST)
    whole_number(rows, 1, "show(rows)", "rows of a batch to show", most=MOST)
    found = preview(islice(session.coming(), count), session.plan, rows=rows)
    if not len(found):
        raise DataError(
            "show() shows the first items of the next epoch, and that gives nothing: see explain() for what "
            "the stages make of the rows"
        )
    return found


def preview(items: Iterable[Any], plan: Plan, *, rows: int = 4, first: int = 0) -> Preview:
    """Items of the pipeline with that plan; the first one has the number ``first``."""
    known, is_batch = known_ids(plan), makes_batches(plan)
    word = "batch" if is_batch else "row"
    numbered = enumerate(items, first)
    return Preview([_view(item, known, f"{word} {k:,}", is_batch, rows) for k, item in numbered])


def makes_batches(plan: Plan) -> bool:
    """Whether the items of a plan are batches."""
    return plan.chain.batch is not None or plan.chain.opener.makes_batches


def _is_batch(item: Any) -> bool:
    """Whether an item of unknown origin holds several rows."""
    values = [item] if isinstance(item, list) else [value for _, value in leaves(item)[0]]
    return any(map(_holds_rows, values))


def _holds_rows(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping | tuple | list)
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


# An item


def _view(item: Any, known: KnownIds, title: str, is_batch: bool, rows: int) -> ItemView:
    kind = type(item).__name__
    if hasattr(item, "__len__") and (
        as_mapping(item) is not None or isinstance(item, list | tuple)
    ):
        kind += f" of {len(item):,}"
    if is_batch and isinstance(item, list) and item and as_mapping(item[0]) is not None:
        inner = (_view(row, known, f"row {k}", False, rows) for k, row in enumerate(item[:rows]))
        return ItemView(title, kind, len(item), items=tuple(inner))
    found, more = leaves(item, of_row=not is_batch)
    values = dict(found)
    grids = token_grids(values, known, of_row=not is_batch)
    return ItemView(
        title,
        kind,
        _rows(values, grids) if is_batch else None,
        tuple(_with_classes(facts_of(name, value), value, known) for name, value in found),
        more,
        tuple(_counts(grid) for grid in grids),
        tuple(
            RowText(k, escaped(grid.name, NAME), tuple(pieces_of(grid, k)))
            for k in range(rows if is_batch else 1)
            for grid in grids
            if k < len(grid.ids)
        ),
        notes=tuple(_notes(grids, values if is_batch else None)),
    )


def _rows(values: Mapping[str, Any], grids: list[TokenGrid]) -> int | None:
    """B: of token ids, else of the first value that has two dimensions or is a list, else of a vector."""
    vector = None
    for value in [*(values[grid.name] for grid in grids), *values.values()]:
        if isinstance(value, list):
            return len(value)
        if isinstance(value, torch.Tensor) and value.is_nested:
            return int(value.size(0))
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and len(shape) > 1:
            return int(shape[0])
        if isinstance(shape, tuple) and shape and vector is None:
            vector = int(shape[0])
    return vector


def _with_classes(facts: Facts, value: Any, known: KnownIds) -> Facts:
    """Of class numbers, the names of the first ones."""
    names = known.classes.get(facts.name.rpartition(".")[2])
    numbers = number_grid([value] if isinstance(value, int) else value) if names else None
    if not names or numbers is None:
        return facts
    some = numbers[numbers != MISSING][:9].tolist()
    text = ", ".join(escaped(names.get(one, shown(one)), 40) for one in some[:8])
    return dataclasses.replace(facts, text=text + (", …" if len(some) > 8 else ""))


def _counts(grid: TokenGrid) -> TokenCounts:
    in_loss = None if grid.in_loss is None else grid.loss_count
    name, cells = escaped(grid.name, NAME), int(grid.ids.size)
    return TokenCounts(name, grid.layout, cells, grid.tokens, grid.padding, in_loss)


def _notes(grids: list[TokenGrid], batch: Mapping[str, Any] | None) -> Iterator[str]:
    """What stands out: of a row, nothing about what it lacks."""
    for grid in grids:
        name = escaped(grid.name, NAME)
        if grid.loss_on_padding:
            yield f"{name}: {grid.loss_on_padding:,} labels on padding are in the loss: make them -100"
        if grid.in_loss is not None and not grid.loss_count and grid.layout != "own":
            yield f"{name}: no token is in the loss"
    if batch is not None and grids and not any(w in n for n in batch for w in ("label", "target")):
        yield "no labels beside the token ids: nothing says which of them are in the loss"


# As lines


def _lines_of(view: ItemView) -> Iterator[Line]:
    """An item as lines that are as long as they are."""
    rows = "" if view.rows is None else f", {view.rows:,} row{'s' * (view.rows != 1)}"
    yield "", [(view.title, "bold"), (f"  {view.kind}{rows}", "")]
    yield from _table(view.values)
    plain = ["…  and more values"] if view.more_values else []
    plain += [_share_line(counts) for counts in view.tokens]
    yield from (("  ", [(text, "")]) for text in [*plain, *(f"note: {n}" for n in view.notes)])
    yield from _texts(view)
    for inner in view.items:
        yield from ((f"  {indent}", line) for indent, line in _lines_of(inner))
    left_out = (view.rows or 0) - len({one.row for one in view.texts} or view.items)
    if left_out > 0 and (view.texts or view.items):
        yield "  ", [(f"… and {left_out:,} more row{'s' * (left_out > 1)}", "")]


def _table(values: Sequence[Facts]) -> Iterator[Line]:
    cells = []
    for value in values:
        shape = "" if value.shape is None else f"[{', '.join(f'{n:,}' for n in value.shape)}]"
        cells.append((value.name or "·", value.type, shape))
    sizes = [min(max(columns_of(cell[k]) for cell in cells), 40) for k in range(3)] if cells else []
    for value, cell in zip(values, cells, strict=True):
        padded = [c + " " * (size - columns_of(c)) for c, size in zip(cell, sizes, strict=True)]
        span = "" if value.min is None else f"{value.min} to {value.max}"
        text = "  ".join(part for part in (span, value.text) if part)
        start = f"  {'  '.join(padded)}"
        yield f"{start}  " if text else start.rstrip(), [(text, "")]


def _share_line(counts: TokenCounts) -> str:
    """How much of a column of tokens is in the loss, and how much is padding."""
    parts = [f"{counts.tokens:,} tokens"]
    if counts.in_loss is not None:
        share = f" ({counts.in_loss / counts.tokens:.1%})" if counts.tokens else ""
        parts = [f"{counts.in_loss:,} of {counts.tokens:,} tokens in the loss{share}"]
    if counts.padding:
        share = f"{counts.padding / counts.cells:.1%}"
        parts.append(f"padding {counts.padding:,} of {counts.cells:,} cells ({share})")
    parts += [LAYOUTS[counts.layout]] if counts.layout else []
    return f"{counts.name}: {'; '.join(parts)}"


def _texts(view: ItemView) -> Iterator[Line]:
    wide = max((columns_of(one.name) for one in view.texts), default=0)
    for row, group in groupby(view.texts, lambda one: one.row):
        title = f"row {row}  " if view.rows is not None else ""
        for one in group:
            name = f"{one.name}{' ' * (wide - columns_of(one.name))}  "
            named = len(view.tokens) > 1 or not title.strip()
            yield f"  {title}{name if named else ''}", [_marked(piece) for piece in one.pieces]
            title = " " * len(title)


def _marked(piece: Piece) -> Styled:
    mark, style, _ = MARKS[piece.kind]
    return mark.format(**piece._asdict()), style


def _legend(views: Sequence[ItemView]) -> list[Styled]:
    """What the marks mean, of those that are there."""
    inner = [one for view in views for one in (view, *view.items)]
    there = {piece.kind for view in inner for one in view.texts for piece in one.pieces}
    found: list[Styled] = []
    for kind, (_, style, meaning) in MARKS.items():
        if kind in there and meaning:
            text, _ = _marked(Piece(kind, "text", 9, "label"))
            found += [("   " if found else "", ""), (text.strip(), style), (f" {meaning}", "")]
    return found


def _wrapped(line: Sequence[Styled], room: int) -> list[list[Styled]]:
    """A line in lines of at most so many columns, cut before words, and within words that are longer."""
    lines: list[list[Styled]] = [[]]
    left = room
    for text, style in line:
        for word in re.findall(r"\S+\s?|\s+", text):
            step = room if columns_of(word) <= room or word.isascii() else room // 2
            for part in (word[k : k + step] for k in range(0, len(word), step)):
                if columns_of(part.rstrip()) > left:
                    lines.append([])
                    left = room
                lines[-1].append((part, style))
                left -= columns_of(part)
    return [[*rest, (last.rstrip(), style)] for *rest, (last, style) in filter(None, lines)] or [[]]
