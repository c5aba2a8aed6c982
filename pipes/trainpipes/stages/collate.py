from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import default_collate, get_worker_info

from trainpipes._internal.checks import Function, IntArray, is_name, repeated, require
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import Array, is_number, is_text, one_chunk, to_numpy
from trainpipes.columns.block import BadCell, Block, Part, Piece
from trainpipes.columns.columns import with_numbers
from trainpipes.columns.payload import different_names, numbers_of
from trainpipes.columns.python_values import array_of, python_rows, python_values
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows, batches_of, late_if_small, room_for
from trainpipes.columns.types import fixed_shape
from trainpipes.errors import ConfigError, DataError, shown
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.stage import Stage
from trainpipes.stages.columns import CollatingStage, columns_as, columns_of, taken, unbatched
from trainpipes.stages.pack import kept_columns

#: What ``default_collate`` makes of numbers of these types.
NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}
#: What it makes of columns of numbers; uint64 and float16 are taken as Python's.
WIDE: dict[str, type[np.generic]] = {
    "i": np.int64, "u": np.int64, "f": np.float64, "b": np.bool_,
}  # fmt: skip
AS_PYTHON = (pa.uint64(), pa.float16())
#: What makes the k-th batch of a table, how many there are, and their bytes.
Maker: TypeAlias = tuple[Callable[[int], dict[str, Any]], int, int]


def stacked(rows: Any) -> Any:
    """What ``default_collate`` makes of the rows of a batch, a list of them or a tuple.

    >>> stacked([{"a": 1, "b": 0.5}, {"a": 2, "b": 1.5}])
    {'a': tensor([1, 2]), 'b': tensor([0.5000, 1.5000], dtype=torch.float64)}
    """
    kinds = set(map(type, rows))
    if len(kinds) > 1 and kinds <= {str, bytes, type(None)}:
        return list(rows)  # torch asks the first one alone whether it is a text
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in NUMBERS:
        with suppress(OverflowError):  # of which torch has a message of its own
            return torch.from_numpy(np.array(rows, NUMBERS[kind]))
    if kind is dict:
        return {name: _stacked_values([row[name] for row in rows]) for name in rows[0]}
    alike = kind is np.ndarray and len({(row.dtype, row.shape) for row in rows}) == 1
    if alike and rows[0].dtype.kind in "biuf" and get_worker_info() is None:
        # torch would have threads of its own stack large ones, which get in the way of ours.
        return torch.from_numpy(np.stack(rows))
    if kind is tuple and len(set(map(len, rows))) == 1:
        return [_stacked_values(column) for column in zip(*rows, strict=True)]
    return default_collate(rows)


def _stacked_values(values: Sequence[Any]) -> Any:
    """A column of rows: as rows are, but lists of arrays that are alike, such as the frames of a video, make
    one tensor ``[B, n, ...]``.
    """
    lists = all(isinstance(value, list) and value for value in values)
    arrays = [item for value in values for item in value] if lists else []
    all_arrays = bool(arrays) and all(
        isinstance(item, np.ndarray | torch.Tensor) for item in arrays
    )
    if all_arrays and len({len(value) for value in values}) == 1:
        alike = {(type(item), item.dtype, tuple(item.shape)) for item in arrays}
        if len(alike) == 1:
            flat: torch.Tensor = stacked(arrays)
            return flat.reshape(len(values), -1, *flat.shape[1:])
    return stacked(values)


def stacked_columns(parts: Sequence[Part], as_lists: Collection[str] = ()) -> MutableSequence[Any]:
    """What ``default_collate`` makes of the batches of tables; of columns ``as_lists``, lists."""
    return _late([_batches(part, as_lists, None) for part in parts])


def _late(makers: Sequence[Maker]) -> MutableSequence[Any]:
    """The batches of several parts, in turn."""
    if len(makers) == 1:
        return late_if_small(*makers[0])
    firsts = np.cumsum([0, *(count for _, count, _ in makers)])

    def make(k: int) -> dict[str, Any]:
        number = int(np.searchsorted(firsts, k, side="right")) - 1
        return makers[number][0](k - int(firsts[number]))

    return late_if_small(make, int(firsts[-1]), sum(nbytes for *_, nbytes in makers))


def _batches(part: Part, as_lists: Collection[str], floats: np.dtype[Any] | None) -> Maker:
    table: Any = part.data
    edges: list[int] = part.bounds.tolist()
    names = different_names(table)
    wide: list[tuple[Sequence[str], Sequence[Array], np.dtype[Any]]] = []
    nbytes, others = 0, set(range(len(names)))
    for numbers in numbers_of(table):
        if numbers.kind not in AS_PYTHON:
            columns = numbers.picked(part.index)
            dtype = _wide(columns[0].dtype, floats)
            if not _fits(columns, dtype):
                continue
            wide.append((numbers.names, columns, dtype))
            others -= {*numbers.places}
            nbytes += len(columns) * edges[-1] * dtype.itemsize
    rest: Any = Piece(table.select(sorted(others)), part.index).gathered() if others else {}
    cutters: list[tuple[str, Callable[[int], Any]]] = []
    for name in (names[place] for place in sorted(others)):
        values = _values(rest[name], floats)
        if values is None:
            rows = python_values(rest[name])
            stack = list if name in as_lists or is_text(rest[name].type) else stacked
            cutters.append((name, [stack(rows[a:b]) for a, b in pairwise(edges)].__getitem__))
        else:
            nbytes += values.nbytes
            cutters.append((name, partial(_cut, values, edges)))

    def make(k: int) -> dict[str, Any]:
        batch: dict[str, Any] = dict.fromkeys(names)
        for some, columns, dtype in wide:
            tensors = _cut_columns(columns, edges[k], edges[k + 1], dtype).unbind(0)
            batch.update(zip(some, tensors, strict=True))
        batch.update((name, cut(k)) for name, cut in cutters)
        return batch

    return make, len(edges) - 1, nbytes


def _cut(values: Array, edges: Sequence[int], k: int) -> torch.Tensor:
    return torch.from_numpy(values[edges[k] : edges[k + 1]].copy())


def _cut_columns(
    columns: Sequence[Array], start: int, stop: int, dtype: np.dtype[Any]
) -> torch.Tensor:
    """Rows of columns, copied in a single call, ``[columns, rows]``."""
    room = room_for((len(columns), stop - start), dtype)
    np.concatenate([values[start:stop] for values in columns], out=room.reshape(-1))
    return torch.from_numpy(room)


def _wide(dtype: np.dtype[Any], floats: np.dtype[Any] | None) -> np.dtype[Any]:
    """What numbers of a dtype are collated as, where floats are to be of another dtype."""
    return floats if floats is not None and dtype.kind == "f" else np.dtype(WIDE[dtype.kind])


def _fits(columns: Sequence[Array], dtype: np.dtype[Any]) -> bool:
    try:
        for values in () if np.can_cast(columns[0].dtype, dtype) else columns:
            read_columns.check_fit(values, dtype, None, "")
    except BadCell:
        return False
    return True


def _values(column: pa.ChunkedArray, floats: np.dtype[Any] | None) -> Array | None:
    """Numbers, or arrays of the same shape, as ``default_collate`` would have them; None of others."""
    array = one_chunk(column)
    if not is_number(array.type):
        values = None if fixed_shape(array.type) is None else array_of(array)
        if values is None or floats is None or values.dtype.kind != "f":
            return values
    elif array.null_count or (array.type in AS_PYTHON and not _has_dtype(array.type, floats)):
        return None
    else:
        values = to_numpy(array)
    dtype = _wide(values.dtype, floats)
    if floats is not None:
        read_columns.check_fit(values, dtype, None, "leave such rows out with filter()")
    return values.astype(dtype, copy=False)


def _has_dtype(kind: pa.DataType, floats: np.dtype[Any] | None) -> bool:
    return floats is not None and pa.types.is_floating(kind)


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
        dtype: a dtype of floats for all columns of floats and decimals, such as ``torch.float32``.

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
        takes = "columns" if self.format != "rows" or self._makes_columns else "rows"
        return {"takes": takes, "per_row": self.fn is not None}

    @property
    def _makes_columns(self) -> bool:
        """Whether it makes tensors of columns by options of their types."""
        return self.ragged is not None or self.dtype is not None

    @cached_property
    def _floats(self) -> np.dtype[Any] | None:
        return None if self.dtype is None else torch.empty(0, dtype=self.dtype).numpy().dtype

    def process(self, run: Run) -> Run:
        self._refuse_collated(run)
        if self.format == "rows" and not self._makes_columns:
            if self.fn is not None:
                return run.with_items(read_columns.each(self, self.fn, run))
            if run.items is not None:
                return run.with_items(self._collated(run))
            if run.block.has_columns:
                run = run.with_block(run.block.with_columns(with_numbers))
            if run.bounds is not None and run.block.of_kind(TensorRows):
                return run.with_items(batches_of(part.cut for part in run.block.parts(run.bounds)))
            if run.bounds is not None and run.block.has_columns:
                with suppress(Exception):  # whose row is looked for below
                    parts = run.block.parts(run.bounds)
                    return run.with_items(stacked_columns(parts, self._kept))
            return run.with_items(self._collated(run))
        if run.bounds is None:
            raise ConfigError(f"{self} works on batches: put .batch(n) before it")
        if run.items is not None:
            got = "lists of Python rows, which a function made of the batches"
            left = "ragged" if self.ragged else "dtype" if self.dtype else "format"
            way = f"put that function before batch(), or leave {left} out"
            raise ConfigError(f"{self} takes columns, got {got}: {way}")
        if self._makes_columns:
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
                items.append(stacked(with_same_keys(rows)))
            except Exception as error:
                bad, ids = unfit(rows), run.row_ids(len(items))
                row = ids[bad.row or 0] if len(ids) == len(rows) else ids[0]
                raise read_columns.at_row(f"{self}: {bad}", self, row) from error
        return items

    def _of_types(self, run: Run, bounds: IntArray) -> MutableSequence[Any]:
        makers: list[Maker] = []
        ids = run.block.ids
        try:
            for part in run.block.parts(bounds):
                makers.append(self._part_of_types(part, ids))
                ids = ids[part.bounds[-1] :]
            return _late(makers)
        except DataError:
            raise
        except Exception:  # of a column without lists, whose row is looked for
            drop = without_lists if self.ragged else (lambda table: table)
            self._collated(run.with_block(run.block.with_columns(drop)))
            raise

    def _part_of_types(self, part: Part, ids: IntArray) -> Maker:
        table: Any = part.data
        ragged = ragged_names(table) if self.ragged else []
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
            return _batches(part, self._kept, self._floats)
        except BadCell:  # whose column is looked for
            for name in part.data.column_names:  # type: ignore[union-attr]
                with read_columns.naming(name, self, ids):
                    column = part.data.select([name])  # type: ignore[union-attr]
                    _batches(Part(column, part.index, part.bounds), self._kept, self._floats)
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


def with_same_keys(rows: Sequence[Any]) -> list[Any]:
    """Rows whose dicts have the same keys: torch drops those that the first row lacks."""
    # Of as many keys each, a row that lacks a key is found when the rows are stacked.
    alike = set(map(type, rows)) == {dict} and len(set(map(len, rows))) == 1
    if rows and not alike and isinstance(rows[0], Mapping):
        keys = rows[0].keys()
        if any(isinstance(row, Mapping) and row.keys() != keys for row in rows):
            raise ValueError("rows have different keys")
    return list(rows)


def unfit(rows: Sequence[Any]) -> BadCell:
    number = next((n for n, row in enumerate(rows) if not collates(rows[0], row)), 0)
    first, row, where = rows[0], rows[number], "a row"
    if isinstance(first, Mapping) and isinstance(row, Mapping):
        if first.keys() != row.keys():
            said = f"a row has the keys {list(row)} where the first of its batch has {list(first)}"
            return BadCell(number, f"{said}: give all rows the same, by map()")
        name = next((name for name in first if not collates(first[name], row[name])), None)
        if name is not None:
            first, row, where = first[name], row[name], f"column {name!r}"
    way = "leave the column out with select(), make numbers of it with map(), or use pad_collate()"
    problem = f"is {shown(row, 60)} ({type(row).__name__}), of which default_collate makes no tensor: {way}"
    if row is None:
        way = "fill it with map(), or drop it with filter()"
        problem = f"is null, which a tensor cannot hold: {way}"
    elif None not in (sizes := [size_of(row), size_of(first)]) and sizes[0] != sizes[1]:
        way = "pad_collate() pads lists of numbers"
        if len(sizes[0] or ()) > 2:  # images or clips
            way = "crop or resize images to one size, and decode videos with num_frames="
        rule = f"only equal shapes can be stacked: {way}"
        got = f"has the shape {sizes[0]} where the first row of its batch has {sizes[1]}"
        problem = f"{got}, and {rule}"
    return BadCell(number, f"{where} {problem}")


def collates(first: Any, other: Any) -> bool:
    try:
        default_collate(with_same_keys([first, other]))
    except Exception:
        return False
    return True


def size_of(value: Any) -> list[int] | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return list(value.shape)
    return [len(value)] if isinstance(value, list | tuple) else None
