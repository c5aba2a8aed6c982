"""Columns of tables as models take them, numbers of about the same size and ids of categories; and what was
found of columns for that before a training: means and deviations, ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import Report, nearest
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, MissingFilesError, shown
from trainpipes.filesystems.places import write_text
from trainpipes.interfaces.read_columns import naming, refused
from trainpipes.interfaces.stage import made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import row_table
from trainpipes.stages.labels import LabelColumn, as_label

Category: TypeAlias = "str | int"
#: The ids of values that are no known category; known ones are numbered from ``FIRST_ID`` on.
NULL_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
#: The units of dates and times, in nanoseconds.
UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "D": 86_400 * 10**9}
#: Categories of a column that a text shows.
MOST_SHOWN = 5
#: Up to so many bytes of JSON, a state holds the options themselves, so that an error can show them.
SHOWN_BYTES = 1024


@dataclass(frozen=True)
class FittedColumns(Report):
    """Means and deviations of columns of numbers, and ids of categories, as ``Pipeline.fit_columns`` finds
    them. Prints as text.

    Attributes:
        rows: how many were looked at.
        numbers: ``{"mean": ..., "std": ..., "nulls": ...}`` of each column, for ``normalize_columns``: of
            all values but nulls and NaN; ``std`` over all of them, as in scikit-learn's ``StandardScaler``.
            Of dates and times also ``"unit"``: "D", "s", "ms", "us" or "ns".
        categories: the known values of each column in the order of their ids, the most frequent first, for
            ``encode_categories``.
        counts: in how many rows each of these came, or how often in lists.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"city": "Rome"}, {"city": "Oslo"}, {"city": "Rome"}])
    >>> rows.fit_columns(categories="city").categories
    {'city': ['Rome', 'Oslo']}
    """

    rows: int
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    categories: dict[str, list[Category]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ids each column of categories has: the rows of its ``Embedding``."""
        return {name: FIRST_ID + len(known) for name, known in self.categories.items()}

    def denormalize(self, column: str, values: Any) -> Any:
        """A number, an array, a list (as an array) or a tensor as before ``normalize_columns``.

        >>> FittedColumns(3, {"price": {"mean": 10.0, "std": 2.0}}).denormalize("price", 0.5)
        11.0
        """
        if column not in self.numbers:
            there = f"there are {shown([*self.numbers])}"
            raise ConfigError(
                f"denormalize(column) must be a column of numbers, got {column!r}; {there}"
            )
        mean, std = self.numbers[column]["mean"], self.numbers[column]["std"]
        numbers = np.asarray(values) if isinstance(values, list | tuple) else values
        return numbers * (std or 1.0) + mean

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file with a line for each column of numbers and for each category, with its id, its
        value and its count. The stages take its path.
        """
        write_text(path, _written(self), "save")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FittedColumns:
        """Read a file that ``save`` wrote.

        Raises:
            MissingFilesError: there is no such file.
            ConfigError: the file holds something else.
        """
        place = Path(checks.local_path(path, "load(path)")).expanduser()
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
            listed = {name: list(zip(*entries, strict=True)) or [(), (), ()]
                for name, entries in content["categories"].items()}  # fmt: skip
            categories = {name: list(columns[1]) for name, columns in listed.items()}
            counts = {name: list(columns[2]) for name, columns in listed.items()}
            return FittedColumns(content["rows"], content["numbers"], categories, counts)
        except FileNotFoundError:
            way = "pipe.fit_columns(...).save(path) writes one; columns are given as a dict"
            raise MissingFilesError(f"no file {place}: {way}", path=str(place)) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            rule = "must be a file that FittedColumns.save wrote"
            raise ConfigError(f"load(path) {rule}, got {place}: {error}") from error

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("rows", f"{self.rows:,}")]
        for name, found in self.numbers.items():
            nulls = f", {found['nulls']:,.0f} nulls" if found.get("nulls") else ""
            rows.append((name, f"mean {found['mean']:g}, deviation {found['std']:g}{nulls}"))
        for name, known in self.categories.items():
            pairs = zip(known[:MOST_SHOWN], self.counts[name], strict=False)
            said = [
                f"{n}: {value!r} ({count:,})" for n, (value, count) in enumerate(pairs, FIRST_ID)
            ]
            said += [f"and {len(known) - MOST_SHOWN:,} more"] * (len(known) > MOST_SHOWN)
            rows.append((name, ", ".join([f"{NULL_ID}: null, {UNKNOWN_ID}: others", *said])))
        return rows


def _written(fitted: FittedColumns) -> str:
    """JSON with a line for each entry."""
    numbers = _lines(
        "{", [f"{json.dumps(n)}: {json.dumps(v)}" for n, v in fitted.numbers.items()], "}", 1
    )
    columns = []
    for name, known in fitted.categories.items():
        entries = zip(
            range(FIRST_ID, FIRST_ID + len(known)), known, fitted.counts[name], strict=True
        )
        lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
        columns.append(f"{json.dumps(name)}: {_lines('[', lines, ']', 2)}")
    parts = [f'"rows": {fitted.rows}', f'"numbers": {numbers}']
    return _lines("{", [*parts, f'"categories": {_lines("{", columns, "}", 1)}'], "}", 0) + "\n"


def _lines(begin: str, lines: Sequence[str], end: str, depth: int) -> str:
    if not lines:
        return begin + end
    inner = ",\n".join("  " * (depth + 1) + line for line in lines)
    return f"{begin}\n{inner}\n{'  ' * depth}{end}"


def means_and_deviations(
    option_value: Any, option: str
) -> dict[str, tuple[float, float, str | None]]:
    """Mean, deviation and unit of each column, of ``FittedColumns.numbers``, or of a file of these."""
    numbers = option_value
    if isinstance(option_value, str | os.PathLike):
        numbers = FittedColumns.load(option_value).numbers
    rule = 'a dict such as {"age": {"mean": 38.2, "std": 11.5}}, or a file that FittedColumns.save wrote'
    way = "pipe.fit_columns(numbers=[...]) finds them"
    checks.require(isinstance(numbers, Mapping) and len(numbers), option, rule, option_value, way)
    known = {}
    for name, values in numbers.items():
        checks.require(checks.is_name(name), option, rule, option_value, way)
        moments: Any = values if isinstance(values, Mapping) else {}
        mean, std = moments.get("mean"), moments.get("std")
        good = checks.is_finite(mean) and checks.is_finite(std) and std >= 0
        checks.require(good, option, f"{rule}, with finite numbers", {name: values}, way)
        unit = moments.get("unit")
        checks.require(
            unit in (None, *UNITS), option, f"of a unit among {[*UNITS]}", {name: values}
        )
        known[name] = (float(mean), float(std), unit)
    return known


def known_categories(option_value: Any, option: str) -> dict[str, list[Category]]:
    """The known values of each column, as ``FittedColumns.categories``, or of a file of these."""
    categories = option_value
    if isinstance(option_value, str | os.PathLike):
        categories = FittedColumns.load(option_value).categories
    rule = (
        'a dict of columns and their values, such as {"city": ["Paris", "Rome"]}, or a file that '
    )
    rule += "FittedColumns.save wrote"
    way = "pipe.fit_columns(categories=[...]) finds them"
    checks.require(
        isinstance(categories, Mapping) and len(categories), option, rule, option_value, way
    )
    known = {}
    for name, values in categories.items():
        good = checks.is_name(name) and checks.several(values)
        checks.require(good, option, rule, option_value, way)
        for value in values:
            valid = isinstance(value, str | int)
            checks.require(valid, option, f"{rule}; values are texts, integers or bools", value)
            small = isinstance(value, str) or -(2**63) <= value < 2**63
            checks.require(small, option, "texts, or integers of 64 bits", value)
        labels: Any = [as_label(value, option) for value in values]  # True and False are 1 and 0
        twice = checks.repeated(labels)
        checks.require(not twice, option, "values that differ", twice[:1], "name each once")
        known[name] = labels
    return known


def chosen(known: Mapping[str, Any], columns: Sequence[str] | None, option: str) -> list[str]:
    """Those of the columns that are known, all if None."""
    if columns is None:
        return list(known)
    for name in columns:
        way = f"there are {shown([*known])}{nearest(name, list(known))}"
        checks.require(name in known, option, "columns that were fitted", name, way)
    return list(columns)


def as_identity(value: Any) -> Any:
    """A value in an identity: itself, or a digest of much."""
    text = json.dumps(value)
    if len(text) <= SHOWN_BYTES:
        return value
    return f"{len(value)} columns:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)


class NormalizeColumns(RunStage, takes="columns"):
    """Turn columns of numbers into float32 with mean 0 and deviation 1: ``(x - mean) / std``. ``collate``
    makes float64 of all floats, ``collate(dtype=torch.float32)`` leaves them as they are.

    Numbers are integers, floats, bools, decimals, dates, times and durations, as ``collate`` takes them. A
    column whose values were all equal has ``std`` 0, and becomes ``x - mean``, which is 0 for these. Dates
    and times of another unit than those that were fitted count in that of these.

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

    numbers: Mapping[str, Mapping[str, Any]] | FittedColumns | str | os.PathLike[str]
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
    def _known(self) -> dict[str, tuple[float, float, str | None]]:
        return means_and_deviations(self.numbers, "normalize_columns(numbers)")

    @made_once
    def _chosen(self) -> dict[str, tuple[float, float, str | None]]:
        names = chosen(self._known, self.columns, "normalize_columns(columns)")
        return {name: self._known[name] for name in names}

    def identity(self) -> dict[str, Any]:
        pairs = {name: [mean, std] for name, (mean, std, _) in self._chosen.items()}
        identity = {**super().identity(), "numbers": as_identity(pairs)}
        identity.pop("columns", None)
        return identity

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, list(self._chosen))
        for name, found in self._chosen.items():
            with naming(name, self, block.ids):
                numbers = self._normalized(table[name], *found)
            place = table.column_names.index(name)
            table = table.set_column(place, name, arrays.to_arrow(numbers))
        return run.with_block(block.with_data(table))

    def _normalized(
        self, column: pa.ChunkedArray, mean: float, std: float, unit: str | None
    ) -> arrays.Array:
        values, missing = floats_of(column, unit)
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


def unit_of(kind: pa.DataType) -> str | None:
    """What numbers of a column of dates or times count; None for others."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_date(kind):
        return "D"
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return kind.unit if is_time else None


def floats_of(column: Any, unit: str | None = None) -> tuple[arrays.Array, Any]:
    """Numbers as float64 ``[rows]``, 0 where there is none; and where there is none, bool ``[rows]``. Dates
    and times count in ``unit``, if it is given.
    """
    array = arrays.one_chunk(column)
    own = unit_of(array.type)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if pa.types.is_dictionary(array.type):
        array = arrays.decoded(array)
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
    if own is not None and unit is not None and own != unit:
        more, less = UNITS[own], UNITS[unit]
        values = values * (more // less) if more > less else values / (less // more)
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
        SchemaError: a column is not there, or holds other values; or numbers, where all known values are
            texts, or the other way around.

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
            if said := known.unlike(column.values):
                kind = table[name].type
                raise refused(
                    self, f": column {name!r} holds {kind}, and its known values are {said}"
                )
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

    def unlike(self, values: pa.Array) -> str:
        """Where no value can be known by its type, the type of those that are, and what to do; else ""."""
        if values.null_count == len(values):
            return ""
        has_numbers = len(self._numbers) > 0
        if arrays.is_text(values.type):
            said = "integers: make integers of it, or fit it as text"
            return said if has_numbers and not self._texts else ""
        said = "texts: read it as text, as by read_csv(schema=...)"
        return said if self._texts and not has_numbers else ""

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
