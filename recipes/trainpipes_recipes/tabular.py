from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from trainpipes import (
    BatchStage,
    ConfigError,
    DataError,
    FittedColumns,
    Pipeline,
    SchemaError,
    TableStage,
)
from trainpipes_recipes.inputs import LABELS, Input, documented, whole_number

__all__ = ["Stacked", "tabular"]

log = logging.getLogger("trainpipes")

#: How the types of columns begin that are numbers, categories, or lists of categories.
NUMBERS = (
    "int",
    "uint",
    "float",
    "bfloat",
    "double",
    "halffloat",
    "decimal",
    "Decimal",
    "date",
    "time",
    "duration",
)
CATEGORIES = ("string", "large_string", "str", "bool", "dictionary")
#: Names of the index that pandas writes to CSV, writes again, and writes to Parquet.
INDEX = ("", "Unnamed: 0", "__index_level_0__")
LISTS = ("list", "large_list", "fixed_size_list")
#: How those begin that are predicted as numbers.
FLOATS = ("float", "bfloat", "double", "halffloat", "decimal", "Decimal")
#: Types of Python values that do not say what a column holds.
UNTOLD = ("NoneType", "tuple", "ndarray", "Tensor", "Timestamp")
#: Types of values that rows of Python's are likely to have.
PYTHON = {"int", "float", "str", "bool", *UNTOLD}


@documented
def tabular(
    files: Any,
    *,
    label: str | None = None,
    numbers: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    train: bool = True,
    valid: float | Sequence[Any] | None = None,
    key: str | Sequence[str] | None = None,
    fitted: str | os.PathLike[str] | FittedColumns | None = None,
    fit_rows: int | None = None,
    min_count: int = 1,
    max_size: int | None = None,
    nulls: Literal["raise", "mean", "nan"] = "mean",
    classes: Sequence[Any] | Mapping[Any, int] | int | None = None,
    weights: str | Mapping[str | int, float] | None = None,
    batch_size: int = 1024,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches of the rows of a table, for recommenders, ads and risk.

    Each is a dict of tensors; B = ``batch_size``, N and C are the numbers of columns:

        numbers          float32 [B, N]: ``(x - mean) / std``, in the order of ``numbers``; not there
                         without such columns
        categories       int64 [B, C]: ids, in the order of ``categories``: 0 is null, 1 a value that was
                         not in the training part; not there without such columns
        x, x_offsets     of each column x of lists of categories: the ids of all rows, and int64 [B], where
                         each row begins, as ``EmbeddingBag`` takes them
        labels           int64 [B]: the class; or, where the column holds floats or decimals, float32 [B]

    Means, deviations, ids and classes are found by one pass over the training part, and of that alone. The
    stages ``encode_categories`` and ``encode_labels`` of the pipeline know how many ids and classes there
    are. A state loads only with the same.

    Args:
        label: column to predict; by default the first of ``trainpipes_recipes.inputs.LABELS``.
        numbers: columns of numbers, dates and times; by default all of them that are not named elsewhere
            (``valid``, ``key`` and ``weights``, too), without the index that pandas writes: a column
            without a name, "Unnamed: 0" or "__index_level_0__".
        categories: columns of texts, integers, bools, or lists of these; by default those of texts, bools
            and lists that are not named elsewhere. Name integers that are ids here.
        train: False to evaluate: every row once; of those that ``valid`` says, if given.
        valid: which rows are held out from training, and evaluated: conditions, such as
            ``[["day", ">=", "2026-05-01"]]``, or a share of all, 0 to 1. Rows of which a condition knows
            nothing, such as a day that is null, are in neither part.
        key: with a share, a column, or several: rows of the same values stay in one part.
        fitted: the result of ``fit_columns``, or a path: the file is read if it is there, and else written
            by the pass. Give it to evaluate other files than those that have the training part: there a
            path that is not there is an error.
        fit_rows: rows of the training part that the pass looks at, after a shuffle; all if left out.
        min_count: categories that come less often have the id 1.
        max_size: the most frequent ones of a column that have an id.
        nulls: treatment of nulls and NaN among numbers: see ``normalize_columns``.
        classes: as in ``encode_labels``; by default integers as they are, and others in sorted order.
        weights: to train, of each class, or a column of them: see ``sample_by``.

    Raises:
        ConfigError: there is nothing to fit on.
        DataError: a label is null or NaN, or no class of the training part; a number is infinite.
        SchemaError: a column is not there, or holds neither numbers nor categories.

    >>> import trainpipes as tp
    >>> rows = [{"age": n, "city": "ab"[n % 2], "seen": [n, 7], "label": n > 3} for n in range(6)]
    >>> batch = tabular(tp.from_dataset(rows), batch_size=6, num_shards=1).peek()
    >>> batch["numbers"].shape, batch["categories"][:2].tolist(), batch["labels"].tolist()
    (torch.Size([6, 1]), [[3], [2]], [1, 0, 1, 0, 0, 0])
    >>> batch["seen"].tolist(), batch["seen_offsets"].tolist()
    ([8, 2, 3, 2, 7, 2, 5, 2, 4, 2, 6, 2], [0, 2, 4, 6, 8, 10])
    """
    whole_number(min_count, 1, "tabular(min_count)")
    if max_size is not None:
        whole_number(max_size, 1, "tabular(max_size)")
    data = Input("tabular", files, storage_options)
    (label,) = data.find({"label": label}, LABELS)
    types = _types(data, label)
    numbers, categories = ([n] if isinstance(n, str) else n for n in (numbers, categories))
    by_type = numbers is None or categories is None
    beside = _columns_of(valid) if isinstance(valid, list | tuple) else []
    beside += [key] if isinstance(key, str) else list(key or ())
    beside += [weights] if isinstance(weights, str) else []
    others: list[str] = []  # that a model which is evaluated on other files does not take
    if not train and valid is None and fitted is not None:
        if not isinstance(fitted, FittedColumns):
            fitted = FittedColumns.load(fitted)  # nothing here is to be fitted on
        others = [n for n in types if n not in fitted.numbers and n not in fitted.categories]
    named = [label, *beside, *others]
    numbers, categories, lists = _features(types, named, numbers, categories)
    if by_type:
        log.info("tabular takes numbers from %.500s, categories from %.500s", numbers, categories)
    for name in (label, *numbers, *categories, *beside):
        if name not in types:
            raise SchemaError(f"tabular: there is no column {name!r}, only {list(types)}")
    rows = data.rows([*numbers, *categories, label, *beside])
    training, held_out = _parts(rows, types, valid, key)
    is_float = types[label].startswith(FLOATS)
    if fitted is None and not train and valid is None:
        rule = "must be given to evaluate rows that were not in the training"
        way = (
            "pass what it was fitted with, or valid=..., which says what of these rows is held out"
        )
        raise ConfigError(f"tabular(fitted) {rule}, got None; {way}")
    whole = _fitted(
        training, fitted, numbers, categories, [] if is_float else [label], fit_rows, seed
    )
    known = {name: _frequent(whole, name, min_count, max_size) for name in categories}

    counted = (valid is None and weights is None) or fit_rows is not None
    if train and drop_last and not counted and whole.rows < num_shards * batch_size:
        each = f"{whole.rows // num_shards:,} rows in each of {num_shards} shards"
        way = "give a smaller batch_size or num_shards, or drop_last=False"
        rule = "leave each shard a batch"
        raise ConfigError(f"tabular(batch_size) must {rule}, got {batch_size:,} of {each}; {way}")
    rows = training if train else held_out
    if train and weights is not None:
        column = weights if isinstance(weights, str) else label
        by_class = None if isinstance(weights, str) else weights
        rows = rows.sample_by(column, by_class, seed=seed)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards)
    rows = rows.select(*numbers, *categories, label)
    if numbers:
        found = {name: whole.numbers[name] for name in numbers}
        rows = rows.normalize_columns(found, nulls=nulls)
    if categories:
        rows = rows.encode_categories(known)
    if not is_float:
        classes = _classes(whole, label) if classes is None else classes
        rows = rows.encode_labels(label, classes=classes)
    else:
        rows = rows.then(FloatLabels(label))
        rows = rows if label == "labels" else rows.rename({label: "labels"})
    batches = rows.batch(batch_size, drop_last=train and drop_last)
    single = [name for name in categories if name not in lists]
    return batches.collate(ragged="offsets", dtype=torch.float32).then(Stacked(numbers, single))


class FloatLabels(TableStage):
    """Refuses numbers to predict that are null, NaN or infinite."""

    thread_safe = True

    column: str

    def apply(self, table: pa.Table) -> pa.Table:
        values, said = table[self.column], None
        if pc.any(pc.is_null(values, nan_is_null=True)).as_py():
            said = "holds a null or NaN, which is no label"
        elif pa.types.is_floating(values.type) and pc.any(pc.is_inf(values)).as_py():
            said = "holds an infinite number, which is no label"
        if said is not None:
            way = "leave such rows out with filter(), or give them a label with map()"
            raise DataError(f"tabular: column {self.column!r} {said}: {way}")
        return table


class Stacked(BatchStage):
    """Puts the tensors ``[B]`` of several columns side by side: "numbers" ``[B, N]`` and "categories"
    ``[B, C]``.
    """

    thread_safe = True

    numbers: Sequence[str]
    categories: Sequence[str]

    def apply(self, batch: dict[str, Any]) -> dict[str, Any]:
        for column in self.categories:
            if f"{column}_offsets" in batch:
                way = "make a column of each by map(), or lists of them"
                said = f"tabular: column {column!r} holds tensors of several values"
                raise SchemaError(f"{said}: {way}")
        several = {"numbers": self.numbers, "categories": self.categories}
        stacked = {
            name: torch.stack([batch.pop(column) for column in columns], 1)
            for name, columns in several.items()
            if columns
        }
        return {**stacked, **batch}


def _types(data: Input, label: str) -> dict[str, str]:
    """The types of the columns, as text. Of Python's rows they are those of the first row's values; where one
    of these says too little, or the first row lacks a column, that of the column which the first rows make.
    """
    types = data.rows().explain(world_size=1).columns
    if not PYTHON.isdisjoint(types.values()):
        with suppress(SchemaError):
            made = data.rows().map_batches(_unchanged).explain(world_size=1).columns
            types |= {name: kind for name, kind in made.items() if name not in types}
    for name, kind in types.items():
        if kind not in UNTOLD and (name, kind) != (label, "int"):  # which may stand beside floats
            continue
        with suppress(SchemaError):  # of values that make no column
            made = data.rows([name]).map_batches(_unchanged).explain(world_size=1).columns
            if (
                kind == "NoneType"
                or not made[name].startswith(LISTS)
                or _are_categories(_inner(made[name]))
            ):
                types[name] = made[name]
    return types


def _unchanged(table: pa.Table) -> pa.Table:
    return table


def _inner(kind: str) -> str:
    """The type of a list's values."""
    return kind.partition(": ")[2]


def _are_categories(kind: str) -> bool:
    """Whether a type is that of single categories, where they are named or in lists."""
    return kind.startswith(("int", "uint", *CATEGORIES)) and not kind.startswith("struct")


def _features(
    types: Mapping[str, str], named: Sequence[str], numbers: Any, categories: Any
) -> tuple[list[str], list[str], list[str]]:
    """The columns of numbers and of categories, and which of the latter hold lists; ``named`` are the label
    and others that are no features unless they are asked for.
    """
    taken = {*named, *(numbers or ()), *(categories or ()), *INDEX}
    taken |= {name for name, kind in types.items() if kind.startswith("struct")}
    free = {name: kind for name, kind in types.items() if name not in taken}
    if numbers is None:
        numbers = [name for name, kind in free.items() if kind.startswith(NUMBERS)]
    if categories is None:
        known = (*CATEGORIES, *LISTS)
        categories = [
            name
            for name, kind in free.items()
            if kind.startswith(known)
            and (not kind.startswith("fixed_size_list") or _are_categories(_inner(kind)))
        ]
    twice = sorted({*numbers} & {*categories} | {named[0]} & {*numbers, *categories})
    if twice or not (numbers or categories):
        got = f"{twice[0]!r} twice" if twice else "none"
        raise ConfigError(
            f"tabular takes columns of numbers and of categories, each once, got {got}"
        )
    lists = [name for name in categories if types.get(name, "").startswith(LISTS)]
    clash = sorted({"numbers", "categories", "labels"} & {*lists})
    if clash:
        raise ConfigError(
            f"tabular: a column of lists needs another name than {clash[0]!r}: rename() it"
        )
    return list(numbers), list(categories), lists


def _parts(
    rows: Pipeline, types: Mapping[str, str], valid: Any, key: Any
) -> tuple[Pipeline, Pipeline]:
    """The rows to train on and those held out; both all of them without ``valid``."""
    if key is not None and not isinstance(valid, float):
        raise ConfigError(
            f"tabular(key) must be given with a share, valid=0.1 for instance, got valid={valid!r}"
        )
    if valid is None:
        return rows, rows
    if isinstance(valid, float):
        if not 0 < valid < 1:
            raise ConfigError(f"tabular(valid) must be a share above 0 and below 1, got {valid}")
        parts = rows.split({"train": 1 - valid, "valid": valid}, key=key)
        return parts["train"], parts["valid"]
    try:
        condition = pq.filters_to_expression(_typed(valid, types))
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        rule = 'a share, or conditions such as [["day", ">=", "2026-05-01"]]'
        raise ConfigError(f"tabular(valid) must be {rule}, got {valid!r}: {error}") from None
    return rows.filter(~condition), rows.filter(condition)


def _columns_of(conditions: Any) -> list[str]:
    """The columns that conditions name, or lists of conditions."""
    flat = [part for part in conditions if isinstance(part, list | tuple) and part]
    if flat and isinstance(flat[0][0], list | tuple):
        return [name for part in flat for name in _columns_of(part)]
    return [str(part[0]) for part in flat]


def _typed(conditions: Any, types: Mapping[str, str]) -> Any:
    """The conditions, with dates and times for texts beside columns of these."""
    if isinstance(conditions[0][0], list | tuple):
        return [_typed(part, types) for part in conditions]
    return [(name, sign, _as_time(value, types[name])) for name, sign, value in conditions]


def _as_time(value: Any, kind: str) -> Any:
    if isinstance(value, list | tuple | set):
        return [_as_time(item, kind) for item in value]
    if isinstance(value, str) and kind.startswith("date") and not kind.startswith("datetime"):
        return datetime.date.fromisoformat(value)
    if isinstance(value, str) and kind.startswith(("timestamp", "datetime")):
        time = datetime.datetime.fromisoformat(value)
        return time.replace(tzinfo=time.tzinfo or datetime.UTC) if "tz=" in kind else time
    return value


def _fitted(
    rows: Pipeline, fitted: Any, numbers: Sequence[str], categories: Sequence[str], label: Sequence[str],
    count: int | None, seed: int,
) -> FittedColumns:  # fmt: skip
    """What is known of the columns: given, of a file, or of a pass over the rows."""
    by_path = isinstance(fitted, str | os.PathLike)
    if isinstance(fitted, FittedColumns):
        found = fitted
    elif by_path and Path(fitted).exists():
        found = FittedColumns.load(fitted)
    else:
        shuffled = rows if count is None else rows.shuffle(seed=seed)
        names = numbers or None, [*categories, *label] or None
        found = shuffled.distributed(rank=0, world_size=1).fit_columns(*names, rows=count)
        if by_path:
            found.save(fitted)
    for name in numbers:
        if name not in found.numbers:
            raise ConfigError(
                f"tabular(fitted) must know the column {name!r}, and has {[*found.numbers]}"
            )
    for name in (*categories, *label):
        if name not in found.categories:
            known = [*found.categories]
            raise ConfigError(f"tabular(fitted) must know the column {name!r}, and has {known}")
    return found


def _frequent(found: FittedColumns, name: str, least: int, most: int | None) -> list[Any]:
    counted = zip(found.categories[name], found.counts[name], strict=True)
    return [value for value, count in counted if count >= least][:most]


def _classes(found: FittedColumns, label: str) -> Any:
    """Integers as they are, others in sorted order."""
    values: list[Any] = found.categories[label]
    if not values:
        raise DataError(f"tabular: column {label!r} holds no label; name another one")
    whole = [value for value in values if isinstance(value, int)]
    return max(whole) + 1 if len(whole) == len(values) and min(whole) >= 0 else sorted(values)
