"""Tables: columns of numbers and of categories, to predict a class or a number."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes import ConfigError, DataError, Pipeline, SchemaError, TableStage
from trainpipes._internal.shown import shown
from trainpipes_recipes.evaluation import numbered
from trainpipes_recipes.inputs import LABELS, Input, in_file_order, shuffled
from trainpipes_recipes.labels import found_classes
from trainpipes_recipes.tables.columns import categories_of, is_category, is_number, numbers_of
from trainpipes_recipes.tables.fit import MISSING, UNKNOWN, Categorical, Numeric, TableFit

__all__ = ["ApplyFit", "fit_of", "tabular"]

log = logging.getLogger("trainpipes")


def tabular(
    files: Any,
    *,
    numeric: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    label: str | None = None,
    target: Literal["class", "number"] | None = None,
    classes: int | Sequence[Any] | Mapping[Any, int] | None = None,
    fit: TableFit | str | os.PathLike[str] | None = None,
    scaling: Literal["standard", "minmax", "none"] = "standard",
    missing: Literal["mean", "indicator"] = "mean",
    min_count: int = 1,
    evaluate: bool = False,
    batch_size: int = 256,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches of a table's columns, for a model of numbers and of embeddings.

    Each is a dict of tensors, B = ``batch_size``, N numeric and K categorical columns:

        numeric        float32 [B, N]: (x - mean) / std, or (x - min) / (max - min); a missing value (null,
                       NaN) is the mean, so 0 if standardised. With ``missing="indicator"`` [B, 2 N]: the
                       other N are 1 where the value is missing, else 0
        categorical    int64 [B, K]: 0 for a category that is not in the fit, 1 for null, the others from 2 on
                       in sorted order
        labels         int64 [B]: the class; or float32 [B]: the number; absent without a label
        row            int64 [B], with ``evaluate``: the number of the row in file order

    The fit is the means, deviations and vocabularies of the columns. It takes one pass over them, and is part
    of a state: a resume with another fit is refused. If ``fit`` is a path, training writes the fit there, and
    evaluation reads it. ``fit_of(pipe)`` is the fit: ``fit_of(pipe).cardinalities`` are the sizes of the
    embeddings. A constant column becomes 0 everywhere, and so does a column without any value.

    Not for text to tokenize, nor for columns of times or of lists: make numbers or categories of them first.
    Not for numbers that span many orders of magnitude: take their logarithms first.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, CSV, Arrow, ...): path, folder,
            glob, any fsspec URL, or a list of these; or a pipeline of rows.
        numeric: columns of numbers, in this order. If both this and ``categorical`` are left out, all columns
            of integers, floats and decimals except the label; the choice is logged.
        categorical: columns of texts, integers or bools. If both are left out, all of texts and bools.
        label: column to predict. Left out, the first of label, labels, class, category, target, sentiment,
            intent and topic that is there, if one is.
        target: "class" for classes, "number" for regression. Left out, floats are numbers, all else classes.
        classes: as ``classification`` takes them; found in the data if left out.
        fit: a ``TableFit``; or the path of a JSON file, which is read if it is there, else fitted and
            written. Delete the file to fit again. Left out, it is fitted each time, on the data given.
        scaling: "standard"; "minmax" for 0 to 1; or "none" for unscaled numbers. Missing ones are the mean.
        missing: "indicator" adds a column for each numeric column, in the same order.
        min_count: when fitting, categories with fewer rows count as not in the fit, so that a model learns
            what to make of those.
        evaluate: give every row once, in file order, as ``evaluation`` does.
        batch_size: rows in a batch.
        buffer_size: the fewest rows that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        drop_last: leave out the short batch at the end of an epoch.
        storage_options: options of the file system, as fsspec takes them.

    >>> import trainpipes as tp
    >>> rows = [{"age": 20, "city": "Rome", "label": 0}, {"age": 40, "city": None, "label": 1}]
    >>> pipe = tabular(tp.from_dataset(rows), batch_size=2, evaluate=True)
    >>> batch = pipe.peek()
    >>> batch["numeric"], batch["categorical"], batch["labels"]
    (tensor([[-1.],
            [ 1.]]), tensor([[2],
            [1]]), tensor([0, 1]))
    """
    given = Input("tabular", files, storage_options)
    if label is None and any(name in given.columns for (name,) in LABELS):
        (label,) = given.find({"label": None}, LABELS)
    if target not in (None, "class", "number"):
        raise ConfigError(f'tabular(target) is "class" or "number", got {target!r}')
    if evaluate and isinstance(fit, str | os.PathLike) and not Path(fit).exists():
        raise ConfigError(
            f"tabular(evaluate=True) takes the fit of the training data, and there is no file {str(fit)!r}"
        )
    if not isinstance(fit, TableFit | str | os.PathLike | None):
        raise ConfigError(f"tabular(fit) is a TableFit, or a path of its JSON, got {fit!r}")
    if isinstance(fit, str | os.PathLike) and Path(fit).is_dir():
        raise ConfigError(
            f"tabular(fit) is a TableFit, or a path of its JSON, got the folder {str(fit)!r}: name a file in "
            f"it, such as {os.path.join(fit, 'fit.json')!r}"
        )
    if isinstance(fit, str | os.PathLike) and Path(fit).exists():
        fitted: TableFit | None = TableFit.load(fit)
    else:
        fitted = fit if isinstance(fit, TableFit) else None
    if fitted is not None:
        numeric, categorical = _columns_of(fitted, numeric, categorical)
    elif numeric is None and categorical is None:
        numeric, categorical = _found_columns(given, label, "row" if evaluate else None)
    numeric, categorical = _names("numeric", numeric), _names("categorical", categorical)
    twice = sorted(
        {n for n in (*numeric, *categorical) if [*numeric, *categorical, label].count(n) > 1}
    )
    if twice or not (numeric or categorical):
        got = f"{twice[0]!r} twice" if twice else "none"
        raise ConfigError(
            f"tabular takes columns that are numeric or categorical, each once, got {got}"
        )
    if fitted is None:
        rows = given.rows([*numeric, *categorical])
        fitted = TableFit.of(rows, numeric, categorical, min_count=min_count)
        if isinstance(fit, str | os.PathLike):
            fitted.save(fit)

    number = None
    if label is not None and target is None:
        target = (
            "number" if pa.types.is_floating(_schema(given, [label]).field(label).type) else "class"
        )
        log.info("tabular takes column %r as a %s to predict", label, target)
    columns = [*numeric, *categorical] if label is None else [*numeric, *categorical, label]
    rows = given.rows() if evaluate and isinstance(files, Pipeline) else given.rows(columns)
    if evaluate:
        rows = numbered("tabular(evaluate=True)", rows).select("row", *columns)
    if label is not None and target == "number":
        number = label
    elif label is not None:
        counts = None
        if classes is None:
            hint = '; or say target="number" to predict them as numbers'
            classes, counts = found_classes("tabular", given.rows([label]), label, hint)
            if evaluate and fit is not None and not isinstance(classes, int):
                raise ConfigError(
                    f"tabular(evaluate=True): classes of column {label!r} are texts, which training has "
                    f"numbered: pass the same ones, classes={shown(classes, 80)} or more; or leave the "
                    "column out"
                )
        rows = rows.encode_labels(label, classes=classes, counts=counts)
    rows = rows.then(ApplyFit(fitted, scaling=scaling, missing=missing, number=number))
    if evaluate:
        rows = rows.sharding_filter(num_shards, split="stride", tail="ragged")
    else:
        rows = shuffled(rows, buffer_size, seed=seed, num_shards=num_shards)
    return rows.batch(batch_size, drop_last=drop_last and not evaluate).pad_collate()


def fit_of(pipe: Pipeline) -> TableFit:
    """The fit of a pipeline that ``tabular`` has made.

    Raises:
        ConfigError: it has none.
    """
    for stage in pipe.stages:
        if isinstance(stage, ApplyFit):
            return stage.fit
    raise ConfigError(
        "fit_of(pipe) takes a pipeline that tabular() has made, got one without a fit"
    )


class ApplyFit(TableStage):
    """Puts the columns of a fit into two of fixed-size lists, "numeric" and "categorical", and a number to
    predict into "labels"; columns that were made before stay.

    Args:
        fit: of the columns.
        scaling: as ``tabular`` takes it.
        missing: as ``tabular`` takes it.
        number: the column to predict, if it is of numbers.
    """

    thread_safe = True

    fit: TableFit
    _: KW_ONLY
    scaling: Literal["standard", "minmax", "none"] = "standard"
    missing: Literal["mean", "indicator"] = "mean"
    number: str | None = None

    def check(self) -> None:
        if not isinstance(self.fit, TableFit):
            raise ConfigError(f"apply_fit(fit) is a TableFit, got {type(self.fit).__name__}")

    def apply(self, table: pa.Table) -> pa.Table:
        fit = self.fit
        used = {self.number, *(c.name for c in fit.numeric), *(c.name for c in fit.categorical)}
        found = {name: table[name] for name in table.column_names if name not in used}
        if self.fit.numeric:
            numbers = [numbers_of(table, column.name) for column in self.fit.numeric]
            scaled = [self._scaled(v, c) for v, c in zip(numbers, self.fit.numeric, strict=True)]
            if self.missing == "indicator":
                scaled += [np.isnan(values) for values in numbers]
            found["numeric"] = _lists(scaled, np.float32)
        if self.fit.categorical:
            codes = [_codes(categories_of(table, c.name), c) for c in self.fit.categorical]
            found["categorical"] = _lists(codes, np.int64)
        if self.number is not None:
            values = numbers_of(table, self.number)
            if np.isnan(values).any():
                raise DataError(
                    f"column {self.number!r} is to be predicted, and holds a null or NaN: leave such rows "
                    "out with filter()"
                )
            found["labels"] = pa.array(values.astype(np.float32))
        return pa.table(found)

    def _scaled(self, values: Any, column: Numeric) -> Any:
        values = np.where(np.isnan(values), column.mean, values)
        if self.scaling == "standard":
            return (values - column.mean) / (column.std or 1.0)
        if self.scaling == "minmax":
            return (values - column.min) / ((column.max - column.min) or 1.0)
        return values


def _codes(values: Any, column: Categorical) -> Any:
    """The codes of categories, int64."""
    texts = pa.types.is_large_string(values.type)
    if (
        column.values
        and values.null_count < len(values)
        and texts != isinstance(column.values[0], str)
    ):
        kinds = ("texts", "integers") if texts else ("integers", "texts")
        raise DataError(
            f"categorical column {column.name!r} holds {kinds[0]}, and was fitted on {kinds[1]}: "
            "convert them by map(), or fit again"
        )
    coded = values.dictionary_encode()
    codes = [column.codes.get(value, UNKNOWN) for value in coded.dictionary.to_pylist()]
    places = coded.indices.fill_null(len(codes)).to_numpy()
    return np.array([*codes, MISSING], dtype=np.int64)[places]


def _lists(columns: list[Any], dtype: Any) -> pa.Array:
    """Columns as one of fixed-size lists: a row of each."""
    flat = np.stack(columns, axis=1).astype(dtype)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), len(columns))


def _names(option: str, given: Sequence[str] | None) -> list[str]:
    if isinstance(given, str):
        raise ConfigError(
            f"tabular({option}) is a list of column names, got {given!r}: [{given!r}]"
        )
    return list(given or ())


def _columns_of(
    fit: TableFit, numeric: Sequence[str] | None, categorical: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The columns of a fit, which are those that are asked for, if any are."""
    has = [column.name for column in fit.numeric], [column.name for column in fit.categorical]
    for option, asked, found in zip(
        ("numeric", "categorical"), (numeric, categorical), has, strict=True
    ):
        if asked is not None and list(asked) != found:
            raise ConfigError(
                f"tabular({option}) is {list(asked)}, and the fit has {found}: leave {option} out, or fit "
                "again, without fit= or into another file"
            )
    return has


def _found_columns(given: Input, *others: str | None) -> tuple[list[str], list[str]]:
    """Columns of numbers and of categories, by their types; ``others`` are neither."""
    fields = [field for field in _schema(given, None) if field.name not in others]
    numeric = [field.name for field in fields if is_number(field.type)]
    categorical = [field.name for field in fields if is_category(field.type)]
    neither = [field.name for field in fields if field.name not in {*numeric, *categorical}]
    if not numeric and not categorical:
        raise SchemaError(
            f"tabular: no column holds numbers, texts or bools; there are {given.columns}: name "
            "them by numeric=[...], categorical=[...]",
            stage="tabular",
        )
    left = f", and leaves {neither} out" if neither else ""
    log.info("tabular takes numeric=%s, categorical=%s%s", numeric, categorical, left)
    return numeric, categorical


def _schema(given: Input, columns: list[str] | None) -> pa.Schema:
    """The types of columns, by the first row."""
    first = in_file_order(given.rows(columns))[0]
    for table in first.batch(1).collate(format="arrow"):
        schema: pa.Schema = table.schema
        return schema
    raise DataError("tabular: there are no rows, so that the types of columns are unknown")
