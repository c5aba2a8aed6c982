"""What ``map_batches`` and ``with_columns`` share: a function of the columns of many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import Function
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.columns import from_columns, untyped_columns
from trainpipes.columns.rectangles import RaggedRows
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.first_rows import find_schema
from trainpipes.errors import ConfigError, DataError, SchemaError, TrainpipesError
from trainpipes.kinds.blame import at_row, blame
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.columns import columns_as
from trainpipes.stages.varlen import add_sequences

CURE = "have the function return Arrow arrays of a type, pa.array(values, pa.string())"
Format = Literal["arrow", "numpy", "torch"]


class ColumnFunction(RunStage):
    """A stage that calls a function with the columns of many rows, which returns columns.

    Args:
        fn: the function.
        format: what it takes.
        version: names it in states; see ``map``.
        thread_safe: whether several threads may call it at once; see ``map``.
    """

    needs_columns = True
    finds_types = True
    asks_inputs = True
    versioned = "fn"
    free = frozenset({"thread_safe"})
    draws_by = (
        "draw in a map(fn, rng=True) before it, or in a TableStage, whose open() gets the numbers and "
        "epochs of the rows (docs/extend.md has an example)"
    )

    fn: Function
    _: KW_ONLY
    format: Format = "arrow"
    version: str | None = None
    thread_safe: bool = False

    def returned(self, run: Run) -> pa.Table:
        """The columns that the function returns for the rows of a run: one row for each.

        Raises:
            ConfigError: the run is of finished batches.
            DataError: there are more rows or fewer, or a null for which the format has no place.
            SchemaError: it returned what makes no columns.
        """
        if run.items is not None:
            raise ConfigError(
                f"{self} must come before pad_collate() or collate(), which make tensors of "
                "columns; after them use map()"
            )
        columns = columns_as(run.block, self.format, self)
        try:
            fn = self._draw_watch.around(self.fn)
            data = from_columns(fn(columns), self, self._type)
        except BadCell as bad:
            raise at_row(f"{self}: {bad}", self, run.block.ids[bad.row or 0], SchemaError) from None
        except TrainpipesError as error:
            place = 0
            if error.path is None and error.row is not None:  # of those that the function got
                place, error.row = min(error.row, len(run.block) - 1), None
            blame(error, self, int(run.block.ids[place]))
            raise
        except Exception as error:
            blame(error, self, int(run.block.ids[0]))
            raise
        if len(data) != len(run.block):
            raise DataError(
                f"{self}: the function gives one row for each row it gets, got {len(run.block)} rows "
                f"and returned {len(data)}; to drop rows use filter()",
                stage=str(self),
            )
        return data

    def _type(self, name: str) -> pa.DataType | None:
        """The type of a column that the function returns as a list of Python values: that of the first
        rows, as for rows that are Python objects."""
        inputs = self.plan_inputs
        key = f"{self.name}-{inputs.chain.stages.index(self)}"

        def find() -> pa.Schema:
            steps = inputs.chain.steps
            below = steps[: steps.index(self)]
            return find_schema(inputs, below, str(self), CURE, self._untyped)

        schema = inputs.schemas.get(key, find)
        return schema.field(name).type if name in schema.names else None

    def _untyped(self, block: Block) -> list[dict[str, Any]]:
        """Columns that the function returns as Python values, for some rows."""
        columns = untyped_columns(self.fn(columns_as(block, self.format, self)))
        if not columns:
            return []
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]


#: Puts a column into a batch, given its number.
Write: TypeAlias = Callable[[dict[str, Any], int], None]


class Writer(Protocol):
    """A column of many rows."""

    @property
    def row_bytes(self) -> float:
        """Bytes that an average row takes in a batch; inf where Python objects are made."""
        ...

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        """What puts the column into batches of some rows.

        Args:
            index: the rows, int64 ``[rows]``; None for all.
            bounds: first of them in each batch, and the end, int64 ``[batches + 1]``.
        """
        ...


class RaggedWriter:
    """Lists of numbers, padded."""

    def __init__(self, name: str, rows: RaggedRows, mask: str | None) -> None:
        self._name, self._rows, self._mask = name, rows, mask

    @property
    def row_bytes(self) -> float:
        return self._rows.average_bytes

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        rectangles, name, mask = self._rows.rectangles(index, bounds), self._name, self._mask

        def write(batch: dict[str, Any], k: int) -> None:
            cells, real = rectangles[k]
            batch[name] = torch.from_numpy(cells)
            if mask is not None and real is not None:
                batch[mask] = torch.from_numpy(real)

        return write


class EvenWriter:
    """Numbers, or arrays of one shape."""

    def __init__(self, name: str, values: Any, dtype: np.dtype[Any]) -> None:
        self._name, self._values, self._dtype = name, values, dtype

    @property
    def row_bytes(self) -> float:
        return float(np.prod(self._values.shape[1:], dtype=np.int64)) * self._dtype.itemsize

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        edges, name, dtype = bounds.tolist(), self._name, self._dtype
        small = self._values.ndim == 1
        values = self._values if index is None or not small else self._values[index]

        def write(batch: dict[str, Any], k: int) -> None:
            rows = slice(edges[k], edges[k + 1])
            some = values[rows] if index is None or small else values[index[rows]]
            batch[name] = torch.from_numpy(np.array(some, dtype=dtype, order="C"))

        return write


class ObjectWriter:
    """Anything else: a list."""

    row_bytes = float("inf")

    def __init__(self, name: str, objects: Sequence[Any] | pa.Array) -> None:
        self._name, self._objects = name, objects

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        edges, name, objects = bounds.tolist(), self._name, self._objects
        if isinstance(objects, pa.Array):
            some = objects if index is None else objects.take(to_arrow(index))
            objects = some.to_pylist()
        elif index is not None:
            objects = [objects[row] for row in index.tolist()]

        def write(batch: dict[str, Any], k: int) -> None:
            batch[name] = list(objects[edges[k] : edges[k + 1]])

        return write


class SequencesWriter:
    """Where the documents of packed rows start."""

    row_bytes = 0.0

    def writes(self, index: IntArray | None, bounds: IntArray) -> Write:
        return lambda batch, _: add_sequences(batch)
