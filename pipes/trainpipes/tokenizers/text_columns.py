"""Text columns of rows, as ``tokenize`` reads them: Arrow strings without nulls."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.checks import IntArray, column_names, require, several
from trainpipes._internal.messages import nearest
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell, Block
from trainpipes.errors import ConfigError
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.stage import Stage

Texts: TypeAlias = "pa.LargeStringArray"


class Template:
    """A text with ``{column}`` in it, which is filled in for each row."""

    def __init__(self, text: str) -> None:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError:
            parts = [("", "", "", None)]
        columns = [name for _, name, _, _ in parts if name is not None]
        plain = not any(rest or how for _, _, rest, how in parts)
        good = columns and all(name and not set(name) & set(".[") for name in columns) and plain
        rule = "text with {column} for one or more columns, without index, format or conversion"
        way = "make another text with map_batches()"
        require(good, "tokenize(template)", rule, text, way)
        self.columns = list(dict.fromkeys(columns))
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    def fill(self, columns: Mapping[str, Texts]) -> Texts:
        end = _scalar("")
        pairs = ((_scalar(text), columns.get(name or "", end)) for text, name in self._parts)
        pieces = [piece for pair in pairs for piece in pair]
        return arrays.one_chunk(pc.binary_join_element_wise(*pieces, end))


def _scalar(text: str) -> Any:
    return arrays.python_to_arrow([text], pa.large_string())[0]


def read_texts(
    block: Block, names: Sequence[str], caller: Stage, numbers: bool = False
) -> dict[str, Texts]:
    """Columns of text, some of it perhaps null, or with ``numbers`` of integers, too, as text."""
    columns = {}
    for name in names:
        column = read_columns.cells(block, name, caller)
        if isinstance(column, torch.Tensor):
            raise read_columns.refused(caller, " works on columns of text, got tensors")
        with read_columns.naming(name, caller, block.ids):
            read = _of_python if isinstance(column, list) else _of_arrow
            columns[name] = read(column, numbers)
    return columns


NO_TEXT = ", and only text can be tokenized; make it a string with map_batches()"


def _of_arrow(column: Any, numbers: bool) -> Texts:
    kind = column.type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        arrays.is_text(kind) or pa.types.is_null(kind) or (numbers and pa.types.is_integer(kind))
    ):
        raise BadCell(None, f"holds {column.type}{NO_TEXT}")
    return arrays.one_chunk(column.cast(pa.large_string()))


def _of_python(values: list[Any], numbers: bool) -> Texts:
    for row, value in enumerate(values):
        if not isinstance(value, str | None) and not (numbers and type(value) is int):
            raise BadCell(row, f"holds {type(value).__name__}{NO_TEXT}")
    texts = [None if value is None else str(value) for value in values]
    try:
        return arrays.python_to_arrow(texts, pa.large_string())
    except UnicodeEncodeError as error:
        said = "holds a surrogate (half of a character), which UTF-8 cannot write"
        way = "clean it in the map() that makes it"
        raise BadCell(texts.index(error.object), f"{said}; {way}") from error


def without_nulls(
    texts: dict[str, Texts], caller: Stage, ids: IntArray, skip: bool
) -> npt.NDArray[np.bool_] | None:
    """Which rows have no null, bool ``[rows]``; None for all. Raises at the first unless ``skip``."""
    with_nulls = [name for name, column in texts.items() if column.null_count]
    if with_nulls and not skip:
        way = f"drop such rows with .filter(pc.field({with_nulls[0]!r}).is_valid()) before"
        way += ", or by on_error='skip'" * bool(caller.options.get("labels"))
        problem = f"is null, and there is no text to tokenize; {way}"
        raise read_columns.in_column(
            BadCell(arrays.first_null(texts[with_nulls[0]]), problem), with_nulls[0], caller, ids
        )
    there = [arrays.to_numpy(texts[name].is_valid()) for name in with_nulls]
    return np.logical_and.reduce(there) if there else None


def outputs_of(columns: Any, concat: Any, templated: bool, pair: bool) -> dict[str, list[str]]:
    """Columns of ids, and the columns of text that each is made of."""
    named = [columns != "text", concat is not None, templated]
    if sum(named) > 1 or (pair and any(named[1:])):
        rule = "one of columns, concat and template, and pair with a list of two columns"
        raise ConfigError(f"tokenize takes {rule}")
    if templated:
        return {"input_ids": []}
    if concat is not None:
        return {"input_ids": column_names(concat, "tokenize(concat)")}
    option = "tokenize(columns)"
    require(not pair or several(columns), "tokenize(pair=True)", "a list of two columns", columns)
    if isinstance(columns, Mapping):
        good = columns and all(isinstance(n, str) for item in columns.items() for n in item)
        require(good, option, "a dict of text columns and names for their ids", columns)
        outputs = {ids: [text] for text, ids in columns.items()}
        way = f"to join them, concat={list(columns)}"
        rule = "a dict with another column of ids for each text column"
        require(len(outputs) == len(columns), option, rule, columns, way)
        return outputs
    names = column_names(columns, option)
    require(not pair or len(names) == 2, "tokenize(pair=True)", "a list of two columns", columns)
    if pair or isinstance(columns, str):
        return {"input_ids": names}
    return {f"{name}_ids": [name] for name in names}


def labelled_of(labels: Any, outputs: Mapping[str, list[str]]) -> list[str] | bool | None:
    if labels is None or labels is False:
        return None
    option, joined = "tokenize(labels)", outputs.get("input_ids")
    if joined is None:
        way = 'join columns by concat=[...], or name a column of ids "labels" instead'
        there = f'ids in a column "input_ids", and here they are in {list(outputs)}'
        raise ConfigError(f"{option} needs {there}; {way}")
    if labels is True:
        return True
    names = column_names(labels, option)
    for name in names:
        rule = f"some of the columns that are joined, {joined}, or True"
        require(name in joined, option, rule, name, nearest(name, joined)[2:-1])
    return names
