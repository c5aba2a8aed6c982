"""What was found of columns before a training: means and deviations of numbers, ids of categories."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from trainpipes._internal import checks
from trainpipes._internal.messages import nearest, table
from trainpipes.errors import ConfigError, MissingFilesError, shown
from trainpipes.filesystems.places import write_text

Category: TypeAlias = "str | int"
#: The ids of values that are no known category; known ones are numbered from ``FIRST_ID`` on.
NULL_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
#: Categories of a column that a text shows.
MOST_SHOWN = 5
#: Up to so many bytes of JSON, a state holds the options themselves, so that an error can show them.
SHOWN_BYTES = 1024


@dataclass(frozen=True)
class FittedColumns:
    """Means and deviations of columns of numbers, and ids of categories, as ``Pipeline.fit_columns`` finds
    them. Prints as text.

    Attributes:
        rows: how many were looked at.
        numbers: ``{"mean": ..., "std": ..., "nulls": ...}`` of each column, for ``normalize_columns``: of
            all values but nulls and NaN; ``std`` over all of them, as in scikit-learn's ``StandardScaler``.
        categories: the known values of each column in the order of their ids, the most frequent first, for
            ``encode_categories``.
        counts: in how many rows each of these came, or how often in lists.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"city": "Rome"}, {"city": "Oslo"}, {"city": "Rome"}])
    >>> rows.fit_columns(categories="city").categories
    {'city': ['Rome', 'Oslo']}
    """

    rows: int
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    categories: dict[str, list[Category]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ids each column of categories has: the rows of its ``Embedding``."""
        return {name: FIRST_ID + len(known) for name, known in self.categories.items()}

    def denormalize(self, column: str, values: Any) -> Any:
        """Numbers, an array or a tensor as they were before ``normalize_columns``.

        >>> FittedColumns(3, {"price": {"mean": 10.0, "std": 2.0}}).denormalize("price", 0.5)
        11.0
        """
        if column not in self.numbers:
            there = f"there are {shown([*self.numbers])}"
            raise ConfigError(
                f"denormalize(column) must be a column of numbers, got {column!r}; {there}"
            )
        mean, std = self.numbers[column]["mean"], self.numbers[column]["std"]
        return values * (std or 1.0) + mean

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file with a line for each column of numbers and for each category, with its id, its
        value and its count. The stages take its path.
        """
        write_text(checks.local_path(path, "save(path)"), _written(self), "save")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FittedColumns:
        """Read a file that ``save`` wrote.

        Raises:
            MissingFilesError: there is no such file.
            ConfigError: the file holds something else.
        """
        place = Path(checks.local_path(path, "load(path)"))
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
            listed = {name: list(zip(*entries, strict=True)) or [(), (), ()]
                for name, entries in content["categories"].items()}  # fmt: skip
            categories = {name: list(columns[1]) for name, columns in listed.items()}
            counts = {name: list(columns[2]) for name, columns in listed.items()}
            return FittedColumns(content["rows"], content["numbers"], categories, counts)
        except FileNotFoundError:
            way = "pipe.fit_columns(...).save(path) writes one"
            raise MissingFilesError(f"no file {place}: {way}", path=str(place)) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            rule = "must be a file that FittedColumns.save wrote"
            raise ConfigError(f"load(path) {rule}, got {place}: {error}") from error

    def __str__(self) -> str:
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
        return table(rows)


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


def means_and_deviations(option_value: Any, option: str) -> dict[str, tuple[float, float]]:
    """Mean and deviation of each column, of ``FittedColumns.numbers``, or of a file of these."""
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
        known[name] = (float(mean), float(std))
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
            valid = isinstance(value, str | int) and not isinstance(value, bool)
            checks.require(valid, option, f"{rule}; values are texts or integers", value)
            small = isinstance(value, str) or -(2**63) <= value < 2**63
            checks.require(small, option, "texts, or integers of 64 bits", value)
        twice = checks.repeated(values)
        checks.require(not twice, option, "values that differ", twice[:1], "name each once")
        known[name] = list(values)
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
