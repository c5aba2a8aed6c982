"""What normalizing and encoding need to know of columns, found by a pass: ``Pipeline.fit_columns``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import floor, isfinite, log10
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal import checks
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell
from trainpipes.columns.run import Run
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.read_columns import naming
from trainpipes.interfaces.stage import Stage
from trainpipes.look.lengths import Numbered, look_through
from trainpipes.look.stats import AGAIN, ENDING, MOST_VALUES, ORDERING, ROWS, order_counts
from trainpipes.stages.batch import Batch
from trainpipes.stages.columns import row_table
from trainpipes.stages.features import FittedColumns, floats_of, refuse_infinite, unit_of
from trainpipes.stages.labels import LabelColumn
from trainpipes.stages.order import Take

#: Stages without which the first rows are as well mixed.
MOVING = kinds.ShardStage | kinds.RepeatStage | kinds.DeviceStage
#: Digits of a mean beyond the first digit of the deviation: machines add up in different orders.
DIGITS = 6


@dataclass
class Moments:
    """Sums of numbers, less the first number, so that nothing is lost beside large means."""

    first: float | None = None
    count: int = 0
    nulls: int = 0
    mean: float = 0.0
    squares: float = 0.0
    unit: str | None = None  # of dates and times

    def add(self, column: Any) -> None:
        self.unit = self.unit or unit_of(column.type)
        numbers, missing = floats_of(column, self.unit)
        refuse_infinite(numbers)
        self.nulls += int(missing.sum())
        values = numbers[~missing] if missing.any() else numbers
        if not len(values):
            return
        self.first = float(values[0]) if self.first is None else self.first
        with np.errstate(over="ignore", invalid="ignore"):
            values = values - self.first
            mean = float(values.mean())
            squares = float(((values - mean) ** 2).sum())
        total = self.count + len(values)
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.count * len(values) / total
        if not isfinite(self.squares):
            row = int(np.argmax(np.abs(numbers)))
            way = "cut it by with_columns(), or drop such rows with filter()"
            raise BadCell(row, f"is {numbers[row]}, too large to have a deviation: {way}")
        self.mean += apart * len(values) / total
        self.count = total

    def found(self, name: str) -> dict[str, Any]:
        if self.first is None:
            rule = f"fit_columns(numbers): column {name!r} must hold a number, got nulls only"
            raise DataError(f"{rule}; leave the column out")
        mean, std = self.first + self.mean, float(np.sqrt(self.squares / self.count))
        if std:
            digits = DIGITS - floor(log10(std))
            mean, std = round(mean, digits), round(std, digits)
        unit = {} if self.unit is None else {"unit": self.unit}
        return {"mean": mean, "std": std, "nulls": self.nulls, **unit}


@dataclass
class Tables:
    """How often each value of a column came, added up before there are too many."""

    parts: list[pa.Table] = field(default_factory=list)
    most: int = MOST_VALUES

    def add(self, values: pa.Array) -> None:
        counted = values.drop_null().value_counts()
        names = ["value", "count"]
        self.parts.append(pa.Table.from_arrays([*counted.flatten()], names=names))
        if sum(map(len, self.parts)) > self.most:
            self.parts = [self.whole()]
            self.most = max(self.most, 2 * len(self.parts[0]))

    def whole(self) -> pa.Table:
        joined = pa.concat_tables(self.parts, promote_options="permissive")
        summed = joined.group_by("value").aggregate([("count", "sum")])
        return summed.rename_columns({"count_sum": "count"})

    def found(self, min_count: int, max_size: int | None) -> tuple[list[Any], list[int]]:
        ordered = self.whole().sort_by([("count", "descending"), ("value", "ascending")])
        counts = arrays.to_numpy(ordered["count"])
        most = int((counts >= min_count).sum())
        common = ordered.slice(0, most if max_size is None else min(most, max_size))
        return common["value"].to_pylist(), common["count"].to_pylist()


class FitColumns(kinds.RunStage, takes="columns"):
    """Looks at the numbers and the categories of the rows that pass."""

    numbers: dict[str, Moments]
    categories: dict[str, Tables]

    def __repr__(self) -> str:
        return "fit_columns()"

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, [*self.numbers, *self.categories])
        for name, moments in self.numbers.items():
            with naming(name, self, block.ids):
                moments.add(table[name])
        for name, counts in self.categories.items():
            counts.add(LabelColumn(table[name], name, self, block.ids, nulls=True).values)
        return run


def fit_columns(
    pipeline: Record,
    numbers: str | Sequence[str] | None,
    categories: str | Sequence[str] | None,
    rows: int | None,
    min_count: int,
    max_size: int | None,
) -> FittedColumns:
    """See ``Pipeline.fit_columns``."""
    options = {"numbers": numbers, "categories": categories}
    names = {option: checks.column_names(value, f"fit_columns({option})")
        for option, value in options.items() if value is not None}  # fmt: skip
    checks.require(names, "fit_columns()", "given numbers or categories", None)
    checks.whole_number(min_count, 1, "fit_columns(min_count)")
    for option, most in (("rows", rows), ("max_size", max_size)):
        if most is not None:
            checks.whole_number(most, 1, f"fit_columns({option})")
    moments = {name: Moments() for name in names.get("numbers", ())}
    tables = {name: Tables() for name in names.get("categories", ())}
    stage = FitColumns(moments, tables)
    plan = Plan.of(
        [*_below(pipeline, rows, [*moments, *tables]), stage, Batch(ROWS), Numbered()], quiet=True
    )
    if plan.chain.opener.traits.read_once or (plan.chain.has_no_end and rows is None):
        why = "can be read only once" if plan.chain.opener.traits.read_once else "have no end"
        rule = f"rows that can all be read before training, got some that {why}"
        raise ConfigError(f"fit_columns() must have {rule}; fit on their source, or pass rows=")
    if not (looked_at := look_through(plan, "fitting columns")):
        raise DataError(
            "fit_columns() must have rows to look at, got none; check what leaves rows out, or name files "
            "that have some"
        )
    known = {name: measured.found(min_count, max_size) for name, measured in tables.items()}
    return FittedColumns(
        looked_at,
        {name: measured.found(name) for name, measured in moments.items()},
        {name: values for name, (values, _) in known.items()},
        {name: counts for name, (_, counts) in known.items()},
    )


def _below(pipeline: Record, rows: int | None, columns: Sequence[str]) -> list[Stage]:
    """The stages that rows come from, of which only these columns are read where that can be said."""
    stages = list(takewhile(lambda stage: not isinstance(stage, ENDING), pipeline._stages))
    without = AGAIN if order_counts(stages) else ORDERING
    stages = [s._fresh() for s in kinds.without(stages, without if rows is None else MOVING)]
    reader: Any = stages[-1]
    if isinstance(reader, kinds.ReadingSource) and reader.options.get("columns", ()) is None:
        stages[-1] = reader._replaced(columns=list(dict.fromkeys(columns)))
    return stages if rows is None else [*stages, Take(rows)]
