from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY
from functools import partial
from itertools import repeat
from typing import Annotated, Any, ClassVar, Self
from weakref import ref

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import IntArray, repeated
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import Array, is_list
from trainpipes.columns.block import BadCell
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.rectangles import RaggedRows, Side
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows, batches_of, foreign_dtype, late_if_small
from trainpipes.columns.types import ALIKE, as_array
from trainpipes.errors import ConfigError, SchemaError, TrainpipesError
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.stages.columns import CollatingStage, unbatched
from trainpipes.stages.pack import Pack, add_sequences, kept_columns
from trainpipes.stages.padding import (
    FIXED,
    OPTIONS,
    PADDING,
    Cells,
    Cut,
    PadValue,
    Rule,
    Writer,
    asked_masks,
    dtype_of_numbers,
    even_writer,
    is_naming,
    numpy_dtype,
    object_writer,
    ragged_writer,
)
from trainpipes.stages.token_ids import warn_of_padded_labels
from trainpipes.stages.tokenizing import TakesTokenizer, Tokenizes, makers_of_columns

# The stage


class PadCollate(TakesTokenizer, CollatingStage, takes="columns or objects", pads=True):
    """Turn the columns of each batch into a dict of tensors; lists of numbers are padded.

    - lists of numbers: ``[B, L]``; integers as int64, bools as bool, float32 and float64 as
      float32, float16 as float16
    - lists of fixed-size lists of n numbers, arrays ``[L, n]`` of several L: ``[B, L, n]``, the same dtypes
    - integers: int64 ``[B]``; bools, float32, float64: their own dtype, ``[B]``
    - fixed-size lists or tensors of numbers: their own dtype, ``[B, n, ...]``
    - bfloat16 and float8: the same, but float32 where a stage before works on Arrow columns
    - anything else (strings, times, structs): a list of B Python objects

    L is the length of the longest row of the batch, or ``max_length``, rounded up to
    ``pad_to_multiple_of``. Rows that ``pack`` made get no mask, but ``cu_seqlens`` (int32
    ``[sequences + 1]``) and ``max_seqlen`` (int): where documents start in the B * L tokens. In
    rows that are Python dicts, integers become int64, floats float64, and arrays of several dimensions that
    had one shape in the first rows, or of which a function makes batches, keep their dtype: they are stacked,
    or padded to the longest of the batch where only the first dimension differs. Options in ``columns``,
    ``mask`` or ``lengths`` make ragged columns of them. Tensors are contiguous, writable and share no memory.

    Args:
        max_length: L of every ragged column; longer rows are cut. Arrays and fixed-size lists of one length
            only where ``columns`` names them.
        pad_to_multiple_of: L is rounded up to a multiple of it, even beyond ``max_length``.
        padding_side: "right" (the default, unless the tokenizer before pads on the left) or "left".
        truncation_side: "right" (the default) or "left": where longer rows are cut.
        value: pads ragged columns, but for "labels" (-100), "attention_mask" and "token_type_ids" (0), which
            only ``columns`` changes, as it must for labels of other names. By default token ids get the pad
            token of the ``tokenize`` before this stage, others 0. Must be given if a function tokenizes.
        mask: left out, "input_ids" gets an "attention_mask" (int64 ``[B, L]``, 1 on tokens) unless
            the rows have one. False for none, or a dict of ragged columns and the names of their
            masks.
        columns: other options for some columns, by name: dicts of ``max_length``,
            ``pad_to_multiple_of``, ``padding_side``, ``truncation_side``, ``value``, ``dtype``, or
            ``mask`` (a name).
        lengths: a dict of ragged columns and the names of columns for their rows' lengths, int64 ``[B]``.
        dtype: an integer dtype for ragged columns of integers, or a float dtype for all columns of
            floats.
        tokenizer: made the "input_ids" that the rows hold already; gives pad token and padding
            side. As in ``tokenize``.

    Raises:
        DataError: a null where a number or a list should be, or a number that ``dtype`` cannot
            hold; names column and row.
        SchemaError: a column named in ``columns`` or ``mask`` is not there, or a column holds lists
            of lists.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = pa.table({"input_ids": [[1, 2, 3], [4]], "labels": [[1, 2, 3], [4]]})
    >>> batch, = tp.from_arrow(rows).batch(2).pad_collate()
    >>> batch["labels"]
    tensor([[   1,    2,    3],
            [   4, -100, -100]])
    >>> batch["attention_mask"]
    tensor([[1, 1, 1],
            [1, 0, 0]])
    """

    _: KW_ONLY
    max_length: Cells | None = None
    pad_to_multiple_of: Cells | None = None
    padding_side: Side | None = None
    truncation_side: Side | None = None
    value: PadValue | None = None
    mask: Mapping[str, str] | bool | None = None
    columns: Mapping[str, Mapping[str, Any]] | None = None
    lengths: Mapping[str, str] | None = None
    dtype: Annotated[torch.dtype, dtype_of_numbers] = torch.int64
    tokenizer: Any = None

    def check(self) -> None:
        _ = self._own, self._masks  # raises for wrong values
        rule = 'a dict of columns and names such as {"audio": "audio_lengths"}'
        self._require(self.lengths is None or is_naming(self.lengths), "lengths", rule)
        names = [*self._masks.values(), *(self.lengths or {}).values()]
        self._require(not repeated(names), "lengths", "another name for each, and for each mask")

    @cached_property
    def _rule(self) -> Rule:
        asked = self.max_length, self.pad_to_multiple_of, self.padding_side, self.truncation_side
        return Rule(*asked, self.value)

    @cached_property
    def _rules(self) -> dict[str, Rule]:
        by_column = {} if self.columns is None else self.columns
        self._require(isinstance(by_column, Mapping), "columns", OPTIONS)
        return {name: self._rule.of_column(name, own) for name, own in by_column.items()}

    def _rule_of(self, name: str) -> Rule:
        return self._rules.get(name, self._rule)

    def _kept_lengths(self, column: str, lengths: IntArray) -> IntArray:
        most = self._rule_of(column).max_length
        return lengths if most is None else np.minimum(lengths, most)

    @cached_property
    def _masks(self) -> dict[str, str]:
        return asked_masks(self.mask, self._rules)

    _tokenize: ClassVar[Tokenizes | None] = None
    _id_columns: ClassVar[Mapping[str, Tokenizes]] = {}
    _pack: ClassVar[Pack | None] = None
    _kept: ClassVar[Collection[str]] = ()
    #: Columns whose arrays and fixed-size lists are padded also where all of a batch have the same length.
    _of_any_length: ClassVar[Collection[str]] = ()

    def _resolve(self, below: Sequence[Stage]) -> Self:
        ids = makers_of_columns(below)
        ids |= {} if self._own is None else {"input_ids": self._own}
        pack = next((stage for stage in below if isinstance(stage, Pack)), None)
        as_lists = kept_columns(below)
        named = (name for name, own in (self.columns or {}).items() if PADDING & {*own})
        timed = (s.options for s in below if s.options.get("time_first"))
        of_sound = (own.get("output_column", own.get("column")) for own in timed)
        return super()._resolve(below)._resolved(
            _tokenize=self.tokenizes(below), _id_columns=ids, _pack=pack, _kept=as_lists,
            _of_any_length={*named, *of_sound},
        )  # fmt: skip

    @property
    def _side_below(self) -> Side:
        return "right" if self._tokenize is None else self._tokenize.padding_side

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self._tokenize is not None:  # its options of padding shape batches too
            if self.value is None:
                identity["value"] = self._tokenize.pad_id
            if self.padding_side in (None, self._side_below):  # the same text for the same side
                identity.pop("padding_side", None)
                identity["padding_side"] = self._side_below
        return identity

    def process(self, run: Run) -> Run:
        self._refuse_collated(run)
        block, bounds = run.block, run.bounds if run.items is None else None
        if bounds is not None and block.has_columns:
            return run.with_items(self._of_tables(run, bounds))
        names = getattr(block.within, "names", None)
        if bounds is not None and names and block.of_kind(TensorRows):
            return run.with_items(batches_of(self._of_tensors(run, bounds, names)))
        return run.with_items([self._of_rows(run, k, rows) for k, rows in enumerate(run.unroll())])

    def _of_tables(self, run: Run, bounds: IntArray) -> MutableSequence[Any]:
        """Batches of Arrow rows; small ones are made when they are taken."""
        batches: list[Callable[[], dict[str, Any]]] = []
        row_bytes, ids = 0.0, run.block.ids
        for part in run.block.parts(bounds):
            index, writers = part.index, self._writers_of(part.data)
            if writers is None:  # something is bad, which need not be in these rows
                index, writers = None, self._writers(_columns(part.cut[0]), ids)
            cut = self._cut(writers, index, part.bounds)
            batches += [partial(cut, k) for k in range(len(part.bounds) - 1)]
            row_bytes = max(row_bytes, sum(writer.row_bytes for writer in writers))
            ids = ids[part.bounds[-1] :]
        return late_if_small(lambda k: batches[k](), len(batches), row_bytes * len(run.block))

    @made_once
    def _by_table(self) -> dict[int, tuple[Any, list[Writer] | None]]:
        return {}

    def _writers_of(self, table: pa.Table) -> list[Writer] | None:
        """What cuts batches out of all rows of a table, made once for it; None if something in it is
        bad.
        """
        key, known = id(table), self._by_table
        entry = known.get(key)
        if entry is None or entry[0]() is not table:
            writers = None
            with suppress(TrainpipesError):
                writers = self._writers(_columns(table), np.zeros(len(table), dtype=np.int64))
            entry = known[key] = ref(table, lambda _: known.pop(key, None)), writers
        return entry[1]

    def _of_tensors(
        self, run: Run, bounds: IntArray, names: tuple[str, ...]
    ) -> Iterator[tuple[TensorRows, list[int]]]:
        ids = run.block.ids
        need_columns(names, [*self._rules, *self._masks, *(self.lengths or ())], self)
        for name, mask in (*self._masks.items(), *(self.lengths or {}).items()):
            raise read_columns.in_column(_no_mask(mask), name, self, ids)
        for name, tensor in zip(names, getattr(run.block.within, "tensors", ()), strict=True):
            if name in self._of_any_length and tensor.ndim > 1:
                raise read_columns.in_column(_no_padding(), name, self, ids)
        change = self.dtype.is_floating_point or any(rule.dtype for rule in self._rules.values())
        for part in run.block.parts(bounds):
            rows, edges = part.cut
            if change:
                converted = map(self._converted, names, rows.tensors, repeat(ids))
                rows = TensorRows(tuple(converted), names)
            yield rows, edges
            ids = ids[edges[-1] :]

    def _converted(self, name: str, tensor: torch.Tensor, ids: IntArray) -> torch.Tensor:
        both = self.dtype.is_floating_point and tensor.is_floating_point()
        dtype = self._rule_of(name).dtype or (self.dtype if both else tensor.dtype)
        if dtype == tensor.dtype:
            return tensor
        with read_columns.naming(name, self, ids):
            values = as_array(tensor)
            read_columns.check_fit(values, numpy_dtype(dtype, name), None, _wider(name, values))
        return tensor.to(dtype)

    def _of_rows(self, run: Run, k: int, rows: Any) -> dict[str, Any]:
        if not isinstance(rows, list):
            raise unbatched(self, rows)
        ids = run.row_ids(k)
        if len(ids) != len(rows):  # a function made other rows of the batch
            ids = np.broadcast_to(ids[:1], len(rows))
        names = list(rows[0]) if rows and isinstance(rows[0], Mapping) else []
        known = dict.fromkeys(names).keys()
        for number, row in enumerate(rows):
            if isinstance(row, Mapping) and row.keys() == known:
                continue
            got = f"{type(row).__name__}; make dicts with map(), or use collate()"
            if isinstance(row, Mapping):
                got = f"keys {list(row)} where the first row of its batch has {names}"
            rule = f"{self}: the rows of a batch must be dicts with the same keys, got {got}"
            raise read_columns.at_row(rule, self, ids[number], SchemaError)
        columns = {name: [row[name] for row in rows] for name in names}
        bounds = np.array([0, len(ids)], dtype=np.int64)
        return self._cut(self._writers(columns, ids), None, bounds)(0)

    def _cut(self, writers: Sequence[Writer], index: IntArray | None, bounds: IntArray) -> Cut:
        cuts = [writer.cut(index, bounds) for writer in writers]

        def make(k: int) -> dict[str, Any]:
            batch = {name: values for cut in cuts for name, values in cut(k).items()}
            if self._pack is not None and "segment_ids" in batch:
                add_sequences(batch)
            return batch

        return make

    def _writers(self, columns: Mapping[str, Any], ids: IntArray) -> list[Writer]:
        present, lengths = list(columns), self.lengths or {}
        need_columns(present, [*self._rules, *self._masks, *lengths], self)
        masks = dict(self._masks)
        asked = self.mask is not None or self._rule_of("input_ids").mask is not None
        if not asked and self._pack is None and "attention_mask" not in {*present, *masks.values()}:
            masks = {"input_ids": "attention_mask"} | masks
        taken = sorted({*masks.values(), *lengths.values()} & {*present})
        if taken:
            said = f": the rows have a column {taken[0]!r} already; give the mask another name"
            raise read_columns.refused(self, said)
        writers: list[Writer] = []
        for name, values in columns.items():
            with read_columns.naming(name, self, ids):
                writers.append(self._writer(name, values, masks.get(name), ids))
        return writers

    def _writer(self, name: str, values: Any, mask: str | None, ids: IntArray) -> Writer:
        if name in self._kept:
            of_arrow = isinstance(values, pa.ChunkedArray)
            return object_writer(name, values.combine_chunks() if of_arrow else values)
        column = read_columns.read(values, name, self, ids)
        length = (self.lengths or {}).get(name)
        named = self._masks.get(name) or length
        of_any_length = named is not None or name in self._of_any_length
        alike = not of_any_length and _are_alike(values, column)
        if alike:
            column = _stacked(column)
        least = 2 if name in self._of_any_length else 3
        if isinstance(column, read_columns.Even) and of_any_length and column.values.ndim >= least:
            rows, each, *inner = column.values.shape  # arrays that happen to have the same length
            column = read_columns.Ragged(
                column.values.reshape(-1, *inner), np.full(rows, each, dtype=np.int64)
            )
        lengths = column.lengths if isinstance(column, read_columns.Ragged) else None
        if lengths is None and named is not None:
            raise _no_mask(named)
        if isinstance(column, read_columns.Opaque):
            return object_writer(name, column.values)
        dtype = self._dtype(name, column.values, lengths is not None and not alike)
        rule, asks = self._rule_of(name), self.dtype.is_floating_point
        foreign = None if asks or rule.dtype is not None else foreign_dtype(values)
        read_columns.check_fit(column.values, dtype, lengths, _wider(name, column.values))
        if lengths is None:
            writer = even_writer(name, column.values, dtype)
        else:
            value = self._pad_value(name, dtype, column.values, foreign)
            rows = RaggedRows(
                column.values, np.cumsum(lengths) - lengths, lengths, value,
                dtype=dtype, max_length=None if alike else rule.max_length,
                multiple=1 if alike else rule.pad_to_multiple_of or 1,
                padding_side=rule.padding_side or self._side_below,
                truncation_side=rule.truncation_side or "right", mask=None if mask is None else np.int64,
            )  # fmt: skip
            writer = ragged_writer(name, rows, mask, length)
        return writer if foreign is None else writer.to(name, foreign)

    @made_once
    def _looked_at(self) -> set[str]:
        return set()

    def _dtype(self, name: str, values: Any, ragged: bool) -> np.dtype[Any]:
        column_dtype, asked = self._rule_of(name).dtype, numpy_dtype(self.dtype, "")
        if column_dtype is not None:
            return numpy_dtype(column_dtype, "")
        padded, dtype = ragged or (self._pack is not None and values.ndim == 2), values.dtype
        if dtype.kind == asked.kind == "f":
            return asked
        if dtype.kind in "iu" and (padded or values.ndim == 1):
            return np.dtype(np.int64) if asked.kind == "f" or not padded else asked
        wide = padded and dtype.kind == "f" and dtype.itemsize > 2
        return np.dtype(np.float32) if wide else dtype

    def _pad_value(self, name: str, dtype: Any, values: Array, foreign: Any) -> float:
        column_value = self._rules[name].value if name in self._rules else None
        value = FIXED.get(name, self.value) if column_value is None else column_value
        tokenize = self._id_columns.get(name)
        if value is None and tokenize is not None:
            who, way = f"{self}: column {name!r}", "pad_collate(value=...)"
            value = tokenize.pads(who, way) if self._pack is None else self._pack.fill_id
        value = value or 0
        if column_value is None and value != IGNORED and name not in self._looked_at:
            self._looked_at.add(name)
            warn_of_padded_labels(self, name, values, value)
        least, most = read_columns.limits(dtype if foreign is None else foreign)
        fits = least <= value <= most or (dtype.kind == "f" and not abs(value) < float("inf"))
        if not fits or (dtype.kind != "f" and value % 1):
            said = f"{self}: column {name!r} is padded with {value}, which {foreign or dtype} cannot hold"
            raise ConfigError(f"{said}; give columns={{{name!r}: {{'value': …}}}}")
        return value


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _are_alike(values: Any, column: read_columns.Column) -> bool:
    """Whether a column holds arrays of several dimensions of Python rows, which were alike in the first rows,
    or of which one batch alone is known.
    """
    if isinstance(values, pa.ChunkedArray):
        return is_list(values.type) and values.type.value_field.name == ALIKE
    return isinstance(column, read_columns.Ragged) and column.values.ndim > 1


def _stacked(column: read_columns.Column) -> read_columns.Column:
    """Arrays of the same shape as they are stacked; others as they are."""
    if not isinstance(column, read_columns.Ragged) or len({*column.lengths.tolist()}) != 1:
        return column
    shape = len(column.lengths), int(column.lengths[0]), *column.values.shape[1:]
    return read_columns.Even(column.values.reshape(shape))


def _no_padding() -> BadCell:
    way = "leave it out of columns={...}, or cut it in a map()"
    return BadCell(None, f"holds tensors of one shape, which are neither padded nor cut: {way}")


def _no_mask(mask: str) -> BadCell:
    return BadCell(None, f"has no lists to pad, and so no mask {mask!r}: leave its mask out")


def _wider(name: str, values: Array) -> str:
    """What keeps all numbers of a column."""
    return f"pass columns={{{name!r}: {{'dtype': torch.{values.dtype}}}}}"
