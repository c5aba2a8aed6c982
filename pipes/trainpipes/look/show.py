"""Items of a pipeline for people to read: ``pipe.show()``, ``loader.show()`` and ``tp.show(batch)``."""

from __future__ import annotations

import dataclasses
import html
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import copied, require, whole_number
from trainpipes._internal.messages import WIDTH, Printed, folded, in_color, table, terminal_width
from trainpipes._internal.progress import counted
from trainpipes.engine.iterating.consumer import SERIAL, Consumer, RunOptions
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.record import is_pipeline_or_loader
from trainpipes.errors import DataError, StateError, escaped, shown
from trainpipes.interfaces.stage import aside
from trainpipes.look.decoded import KnownIds, Piece, TokenGrid, known_ids, pieces_of, token_grids
from trainpipes.look.values import (
    NAME,
    Picture,
    Sound,
    WithRows,
    as_mapping,
    cells_of,
    leaves,
    python_value,
    rows_of,
    small,
    sounds_of,
    strips_of,
    with_rows,
)
from trainpipes.order.layout import Topology
from trainpipes.state.cursor import is_count
from trainpipes.tokenizers.adapters import load


def state_at(iteration: IterationState, batches: int, epoch: int) -> dict[str, Any]:
    """The state after so many batches of each rank, in an epoch."""
    batches, epoch = copied(batches), copied(epoch)
    if not is_count(batches):
        raise StateError(f"state_at(batches_delivered) counts from 0, got {shown(batches)}")
    if not is_count(epoch):
        raise StateError(f"state_at(epoch) counts from 0, got {shown(epoch)}")
    plan, world = iteration.plan, iteration.ranks()[1]
    m = batches * world
    beyond = f"batches for each of {world} ranks, got {batches}"
    if plan.counts.known and m > plan.counts.batches_in_pass:
        most = int(plan.counts.batches_in_pass) // world
        raise StateError(f"state_at(batches_delivered): an epoch has {most} {beyond}")
    walked = 0 if plan.counted else m
    start = replace(iteration.start_of(epoch), m=m - walked)
    options = RunOptions(step=world if world > 1 else 0)  # ends where several ranks would
    walk = Consumer(plan, Topology(), start, options=options)
    with aside():
        for taken in counted(range(walked), "making the batches before it", walked, "batches"):
            try:
                next(walk)
            except StopIteration:
                walk.finish()
                said = f"state_at(batches_delivered): an epoch has {taken // world} {beyond}"
                raise StateError(said) from None
    return walk.state()


def peek(iteration: IterationState) -> Any:
    """The next item."""
    with aside():
        for item in coming(iteration):
            return item
    raise DataError(
        "peek() shows the first item of the next epoch, and that gives nothing: see explain() for "
        "what the stages make of the rows"
    )


def coming(iteration: IterationState, options: RunOptions = SERIAL) -> Iterator[Any]:
    """The next items."""
    position = iteration.upcoming()
    plan = iteration.plan_of(position)
    if plan.grows and not position.m:
        plan = iteration.make_plan(iteration.of_run())
    starts = [position]
    if position.m:  # there may be nothing left
        starts.append(iteration.start_of(iteration.passes.after(position.pass_number)))
    for start in starts:
        gave = False
        for item in Consumer(plan, iteration.topology(), start, options=options):
            gave = True
            yield item
        if gave:
            return


#: Items, and rows of each, at most: nobody reads more.
MOST = 1000
#: What the layouts of labels mean: see ``trainpipes.look.decoded``.
LAYOUTS = {
    "aligned": "the model shifts the labels",
    "masked": "labels are the tokens that were hidden",
    "own": "the targets are a text of their own",
    "mask": "a mask says which tokens are in the loss",
}
#: How each kind of piece is written, and its text in the legend.
MARKS = {
    "plain": ("{text}", ""),
    "loss": ("⟦{text}⟧", "in the loss"),
    "masked": ("⟦{text}→{truth}⟧", "in the loss: text hides label"),
    "document": (" ║ ", "another document begins"),
    "left_out": ("…{tokens:,}…", "tokens that are not printed"),
    "picture": ("‹{tokens:,} {text}›", "tokens of pictures"),
    "padding": ("‹{tokens:,} padding›", "padding, not printed"),
}
#: What has a color, and its color on a terminal and in a notebook.
COLORED = re.compile("⟦[^⟧]*⟧")
ON_TERMINAL, IN_NOTEBOOK = "\x1b[32m\\g<0>\x1b[0m", r'<span style="color: green">\g<0></span>'


# What is shown


@dataclass(frozen=True)
class ItemView:
    """What is shown of an item: its values as cells, and the token ids of some rows by column."""

    title: str
    kind: str
    rows: int | None
    values: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    texts: Mapping[str, Sequence[Sequence[Piece]]] = field(default_factory=dict)
    items: Sequence[ItemView] = ()
    pictures: Sequence[Sequence[Picture]] = ()
    strips: Sequence[Sequence[Picture]] = ()  # frames of clips, which a notebook shows
    sounds: Sequence[Sound] = ()  # which a notebook plays


class Preview(Printed):
    """Items of a pipeline for people to read. Prints as text, in color on a terminal and in a notebook.

    Attributes:
        items: the shown form of each.
    """

    def __init__(self, items: Sequence[ItemView]) -> None:
        self.items = tuple(items)

    def __len__(self) -> int:
        return len(self.items)

    def text(self, *, width: int = WIDTH) -> str:
        """The items as text, in lines of about so many columns."""
        legend = _legend(self.items)
        blocks = ["\n".join(folded(legend, width))] if legend else []
        return "\n\n".join([*blocks, *(_block(view, width) for view in self.items)])

    def __str__(self) -> str:
        at_terminal = sys.stdout is not None and sys.stdout.isatty()
        text = self.text(width=terminal_width() if at_terminal else WIDTH)
        return COLORED.sub(ON_TERMINAL, text) if at_terminal and in_color(sys.stdout) else text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        page = f"<pre>{html_of(self)}</pre>{''.join(_thumbnails(self.items))}"
        return {"text/plain": str(self), "text/html": page}


def html_of(preview: Preview, colored: str = IN_NOTEBOOK) -> str:
    """The text of a preview as HTML, to stand within ``pre``."""
    return COLORED.sub(colored, html.escape(preview.text()))


def _thumbnails(views: Sequence[ItemView]) -> Iterator[str]:
    for view in views:
        rows = [(f", row {row}", some) for row, some in enumerate(view.pictures)]
        others: list[Sequence[Picture | Sound]] = [*view.strips, *([s] for s in view.sounds)]
        for place, some in [*rows, *(("", other) for other in others)]:
            if some:
                images = " ".join(thumbnail.html for thumbnail in some)
                yield f"<div>{html.escape(view.title)}{place}: {images}</div>"
        yield from _thumbnails(view.items)


def show(item: Any, *, tokenizer: Any = None, rows: int = 4) -> Preview:
    """A batch, or a row, for people to read: names, types, shapes, the least and the greatest number, and
    token ids as text with the tokens in the loss marked. Long values are cut.

    ``pipe.show()`` and ``loader.show()`` know the tokenizer by themselves.

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
    way = "its own show() shows what comes next"
    require(not is_pipeline_or_loader(item), "show(item)", "a batch or a row", item, way)
    if isinstance(item, pa.Table | pa.RecordBatch):
        several = (len(item.schema.get_all_field_indices(name)) > 1 for name in item.schema.names)
        names = [
            f"{name} (column {k})" if of_one_name else name
            for k, (name, of_one_name) in enumerate(zip(item.schema.names, several, strict=True), 1)
        ]
        first = item.slice(0, min(rows, item.num_rows)).columns
        columns = [[python_value(scalar) for scalar in column] for column in first]
        some = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        view = _view(some, KnownIds(), "batch", is_batch=True, rows=rows)
        count = item.num_columns
        kind = f"{type(item).__name__} of {count:,} column{'s' * (count != 1)}"
        return Preview([dataclasses.replace(view, kind=kind, rows=item.num_rows)])
    known = KnownIds({} if tokenizer is None else {"input_ids": load(tokenizer)})
    is_batch = _is_batch(item)
    return Preview([_view(item, known, "batch" if is_batch else "row", is_batch, rows)])


def show_next(iteration: IterationState, count: int, rows: int) -> Preview:
    whole_number(count, 1, "show(n)", "items to show", most=MOST)
    whole_number(rows, 1, "show(rows)", "rows of a batch to show", most=MOST)
    plan, known = iteration.plan, known_ids(iteration.plan)
    is_batch = plan.chain.batch is not None or plan.chain.opener.traits.makes_batches
    title = "batch {:,}" if is_batch else "row {:,}"
    came: Iterator[WithRows]
    if known.pictures is None:
        came = (WithRows(item, ()) for item in coming(iteration))
    else:
        came = coming(iteration, RunOptions(unroll=with_rows))
    with aside():
        preview = Preview(
            [
                _view(located.item, known, title.format(k), is_batch, rows, located.rows)
                for k, located in enumerate(islice(came, count))
            ]
        )
    if not len(preview):
        raise DataError(
            "show() shows the first items of the next epoch, and that gives nothing: see explain() for what "
            "the stages make of the rows"
        )
    return preview


def _is_batch(item: Any) -> bool:
    values = [item] if isinstance(item, list) else [value for _, value in leaves(item)[0]]
    lists = (part[0] for part in values if isinstance(part, list) and part)
    arrays = (part for part in values if isinstance(part, torch.Tensor | np.ndarray))
    return any(isinstance(part, Mapping | tuple | list) for part in lists) or any(
        part.ndim for part in arrays
    )


# An item


def _view(
    item: Any, known: KnownIds, title: str, is_batch: bool, rows: int, made_of: Sequence[Any] = ()
) -> ItemView:
    kind = type(item).__name__
    if hasattr(item, "__len__") and (
        as_mapping(item) is not None or isinstance(item, list | tuple)
    ):
        kind += f" of {len(item):,}"
    if is_batch and isinstance(item, list) and item and as_mapping(item[0]) is not None:
        inner = (_view(row, known, f"row {k}", False, rows) for k, row in enumerate(item[:rows]))
        return ItemView(title, kind, len(item), items=tuple(inner))
    named, more = leaves(item, of_row=not is_batch)
    values, most = dict(named), rows if is_batch else 1
    grids = token_grids(values, known, of_row=not is_batch)
    texts = {
        escaped(grid.name, NAME): [pieces_of(grid, k) for k in range(min(most, len(grid.ids)))]
        for grid in grids
    }
    lines = ["…  and more values"] * more + [_share_line(grid) for grid in grids]
    lines += [f"note: {note}" for note in _notes(grids, values if is_batch else None)]
    rates = {name: known.rates.get(name.rpartition(".")[2]) for name, _ in named}
    cells = [cells_of(name, value, rates[name]) for name, value in named]
    heard = [(value, rate) for name, value in named if (rate := rates[name]) is not None]
    sounds = [sound for value, rate in heard for sound in sounds_of(value, rate, rows)]
    pictures: list[list[Picture]] = []
    if known.pictures is not None and made_of:
        pictures = [[*map(small, some)] for some in known.pictures.pictures(made_of)[:most]]
    count = rows_of(item) if is_batch else None
    strips = [strip for _, value in named for strip in strips_of(value, rows if is_batch else None)]
    return ItemView(
        title, kind, count, cells, lines, texts, pictures=pictures, strips=strips, sounds=sounds
    )


def _notes(grids: list[TokenGrid], batch: Mapping[str, Any] | None) -> Iterator[str]:
    for grid in grids:
        name = escaped(grid.name, NAME)
        if grid.in_loss is None:
            continue
        if on_padding := int(np.count_nonzero(grid.in_loss & ~grid.there)):
            yield f"{name}: {on_padding:,} labels on padding are in the loss: make them -100"
        if not grid.loss_count and grid.layout != "own":
            yield f"{name}: no token is in the loss"
    if batch is not None and grids and not any(w in n for n in batch for w in ("label", "target")):
        yield "no labels beside the token ids: nothing says which of them are in the loss"


# As text


def _block(view: ItemView, width: int) -> str:
    rows = "" if view.rows is None else f", {view.rows:,} row{'s' * (view.rows != 1)}"
    inside = [
        table(view.values, width=width - 2),
        *("\n".join(folded(line, width - 2)) for line in view.lines),
        table(_texts(view), width=width - 2),
        *(_block(inner, width - 2) for inner in view.items),
    ]
    there = max(map(len, view.texts.values()), default=len(view.items))
    if there and (left_out := (view.rows or 0) - there) > 0:
        inside.append(f"… and {left_out:,} more row{'s' * (left_out > 1)}")
    body = textwrap.indent("\n".join(filter(None, inside)), "  ")
    return f"{view.title}  {view.kind}{rows}\n{body}".rstrip("\n")


def _share_line(grid: TokenGrid) -> str:
    tokens = grid.ids.size - grid.padding
    parts = [f"{tokens:,} tokens"]
    if grid.in_loss is not None:
        share = f" ({grid.loss_count / tokens:.1%})" if tokens else ""
        parts = [f"{grid.loss_count:,} of {tokens:,} tokens in the loss{share}"]
    if grid.padding:
        share = f"{grid.padding / grid.ids.size:.1%}"
        parts.append(f"padding {grid.padding:,} of {grid.ids.size:,} cells ({share})")
    parts += [LAYOUTS[grid.layout]] if grid.layout else []
    return f"{escaped(grid.name, NAME)}: {'; '.join(parts)}"


def _texts(view: ItemView) -> list[list[str]]:
    texts = []
    for row in range(max(map(len, view.texts.values()), default=0)):
        title = [f"row {row}"] if view.rows is not None else []
        for name, rows in view.texts.items():
            if row < len(rows):
                named = [name] if len(view.texts) > 1 or not title else []
                texts.append([*title, *named, "".join(map(_marked, rows[row]))])
                title = [""] * len(title)
        if row < len(view.pictures) and (some := view.pictures[row]):
            named = [""] * (len(view.texts) > 1)
            said = f"{len(some):,} picture{'s' * (len(some) > 1)}: {', '.join(map(str, some))}"
            texts.append([*title, *named, f"{said} pixels"])
    return texts


def _marked(piece: Piece) -> str:
    return MARKS[piece.kind][0].format(**piece._asdict())


def _legend(views: Sequence[ItemView]) -> str:
    inner = [view for view in views for view in (view, *view.items)]
    rows = [row for view in inner for rows in view.texts.values() for row in rows]
    there = {piece.kind for row in rows for piece in row}
    return "   ".join(
        f"{_marked(Piece(kind, 'text', 9, 'label')).strip()} {meaning}"
        for kind, (_, meaning) in MARKS.items()
        if kind in there and meaning
    )
