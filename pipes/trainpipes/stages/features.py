"""Columns of tables as models take them: numbers of about the same size, and ids of categories."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell
from trainpipes.columns.run import Run
from trainpipes.interfaces.read_columns import naming
from trainpipes.interfaces.stage import made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import row_table
from trainpipes.stages.fitted_columns import (
    FIRST_ID,
    NULL_ID,
    UNKNOWN_ID,
    Category,
    FittedColumns,
    as_identity,
    chosen,
    known_categories,
    means_and_deviations,
)
from trainpipes.stages.labels import LabelColumn

#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)


class NormalizeColumns(RunStage, takes="columns"):
    """Turn columns of numbers into float32 with mean 0 and deviation 1: ``(x - mean) / std``.

    Numbers are integers, floats, bools, decimals, dates, times and durations, as ``collate`` takes them. A
    column whose values were all equal has ``std`` 0, and becomes ``x - mean``, which is 0 for these.

    Args:
        numbers: mean and deviation of each column, ``{"age": {"mean": 38.2, "std": 11.5}}``; what
            ``fit_columns`` found, on the training part; or the path of a file that it saved.
        columns: those of them to normalize; all if left out.
        nulls: what nulls and NaN become: "mean" is 0, the mean; "nan" is NaN; by default they are an
            error.

    Raises:
        DataError: a null or NaN, unless ``nulls`` allows it; an infinite number; a
            result that float32 cannot hold.
        SchemaError: a column is not there, or holds no numbers.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"age": 20, "city": "Rome"}, {"age": 60, "city": "Oslo"}])
    >>> list(rows.normalize_columns(rows.fit_columns(["age"])))
    [{'age': -1.0, 'city': 'Rome'}, {'age': 1.0, 'city': 'Oslo'}]
    """

    thread_safe = True

    numbers: Mapping[str, Mapping[str, float]] | FittedColumns | str | os.PathLike[str]
    _: KW_ONLY
    columns: checks.ColumnNames | None = None
    nulls: Literal["raise", "mean", "nan"] = "raise"

    def check(self) -> None:
        if isinstance(self.numbers, FittedColumns):
            self._set(
                numbers={name: dict(moments) for name, moments in self.numbers.numbers.items()}
            )
        if self.columns is not None:
            self._set(columns=checks.column_names(self.columns, "normalize_columns(columns)"))
        chosen(self._known, self.columns, "normalize_columns(columns)")

    @made_once
    def _known(self) -> dict[str, tuple[float, float]]:
        return means_and_deviations(self.numbers, "normalize_columns(numbers)")

    @made_once
    def _pairs(self) -> dict[str, tuple[float, float]]:
        names = chosen(self._known, self.columns, "normalize_columns(columns)")
        return {name: self._known[name] for name in names}

    def identity(self) -> dict[str, Any]:
        pairs = {name: list(pair) for name, pair in self._pairs.items()}
        identity = {**super().identity(), "numbers": as_identity(pairs)}
        identity.pop("columns", None)
        return identity

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, list(self._pairs))
        for name, (mean, std) in self._pairs.items():
            with naming(name, self, block.ids):
                numbers = self._normalized(table[name], mean, std)
            place = table.column_names.index(name)
            table = table.set_column(place, name, arrays.to_arrow(numbers))
        return run.with_block(block.with_data(table))

    def _normalized(self, column: pa.ChunkedArray, mean: float, std: float) -> arrays.Array:
        values, missing = floats_of(column)
        if self.nulls == "raise" and missing.any():
            way = 'pass nulls="mean", fill it with with_columns(), or drop such rows with filter()'
            raise BadCell(int(np.argmax(missing)), f"is null or NaN, which has no size: {way}")
        refuse_infinite(values)
        numbers = (values - mean) / (std or 1.0)
        if missing.any():
            numbers[missing] = 0.0 if self.nulls == "mean" else np.nan
        if numbers.size and (large := np.abs(numbers) > LARGEST).any():
            row = int(np.argmax(large))
            said = f"is {values[row]}, which float32 cannot hold when normalized"
            raise BadCell(row, f"{said}: drop such rows with filter()")
        return numbers.astype(np.float32)


def floats_of(column: Any) -> tuple[arrays.Array, Any]:
    """Numbers as float64 ``[rows]``, 0 where there is none; and where there is none, bool ``[rows]``."""
    array = arrays.one_chunk(column)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = arrays.as_numbers(array)
    if pa.types.is_null(array.type):
        array = array.cast(pa.float64())
    if not arrays.is_number(array.type):
        way = "encode_categories() makes ids of texts; leave the column out, or make numbers of it"
        raise BadCell(None, f"must hold numbers, got {array.type}: {way} by with_columns()")
    missing = np.zeros(len(array), dtype=np.bool_)
    if array.null_count:
        missing = arrays.to_numpy(array.is_null())
        array = array.fill_null(pa.scalar(0).cast(array.type))
    values = arrays.to_numpy(array).astype(np.float64)
    if values.dtype.kind == "f" and (nan := np.isnan(values)).any():
        missing, values = missing | nan, np.where(nan, 0.0, values)
    return values, missing


def refuse_infinite(values: arrays.Array) -> None:
    infinite = np.isinf(values)
    if infinite.any():
        row = int(np.argmax(infinite))
        way = "cut it by with_columns(), or drop such rows with filter()"
        raise BadCell(row, f"is {values[row]}, which has no place beside other numbers: {way}")


class EncodeCategories(RunStage, takes="columns"):
    """Turn columns of categories into ids, int64, for ``Embedding`` and ``EmbeddingBag``.

    Categories are texts, integers, bools, or lists of these. 0 is null, 1 is any value that is not known,
    and the known ones are numbered from 2 on, in the order given. NaN is null, and a list that is null has
    no ids. To have unknown values refused, as of classes to predict, use ``encode_labels``.

    Args:
        categories: the known values of each column, ``{"city": ["Paris", "Rome"]}``; what
            ``fit_columns`` found, on the training part; or the path of a file that it saved, which is
            for many values.
        columns: those of them to encode; all if left out.

    Raises:
        DataError: a number that is not whole.
        SchemaError: a column is not there, or holds other values.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"city": "Rome"}, {"city": "Oslo"}, {"city": None}])
    >>> list(rows.encode_categories({"city": ["Paris", "Rome"]}))
    [{'city': 3}, {'city': 1}, {'city': 0}]
    """

    thread_safe = True

    categories: Mapping[str, Sequence[Category]] | FittedColumns | str | os.PathLike[str]
    _: KW_ONLY
    columns: checks.ColumnNames | None = None

    def check(self) -> None:
        if isinstance(self.categories, FittedColumns):
            self._set(
                categories={n: list(names) for n, names in self.categories.categories.items()}
            )
        if self.columns is not None:
            self._set(columns=checks.column_names(self.columns, "encode_categories(columns)"))
        chosen(self._known, self.columns, "encode_categories(columns)")

    @made_once
    def _known(self) -> dict[str, list[Category]]:
        return known_categories(self.categories, "encode_categories(categories)")

    @made_once
    def _ids(self) -> dict[str, KnownIds]:
        names = chosen(self._known, self.columns, "encode_categories(columns)")
        return {name: KnownIds(self._known[name]) for name in names}

    @property
    def sizes(self) -> dict[str, int]:
        """How many ids each column has: the rows of its ``Embedding``."""
        names = chosen(self._known, self.columns, "encode_categories(columns)")
        return {name: FIRST_ID + len(self._known[name]) for name in names}

    def identity(self) -> dict[str, Any]:
        names = chosen(self._known, self.columns, "encode_categories(columns)")
        known = {name: self._known[name] for name in names}
        identity = {**super().identity(), "categories": as_identity(known)}
        identity.pop("columns", None)
        return identity

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, list(self._ids))
        for name, known in self._ids.items():
            column = LabelColumn(table[name], name, self, block.ids, nulls=True)
            ids = known.of(column.values)
            encoded = arrays.to_arrow(ids)
            if column.lengths is not None:
                encoded = arrays.list_array(ids, column.lengths)
            table = table.set_column(table.column_names.index(name), name, encoded)
        return run.with_block(block.with_data(table))


class KnownIds:
    """The ids of known values, texts or integers."""

    def __init__(self, known: Sequence[Category]) -> None:
        self._texts = {v: n for n, v in enumerate(known, FIRST_ID) if isinstance(v, str)}
        numbers = [(v, n) for n, v in enumerate(known, FIRST_ID) if not isinstance(v, str)]
        pairs = np.array(sorted(numbers), dtype=np.int64).reshape(-1, 2)
        self._numbers, self._number_ids = pairs[:, 0].copy(), pairs[:, 1].copy()

    def of(self, values: pa.Array) -> IntArray:
        """The id of each value, int64."""
        if arrays.is_text(values.type):
            coded = values.dictionary_encode()
            known = [self._texts.get(text, UNKNOWN_ID) for text in coded.dictionary.to_pylist()]
            places = arrays.to_numpy(coded.indices.fill_null(len(known)))
            return np.array([*known, NULL_ID], dtype=np.int64)[places]
        null = arrays.to_numpy(values.is_null())
        numbers = (
            arrays.to_numpy(values.fill_null(0)) if values.null_count else arrays.to_numpy(values)
        )
        ids = np.full(len(numbers), UNKNOWN_ID, dtype=np.int64)
        if len(self._numbers):
            places = np.searchsorted(self._numbers, numbers).clip(max=len(self._numbers) - 1)
            same = self._numbers[places] == numbers
            ids[same] = self._number_ids[places[same]]
        ids[null] = NULL_ID
        return ids
