from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import KW_ONLY
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.messages import need_columns
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Part
from trainpipes.columns.lazy_batches import late_if_small
from trainpipes.columns.payload import take_payload
from trainpipes.columns.rectangles import RaggedRows, Side
from trainpipes.columns.row_types import as_array
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows, batches_of
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, SchemaError, TrainpipesError
from trainpipes.kinds.blame import at_row, in_column
from trainpipes.kinds.stage import Stage, made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.columns import refuse_collated, unbatched
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_columns import (
    Column,
    Opaque,
    Ragged,
    Write,
    Writer,
    add_sequences,
    check_fit,
    even_writer,
    no_mask,
    object_writer,
    of_arrow,
    of_list,
    ragged_writer,
)
from trainpipes.stages.pad_rules import (
    FIXED,
    Cells,
    PadValue,
    Rule,
    asked_masks,
    column_options,
    dtype_of_numbers,
    numpy_dtype,
)
from trainpipes.stages.text_columns import ByTable
from trainpipes.stages.tokenizing import TakesTokenizer, Tokenizes

Writers: TypeAlias = "Sequence[Writer]"


class PadCollate(TakesTokenizer, RunStage):
    """Turn the columns of each batch into a dict of tensors; lists of numbers are padded.

    - lists of numbers: ``[B, L]``; integers as int64, bools as bool, float32 and float64 as
      float32, float16 as float16
    - lists of fixed-size lists of n numbers: ``[B, L, n]``, with the same dtypes
    - integers: int64 ``[B]``; bools, float32, float64: their own dtype, ``[B]``
    - fixed-size lists or tensors of numbers: their own dtype, ``[B, n, ...]``
    - anything else (strings, times, structs): a list of B Python objects

    L is the length of the longest row of the batch, or ``max_length``, rounded up to
    ``pad_to_multiple_of``. Rows that ``pack`` made get no mask, but ``cu_seqlens`` (int32
    ``[sequences + 1]``) and ``max_seqlen`` (int): where documents start in the B * L tokens. In
    rows that are Python dicts, integers become int64, floats float64, and arrays of several
    dimensions are stacked. Tensors are contiguous, writable and share no memory.

    Args:
        max_length: L of every ragged column; longer rows are cut.
        pad_to_multiple_of: L is rounded up to a multiple of it, even beyond ``max_length``.
        padding_side: "right" (the default, unless the tokenizer before pads on the left) or "left".
        truncation_side: "right" (the default) or "left": where longer rows are cut.
        value: pads ragged columns. By default token ids get the pad token of the ``tokenize``
            before this stage, "labels" -100, others 0. Must be given if a function tokenizes.
        mask: left out, "input_ids" gets an "attention_mask" (int64 ``[B, L]``, 1 on tokens) unless
            the rows have one. False for none, or a dict of ragged columns and the names of their
            masks.
        columns: other options for some columns, by name: dicts of ``max_length``,
            ``pad_to_multiple_of``, ``padding_side``, ``truncation_side``, ``value``, ``dtype``, or
            ``mask`` (a name).
        dtype: an integer dtype for ragged columns of integers, or a float dtype for all columns of
            floats.
        tokenizer: made the "input_ids" that the rows hold already; gives pad token and padding
            side. As in ``tokenize``.

    Raises:
        DataError: a null where a number or a list should be, or an integer that ``dtype`` cannot
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

    role = "finish"
    needs_columns = True
    takes_objects = True

    _: KW_ONLY
    max_length: Cells | None = None
    pad_to_multiple_of: Cells | None = None
    padding_side: Side | None = None
    truncation_side: Side | None = None
    value: PadValue | None = None
    mask: Mapping[str, str] | bool | None = None
    columns: Annotated[Mapping[str, Mapping[str, Any]], column_options] | None = None
    dtype: Annotated[torch.dtype, dtype_of_numbers] = torch.int64
    tokenizer: Any = None

    def check(self) -> None:
        _ = self._own, self._asked_masks  # what is wrong with them is said here

    @cached_property
    def _rule(self) -> Rule:
        names = ("max_length", "pad_to_multiple_of", "padding_side", "truncation_side", "value")
        return Rule(**{name: self.options[name] for name in names})

    @cached_property
    def _rules(self) -> dict[str, Rule]:
        given = self.columns or {}
        return {name: self._rule.of_column(name, own) for name, own in given.items()}

    def _rule_of(self, name: str) -> Rule:
        return self._rules.get(name, self._rule)

    @cached_property
    def _asked(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype, str(self))

    @cached_property
    def _asked_masks(self) -> dict[str, str]:
        return asked_masks(self.mask, self._rules)

    _tokenize: ClassVar[Tokenizes | None] = None
    _id_columns: ClassVar[Mapping[str, Tokenizes]] = {}
    _pack: ClassVar[Pack | None] = None

    def resolve(self, below: Sequence[Stage]) -> Self:
        ids: dict[str, Tokenizes] = {}
        for stage in below:
            if isinstance(stage, Tokenizes):
                ids |= dict.fromkeys(stage.id_columns, stage)
            elif stage.name == "rename":
                names = stage.options["names"]
                ids = {names.get(name, name): maker for name, maker in ids.items()}
        if self._own is not None:
            ids["input_ids"] = self._own
        pack = next((stage for stage in below if isinstance(stage, Pack)), None)
        return self.resolved(_tokenize=self.tokenizes(below), _id_columns=ids, _pack=pack)

    @property
    def _side_below(self) -> Side:
        return "right" if self._tokenize is None else self._tokenize.padding_side

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        if self._tokenize is not None:  # what it says of padding shapes batches too
            if self.value is None:
                found["value"] = self._tokenize.pad_id
            if self.padding_side is None:
                found["padding_side"] = self._side_below
        return found

    def process(self, run: Run) -> Run:
        refuse_collated(run, self)
        if run.bounds is None:
            return run.with_items(self._of_foreign(run))
        if run.block.has_columns:
            return run.with_items(self._of_columns(run, run.bounds))
        within = run.block.within
        if isinstance(within, TensorRows) and within.names and run.block.of_kind(TensorRows):
            return run.with_items(batches_of(self._of_tensors(run, run.bounds)))
        rows, edges = run.block.rows(), run.bounds.tolist()
        ids = run.block.ids
        return run.with_items([self._of_rows(rows[a:b], ids[a:b]) for a, b in pairwise(edges)])

    def _of_columns(self, run: Run, bounds: IntArray) -> MutableSequence[Any]:
        """Batches of Arrow rows; small sound ones are made when they are taken."""
        writes: list[Sequence[Write]] = []
        places: list[int] = []
        row_bytes = 0.0
        for part in run.block.parts(bounds):
            writers, count = self._of_table.of(part.data, self._try_writers), len(part.bounds) - 1
            if writers is None:
                first = len(places)
                writes += [self._checked(part, k, run.row_ids(first + k)) for k in range(count)]
                places += [0] * count
                row_bytes = float("inf")
            else:
                writes += [_writes(writers, part.index, part.bounds)] * count
                places += range(count)
                row_bytes = max(row_bytes, sum(writer.row_bytes for writer in writers))

        def make(k: int) -> dict[str, Any]:
            return _batch(writes[k], places[k])

        return late_if_small(make, len(places), row_bytes * len(run.block))

    def _checked(self, part: Part, k: int, ids: IntArray) -> Sequence[Write]:
        start, stop = int(part.bounds[k]), int(part.bounds[k + 1])
        index = np.arange(start, stop) if part.index is None else part.index[start:stop]
        return _writes(self._of_arrow(take_payload(part.data, index), ids), None, _all(ids))

    @made_once
    def _of_table(self) -> ByTable[Writers | None]:
        return ByTable()

    def _try_writers(self, table: pa.Table) -> Writers | None:
        """What cuts batches out of all rows of a table; None if each batch must be looked at."""
        try:
            return self._of_arrow(table, None)
        except (TrainpipesError, BadCell):
            return None

    def _of_arrow(self, table: pa.Table, ids: IntArray | None) -> Writers:
        columns = {name: table.column(name) for name in table.column_names}
        return self._writers(columns, of_arrow, ids)

    def _of_tensors(self, run: Run, bounds: IntArray) -> Iterator[tuple[TensorRows, list[int]]]:
        first = 0
        for part in run.block.parts(bounds):
            rows, edges = part.cut
            ids, first = run.block.ids[first:], first + edges[-1]
            names = rows.names
            need_columns(list(names), [*self._rules, *self._asked_masks], self)
            for name in names:
                if name in self._asked_masks:
                    raise in_column(no_mask(self._asked_masks[name]), name, self, ids)
            kinds = zip(names, rows.slice(0, 0).tensors, strict=True)
            if all(self._tensor_dtype(name, none) == none.dtype for name, none in kinds):
                yield rows, edges  # which may be made of less than all tensors
                continue
            tensors = []
            for name, tensor in zip(names, rows.tensors, strict=True):
                try:
                    tensors.append(tensor.to(self._tensor_dtype(name, tensor)))
                except BadCell as bad:
                    raise in_column(bad, name, self, ids) from None
            yield TensorRows(tuple(tensors), names), edges

    def _tensor_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        rule = self._rule_of(name)
        if rule.dtype is not None and rule.numpy is not None:
            _check_even(as_array(tensor), rule.numpy)
            return rule.dtype
        asked = self._asked.kind == "f" and tensor.is_floating_point()
        return self.dtype if asked else tensor.dtype

    def _of_foreign(self, run: Run) -> list[dict[str, Any]]:
        batches = []
        for item, row in zip(run.block.rows(), run.block.ids.tolist(), strict=True):
            if not isinstance(item, list):
                raise unbatched(self, item)
            batches.append(self._of_rows(item, np.full(len(item), row, dtype=np.int64)))
        return batches

    def _of_rows(self, rows: list[Any], ids: IntArray) -> dict[str, Any]:
        names = rows[0].keys() if rows and isinstance(rows[0], Mapping) else None
        for number, row in enumerate(rows):
            if names is None or not isinstance(row, Mapping) or row.keys() != names:
                self._refuse_row(row, names, int(ids[number]))
        columns = {name: [row[name] for row in rows] for name in names or ()}
        return _batch(_writes(self._writers(columns, of_list, ids), None, _all(ids)), 0)

    def _refuse_row(self, row: Any, names: Any, row_id: int) -> NoReturn:
        if isinstance(row, Mapping):
            found = f"keys {list(row)} where the first row of its batch has {list(names)}"
        else:
            found = f"{type(row).__name__}; make dicts with map(), or use collate()"
        message = f"{self}: the rows of a batch must be dicts with the same keys, got {found}"
        raise at_row(message, self, row_id, SchemaError)

    def _writers(
        self, columns: Mapping[str, Any], read: Callable[[Any, str], Column], ids: IntArray | None
    ) -> Writers:
        present = list(columns)
        need_columns(present, [*self._rules, *self._asked_masks], self)
        masks = dict(self._asked_masks)
        asked = self.mask is not None or self._rule_of("input_ids").mask is not None
        if not asked and self._pack is None and "attention_mask" not in {*present, *masks.values()}:
            masks = {"input_ids": "attention_mask"} | masks
        taken = sorted(set(masks.values()) & set(present))
        if taken:
            raise SchemaError(
                f"{self}: the rows have a column {taken[0]!r} already; give the mask another name",
                stage=str(self),
            )
        writers: list[Writer] = []
        for name, values in columns.items():
            try:
                writers.append(self._writer(name, read(values, name), masks.get(name)))
            except BadCell as bad:
                if ids is None:
                    raise
                raise in_column(bad, name, self, ids) from None
        if self._pack is not None and "segment_ids" in present:
            writers.append(Writer(0, lambda *_: lambda batch, _: add_sequences(batch)))
        return writers

    def _writer(self, name: str, column: Column, mask: str | None) -> Writer:
        if isinstance(column, Ragged):
            return self._ragged(name, column, mask)
        if mask is not None and name in self._asked_masks:
            raise no_mask(mask)
        if isinstance(column, Opaque):
            return object_writer(name, column.values)
        dtype = self._dtype(name, column.values, ragged=False)
        _check_even(column.values, dtype)
        return even_writer(name, column.values, dtype)

    def _ragged(self, name: str, column: Ragged, mask: str | None) -> Writer:
        rule = self._rule_of(name)
        values, lengths = column.values, column.lengths
        dtype = self._dtype(name, values, ragged=True)
        ends = np.cumsum(lengths)
        size = values[:1].size or 1
        check_fit(values, dtype, lambda at: int(np.searchsorted(ends * size, at, side="right")))
        found = RaggedRows(
            values,
            ends - lengths,
            lengths,
            self._pad_value(name, dtype),
            dtype=dtype,
            max_length=rule.max_length,
            multiple=rule.pad_to_multiple_of or 1,
            padding_side=rule.padding_side or self._side_below,
            truncation_side=rule.truncation_side or "right",
            mask=None if mask is None else np.int64,
        )
        return ragged_writer(name, found, mask)

    def _dtype(self, name: str, values: Any, ragged: bool) -> np.dtype[Any]:
        own, asked, found = self._rule_of(name).numpy, self._asked, values.dtype
        padded = ragged or (self._pack is not None and values.ndim == 2)
        if own is not None or (found.kind == asked.kind == "f"):
            return own or asked
        if found.kind in "iu" and (padded or values.ndim == 1):
            return np.dtype(np.int64) if asked.kind == "f" or not padded else asked
        return (
            np.dtype(np.float32) if padded and found.kind == "f" and found.itemsize > 2 else found
        )

    def _pad_value(self, name: str, dtype: np.dtype[Any]) -> float:
        own = self._rules[name].value if name in self._rules else None
        value = FIXED.get(name, self.value) if own is None else own
        tokenize = self._id_columns.get(name)
        if value is None and tokenize is not None:
            if self._pack is None and not tokenize.says_pad_id:
                raise ConfigError(
                    f"{self}: column {name!r} is padded with the tokenizer's pad token, and "
                    f"{tokenize.maker} is a function, which does not tell its pad token: give "
                    "pad_collate(value=...)"
                )
            value = tokenize.pad_id if self._pack is None else self._pack.fill_id
        if value is None:
            return 0
        try:
            fits = dtype.kind == "f" or np.array(value).astype(dtype).item() == value
        except (OverflowError, ValueError):
            fits = False
        if not fits or (dtype.kind == "u" and value < 0):
            raise ConfigError(
                f"{self}: column {name!r} is padded with {value}, which {dtype} cannot hold; give "
                f"columns={{{name!r}: {{'value': …}}}}"
            )
        return value


def _check_even(values: Any, dtype: np.dtype[Any]) -> None:
    size = values[:1].size
    check_fit(values, dtype, lambda place: place // size)


def _all(ids: IntArray) -> IntArray:
    return np.array([0, len(ids)], dtype=np.int64)


def _writes(writers: Writers, index: IntArray | None, bounds: IntArray) -> Sequence[Write]:
    return [writer.writes(index, bounds) for writer in writers]


def _batch(writes: Sequence[Write], place: int) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for write in writes:
        write(batch, place)
    return batch
