from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import Function, IntArray, is_name, repeated, require
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import Array, is_text
from trainpipes.columns.block import BadCell, Block, Part, Piece
from trainpipes.columns.columns import with_numbers
from trainpipes.columns.python_values import python_rows
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows, batches_of
from trainpipes.errors import ConfigError, DataError
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.stage import Stage
from trainpipes.stages.columns import CollatingStage, columns_as, columns_of, taken, unbatched
from trainpipes.stages.pack import kept_columns
from trainpipes.stages.stacking import (
    Maker,
    as_floats,
    column_batches,
    joined_batches,
    stacked,
    stacked_columns,
    unfit,
)


@dataclass(frozen=True)
class FlatLists:
    """The lists of a column, in turn: ``values`` and where each begins, int64 ``[rows + 1]``.

    ``offsets_name`` is the name of the offsets in a batch, or None where another column gives them;
    ``with_end``: they end with the number of values.
    """

    values: Array
    offsets: IntArray
    offsets_name: str | None
    with_end: bool

    def cut(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """What a batch of the rows ``start`` to ``stop`` has of it."""
        edges = self.offsets[start : stop + 1]
        tensors = {name: torch.from_numpy(self.values[edges[0] : edges[-1]].copy())}
        if self.offsets_name is not None:
            begins = edges if self.with_end else edges[:-1]
            tensors[self.offsets_name] = torch.from_numpy(begins - edges[0])
        return tensors


def dtype_of_floats(value: Any, option: str) -> None:
    known = {torch.float16, torch.float32, torch.float64}
    require(value in known, option, "torch.float16, torch.float32 or torch.float64", value)


class Collate(CollatingStage, versioned="fn"):
    """Collate the rows of each batch with a function, or with torch's ``default_collate``.

    ``pad_collate`` pads rows of different lengths. A ``map`` between ``batch`` and this stage may return
    a list of other rows, as one that decodes pictures once rows are in buckets.

    Without a function, columns of numbers become tensors ``[B]``: integers int64, floats float64, bools
    bool; decimals float64, dates int64 days since 1970, times, timestamps and durations int64 of their
    unit. Texts and bytes come as lists.

    Args:
        fn: function of a batch. Left out, ``default_collate``: arrays of the same shape become tensors
            ``[B, ...]``; and, beyond that, lists of n such arrays ``[B, n, ...]``.
        format: form of the function's argument: "rows", a list as in ``DataLoader``; or the columns as
            "arrow", "numpy" or "torch" (see ``map_batches``).
        version: names the function in checkpoints; see ``map``.
        ragged: "offsets" makes two tensors of each column x of lists of numbers, as ``EmbeddingBag``
            takes them: "x" holds the values of all rows (integers as int64, float32 and float64 as
            float32), "x_offsets" where each row begins in them, int64 ``[B]``. With "offsets_and_end"
            the offsets are ``[B + 1]``, for ``include_last_offset=True``.
        weights: with ``ragged``, a dict of columns and the columns of their weights, which have as many
            numbers in each row and no offsets of their own: ``EmbeddingBag``'s ``per_sample_weights``.
        dtype: a dtype of all tensors of floats, such as ``torch.float32``.

    Raises:
        DataError: without ``fn``: a null, rows of different shapes, or values that make no tensor.
        SchemaError: with ``ragged``, a column holds lists of something else than numbers.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: [(1, 0.5), (2, 1.5)]).batch(2).collate())
    [[tensor([1, 2]), tensor([0.5000, 1.5000], dtype=torch.float64)]]
    >>> rows = tp.from_dataset([{"items": [7, 8]}, {"items": []}, {"items": [9]}])
    >>> rows.batch(3).collate(ragged="offsets").peek()
    {'items': tensor([7, 8, 9]), 'items_offsets': tensor([0, 2, 2])}
    """

    fn: Function | None = None
    _: KW_ONLY
    format: Literal["rows", "arrow", "numpy", "torch"] = "rows"
    version: str | None = None
    ragged: Literal["offsets", "offsets_and_end"] | None = None
    weights: Mapping[str, str] | None = None
    dtype: Annotated[torch.dtype, dtype_of_floats] | None = None

    #: Columns of lists that ``pack`` keeps.
    _kept: ClassVar[Collection[str]] = ()

    def check(self) -> None:
        for option in ("ragged", "dtype"):
            alone = self.options[option] is None or (self.fn is None and self.format == "rows")
            self._require(alone, option, "left out beside a function or a format")
        self._require(self.weights is None or self.ragged, "weights", "given with ragged")
        rule = 'a dict of columns and their weights such as {"items": "ratings"}'
        pairs = self.weights.items() if isinstance(self.weights, Mapping) else ()
        names = [name for pair in pairs for name in pair]
        apart = all(map(is_name, names)) and not repeated(names)
        self._require(self.weights is None or (names and apart), "weights", rule)

    def _resolve(self, below: Sequence[Stage]) -> Self:
        return super()._resolve(below)._resolved(_kept=kept_columns(below))

    def _traits(self) -> dict[str, Any]:
        takes = "columns" if self.format != "rows" or self.ragged is not None else "rows"
        return {"takes": takes, "per_row": self.fn is not None}

    @cached_property
    def _floats(self) -> np.dtype[Any] | None:
        return (
            None
            if self.dtype is None
            else torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype
        )

    def process(self, run: Run) -> Run:
        self._refuse_collated(run)
        if self.format == "rows" and self.ragged is None:
            if self.fn is not None:
                return run.with_items(read_columns.each(self, self.fn, run))
            if run.items is not None:
                return run.with_items(self._collated(run))
            if run.block.has_columns:
                run = run.with_block(run.block.with_columns(with_numbers))
            if run.bounds is not None and run.block.of_kind(TensorRows):
                batches = batches_of(part.cut for part in run.block.parts(run.bounds))
                return run.with_items(self._cast(batches, run))
            if run.bounds is not None and run.block.has_columns:
                with suppress(Exception):  # whose row is looked for below
                    parts = run.block.parts(run.bounds)
                    return run.with_items(stacked_columns(parts, self._kept, self._floats))
            return run.with_items(self._collated(run))
        if run.bounds is None:
            raise ConfigError(f"{self} works on batches: put .batch(n) before it")
        if run.items is not None:
            got = "lists of Python rows, which a function made of the batches"
            left = "ragged" if self.ragged else "format"
            way = f"put that function before batch(), or leave {left} out"
            raise ConfigError(f"{self} takes columns, got {got}: {way}")
        if self.ragged is not None:
            block = columns_of(run.block, self).with_columns(with_numbers)
            return run.with_items(self._of_types(run.with_block(block), run.bounds))
        cuts = pairwise(run.bounds.tolist())
        return run.with_items([self._of_columns(run.block.slice(a, b)) for a, b in cuts])

    def _collated(self, run: Run) -> list[Any]:
        items: list[Any] = []
        for rows in rows_of_batches(run):
            if not isinstance(rows, list | tuple):
                raise unbatched(self, rows)
            try:
                items.append(stacked(rows))
            except Exception as error:
                bad, ids = unfit(rows), run.row_ids(len(items))
                row = ids[bad.row or 0] if len(ids) == len(rows) else ids[0]
                raise read_columns.at_row(f"{self}: {bad}", self, row) from error
        return list(self._cast(items, run))

    def _cast(self, batches: MutableSequence[Any], run: Run) -> MutableSequence[Any]:
        """The batches of a run with floats of ``dtype``."""
        if self._floats is None:
            return batches
        items: list[Any] = []
        for number, batch in enumerate(batches):
            try:
                items.append(as_floats(batch, self._floats))
            except BadCell as bad:
                ids = run.row_ids(number)
                if isinstance(batch, Mapping):
                    for name, values in batch.items():
                        with read_columns.naming(name, self, ids):
                            as_floats(values, self._floats)
                raise read_columns.at_row(f"{self}: a row {bad}", self, ids[bad.row or 0]) from None
        return items

    def _of_types(self, run: Run, bounds: IntArray) -> MutableSequence[Any]:
        makers: list[Maker] = []
        ids = run.block.ids
        try:
            for part in run.block.parts(bounds):
                makers.append(self._part_of_types(part, ids))
                ids = ids[part.bounds[-1] :]
            return joined_batches(makers)
        except DataError:
            raise
        except Exception:  # of a column without lists, whose row is looked for
            self._collated(run.with_block(run.block.with_columns(without_lists)))
            raise

    def _part_of_types(self, part: Part, ids: IntArray) -> Maker:
        table: Any = part.data
        ragged = ragged_names(table)
        if not ragged and not self.weights:
            return self._even(part, ids)
        names, edges = table.column_names, part.bounds.tolist()
        need_columns(names, [name for pair in (self.weights or {}).items() for name in pair], self)
        gathered: Any = Piece(table.select(ragged), part.index).gathered()
        flat: dict[str, FlatLists] = {}
        for name in gathered.column_names:
            with read_columns.naming(name, self, ids):
                flat[name] = self._flat(name, gathered[name], names)
        self._check_weights(flat, ids)
        rest = Part(table.drop_columns(ragged) if ragged else table, part.index, part.bounds)
        make_rest, count, nbytes = self._even(rest, ids)

        def make(k: int) -> dict[str, Any]:
            even, batch = make_rest(k), dict[str, Any]()
            for name in names:
                lists = flat.get(name)
                values = None if lists is None else lists.cut(name, edges[k], edges[k + 1])
                batch.update({name: even[name]} if values is None else values)
            return batch

        return make, count, nbytes + sum(lists.values.nbytes for lists in flat.values())

    def _even(self, part: Part, ids: IntArray) -> Maker:
        """The batches of columns without lists."""
        try:
            return column_batches(part, self._kept, self._floats)
        except BadCell:  # whose column is looked for
            for name in part.data.column_names:  # type: ignore[union-attr]
                with read_columns.naming(name, self, ids):
                    column = part.data.select([name])  # type: ignore[union-attr]
                    column_batches(Part(column, part.index, part.bounds), self._kept, self._floats)
            raise

    def _flat(self, name: str, column: pa.ChunkedArray, names: Collection[str]) -> FlatLists:
        lists = read_columns.of_arrow(column, name)
        if not isinstance(lists, read_columns.Ragged) or lists.values.ndim > 1:
            way = "make numbers of them by with_columns(), or leave the column out with select()"
            if is_text(column.type.value_type):
                way = "encode_categories() makes ids of texts"
            rule = f"must hold lists of numbers, got {column.type}"
            raise BadCell(None, f"{rule}: {way}")
        stored = lists.values.dtype
        dtype: np.dtype[Any] = np.dtype(np.int64) if stored.kind in "iu" else stored
        if stored.kind == "f":
            dtype = self._floats or (np.dtype(np.float32) if stored == np.float64 else stored)
        read_columns.check_fit(
            lists.values, dtype, lists.lengths, "leave such rows out with filter()"
        )
        offsets_name = None if name in (self.weights or {}).values() else f"{name}_offsets"
        if offsets_name is not None and offsets_name in names:
            raise taken(offsets_name, self)
        offsets = np.concatenate([[0], np.cumsum(lists.lengths)]).astype(np.int64)
        with_end = self.ragged == "offsets_and_end"
        return FlatLists(lists.values.astype(dtype, copy=False), offsets, offsets_name, with_end)

    def _check_weights(self, flat: Mapping[str, FlatLists], ids: IntArray) -> None:
        for name, weights in (self.weights or {}).items():
            for column in (name, weights):
                if column not in flat:
                    rule = f"must hold lists of numbers beside weights={self.weights}"
                    raise read_columns.in_column(BadCell(None, rule), column, self, ids)
            lengths, weight_lengths = (np.diff(flat[column].offsets) for column in (name, weights))
            read_columns.check_beside(ids, weights, weight_lengths, name, lengths, self)

    def _of_columns(self, block: Block) -> Any:
        columns = columns_as(block, self.format, self)
        try:
            return columns if self.fn is None else self._draw_watch.around(self.fn)(columns)
        except Exception as error:
            read_columns.blame(error, self, int(block.ids[0]))
            raise


#: By number, of lists that may differ in length.
LISTS = frozenset(
    getattr(pa.lib, f"Type_{name}")
    for name in ("LIST", "LARGE_LIST", "LIST_VIEW", "LARGE_LIST_VIEW")
)


def ragged_names(table: pa.Table) -> list[str]:
    """The columns of lists that may differ in length."""
    return [
        name
        for name, kind in zip(table.column_names, table.schema.types, strict=True)
        if kind.id in LISTS
    ]


def without_lists(table: pa.Table) -> pa.Table:
    return table.drop_columns(ragged_names(table))


def rows_of_batches(run: Run) -> Sequence[Any]:
    """The rows of each batch; fixed-size lists of numbers as arrays."""
    if run.bounds is None or run.items is not None:
        return run.unroll()
    data = run.block.data
    rows = python_rows(data, every=True) if isinstance(data, pa.Table) else run.block.rows()
    return [rows[start:stop] for start, stop in pairwise(run.bounds.tolist())]
