"""What is fitted once on a table's columns: scales of numbers, and vocabularies of categories.

>>> import trainpipes as tp
>>> ages, cities = [20, 40, None], ["Rome", "Oslo", None]
>>> rows = tp.from_dataset([{"age": a, "city": c} for a, c in zip(ages, cities)])
>>> fit = TableFit.of(rows, numeric=["age"], categorical=["city"])
>>> fit.numeric[0]
Numeric(name='age', mean=30.0, std=10.0, min=20.0, max=40.0, missing=1)
>>> fit.categorical[0].values, fit.cardinalities
(('Oslo', 'Rome'), [4])
>>> TableFit.from_json(fit.to_json()) == fit
True
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes import ConfigError, DataError, Pipeline, TableStage
from trainpipes_recipes.inputs import in_file_order
from trainpipes_recipes.tables.columns import categories_of, numbers_of

__all__ = ["MISSING", "UNKNOWN", "Categorical", "Numeric", "TableFit"]

#: Codes of categories: of one that the fit has not seen, of none at all; those that it has seen follow.
UNKNOWN, MISSING, FIRST = 0, 1, 2
#: Rows that are looked at together.
ROWS = 65_536
#: More different values than these are no categories, and would fill the memory.
MOST_VALUES = 1 << 22
#: Up to so many bytes of JSON, a state holds a vocabulary itself, so that an error can show it.
SHOWN_BYTES = 1024


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, over its values that are not missing; all 0 where there is none.

    Attributes:
        name: of the column.
        mean: of its values.
        std: standard deviation, of all values (divided by n, as scikit-learn's StandardScaler does).
        min: the least value.
        max: the greatest.
        missing: how many are null or NaN.
    """

    name: str
    mean: float
    std: float
    min: float
    max: float
    missing: int


@dataclass(frozen=True)
class Categorical:
    """A column of categories.

    Attributes:
        name: of the column.
        values: in sorted order, which is that of their codes from 2 on.
    """

    name: str
    values: tuple[str | int, ...]

    @cached_property
    def codes(self) -> dict[str | int, int]:
        """The code of each value."""
        return {value: code for code, value in enumerate(self.values, FIRST)}


@dataclass(frozen=True)
class TableFit:
    """Scales and vocabularies of a table's columns, to be used again as they are: for evaluation, and
    wherever the model runs.

    Attributes:
        rows: that were looked at.
        numeric: columns of numbers, in the order of the batch's.
        categorical: columns of categories, in the order of the batch's.
    """

    rows: int
    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @property
    def cardinalities(self) -> list[int]:
        """Codes of each categorical column: the rows of its ``torch.nn.Embedding``."""
        return [len(column.values) + FIRST for column in self.categorical]

    @classmethod
    def of(
        cls,
        rows: Pipeline,
        numeric: Sequence[str] = (),
        categorical: Sequence[str] = (),
        *,
        min_count: int = 1,
    ) -> TableFit:
        """Fit columns by one pass over them. The same on all ranks, each of which makes it by itself.

        Args:
            rows: every row counts once, whatever order, shards or weights of a mix they come with.
            numeric: columns of numbers.
            categorical: columns of texts, integers or bools.
            min_count: categories of fewer rows are unknown ones.

        Raises:
            DataError: a number is infinite, or a column is not what it is said to be; names the row.
        """
        if isinstance(min_count, bool) or not isinstance(min_count, int) or min_count < 1:
            raise ConfigError(
                f"min_count is how many rows a category has at least, 1 or more, got {min_count!r}"
            )
        columns = list(dict.fromkeys([*numeric, *categorical]))
        moments = [_Moments(name) for name in numeric]
        counts = [Counter[str | int]() for _ in categorical]
        count = 0
        for part in in_file_order(rows):
            read = part.select(*columns).then(ReadColumns(list(numeric), list(categorical)))
            for table in read.batch(ROWS).collate(format="arrow"):
                count += len(table)
                for moment in moments:
                    moment.add(table.column("numeric " + moment.name).to_numpy())
                for name, counter in zip(categorical, counts, strict=True):
                    found = table.column("categorical " + name).drop_null().value_counts()
                    pairs = zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True)
                    for value, times in pairs:
                        counter[value] += times
                    _check_few(name, counter)
        vocabularies = [
            Categorical(name, _sorted(name, [v for v, n in counter.items() if n >= min_count]))
            for name, counter in zip(categorical, counts, strict=True)
        ]
        return cls(count, tuple(moment.fitted() for moment in moments), tuple(vocabularies))

    def to_json(self) -> str:
        """The fit as JSON: numbers come back from it as they are, to the last bit."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TableFit:
        """The fit that ``to_json`` wrote.

        Raises:
            ConfigError: it is none.
        """
        try:
            content = json.loads(text)
            fit = cls(
                int(content["rows"]),
                tuple(Numeric(**column) for column in content["numeric"]),
                tuple(Categorical(c["name"], tuple(c["values"])) for c in content["categorical"]),
            )
            numbers = [n for c in fit.numeric for n in (c.mean, c.std, c.min, c.max)]
            if not all(map(math.isfinite, numbers)):
                raise ValueError("a number is not finite")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a fit is JSON that TableFit.to_json() wrote, got {text[:60]!r} ({error}): fit again"
            ) from error
        return fit

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is whole or not there; ranks that write the same one do no harm."""
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.new")
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(self.to_json(), encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableFit:
        """The fit in a file.

        Raises:
            ConfigError: it holds none.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error

    def fingerprint(self) -> dict[str, Any]:
        """What a state knows it by: the exact numbers, and the vocabularies; of large ones a digest."""
        words: dict[str, Any] = {}
        for column in self.categorical:
            text = json.dumps(column.values)
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            few = len(text) <= SHOWN_BYTES
            words[column.name] = column.values if few else f"{len(column.values)} values:{digest}"
        numbers = {c.name: [c.mean, c.std, c.min, c.max, c.missing] for c in self.numeric}
        return {"numeric": numbers, "categorical": words}


class ReadColumns(TableStage):
    """Leaves of a table the columns to fit, under names of their own: numbers as float64, null where they are
    missing; categories as texts or int64."""

    thread_safe = True

    numeric: Sequence[str]
    categorical: Sequence[str]

    def apply(self, table: pa.Table) -> pa.Table:
        found = {f"numeric {name}": pa.array(numbers_of(table, name)) for name in self.numeric}
        for name in self.categorical:
            found[f"categorical {name}"] = categories_of(table, name)
        return pa.table(found)


class _Moments:
    """Mean and variance of a column that comes in parts (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = self._missing = 0
        self._mean = self._squares = 0.0
        self._min, self._max = math.inf, -math.inf

    def add(self, values: Any) -> None:
        there = values[~np.isnan(values)]
        self._missing += len(values) - len(there)
        if not len(there):
            return
        mean = float(there.mean())
        count = self._count + len(there)
        away = mean - self._mean
        with np.errstate(over="ignore", invalid="ignore"):  # which is looked for at the end
            self._squares += float(np.square(there - mean).sum())
        self._squares += away * away * self._count * len(there) / count
        self._mean += away * len(there) / count
        self._count = count
        self._min = min(self._min, float(there.min()))
        self._max = max(self._max, float(there.max()))

    def fitted(self) -> Numeric:
        if not self._count:
            return Numeric(self.name, 0.0, 0.0, 0.0, 0.0, self._missing)
        alike = self._min == self._max  # rounding must not make a scale of it
        mean = self._min if alike else self._mean
        std = 0.0 if alike else math.sqrt(self._squares / self._count)
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise DataError(
                f"column {self.name!r} holds numbers up to {max(-self._min, self._max):g}, too large to "
                "scale: take their logarithms by map_batches()"
            )
        return Numeric(self.name, mean, std, self._min, self._max, self._missing)


def _check_few(name: str, counter: Counter[str | int]) -> None:
    if len(counter) > MOST_VALUES:
        raise DataError(
            f"column {name!r} holds more than {MOST_VALUES:,} different values, which are no categories: "
            "leave it out, or name it in numeric"
        )


def _sorted(name: str, values: list[str | int]) -> tuple[str | int, ...]:
    if len({isinstance(value, str) for value in values}) > 1:
        raise DataError(
            f"column {name!r} holds texts and integers: make them all texts or all integers by "
            "map() in the sources"
        )
    return tuple(sorted(values))
