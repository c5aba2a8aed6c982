"""Text columns of rows, as ``tokenize`` reads them: Arrow strings without nulls."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import column_names, require, wrong
from trainpipes._internal.messages import nearest, need_columns
from trainpipes.columns.arrays import first_null, is_text, one_chunk, python_to_arrow, to_numpy
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import ConfigError, DataError
from trainpipes.kinds.blame import at_row, blame, in_column, refused
from trainpipes.kinds.stage import Stage
from trainpipes.stages.token_columns import cells

Texts: TypeAlias = "pa.LargeStringArray"


class Template:
    def __init__(self, text: str) -> None:
        option = "tokenize(template)"
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise wrong(option, f"a format string ({error})", text) from None
        fields = [(name, rest, how) for _, name, rest, how in parts if name is not None]
        good = all(name and not rest and not how for name, rest, how in fields)
        rule = "text that names columns as {column}, without index, format or conversion"
        good = good and not any(set(name) & set(".[") for name, _, _ in fields)
        require(good, option, rule, text, "make another text with map_batches()")
        self.columns = list(dict.fromkeys(name for name, _, _ in fields))
        require(self.columns, option, "text with at least one column as {column}", text)
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    def fill(self, columns: Mapping[str, Texts]) -> Texts:
        pieces: list[Any] = []
        for literal, field in self._parts:
            if literal:
                pieces.append(_scalar(literal))
            if field is not None:
                pieces.append(columns[field])
        if len(pieces) == 1:
            return pieces[0]
        return one_chunk(pc.binary_join_element_wise(*pieces, _scalar("")))


def _scalar(text: str) -> Any:
    return python_to_arrow([text], pa.large_string())[0]


def text_columns(
    block: Block, names: Sequence[str], caller: Stage, numbers: bool = False
) -> dict[str, Texts]:
    data = block.data
    if isinstance(data, TensorRows):
        raise refused(caller, " works on columns of text, got tensors")
    if isinstance(data, list):
        return {name: _of_rows(block, name, caller, numbers) for name in names}
    need_columns(data.column_names, names, caller)
    columns = {}
    for name in names:
        column = data.column(name)
        if not _is_text(column.type) and not (numbers and pa.types.is_integer(column.type)):
            raise _no_text(name, str(column.type), caller)
        if column.null_count or pa.types.is_dictionary(column.type):
            null = first_null(column)  # decodes: a dictionary may hold null
            if null >= 0:
                raise _null(name, int(block.ids[null]), caller)
        columns[name] = one_chunk(column.cast(pa.large_string()))
    return columns


def null_texts(block: Block, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which rows have a null in some columns that are there, bool ``[rows]``."""
    data = block.data
    found = np.zeros(len(block), dtype=np.bool_)
    for name in names:
        if isinstance(data, list):
            found |= [isinstance(row, Mapping) and row.get(name, "") is None for row in data]
        elif isinstance(data, pa.Table) and name in data.column_names:
            column = data.column(name)
            if pa.types.is_dictionary(column.type):  # which may hold null itself
                column = column.cast(column.type.value_type)
            if column.null_count:
                found |= to_numpy(column.is_null())
    return found


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or bool(pa.types.is_null(kind))  # of nulls, each of which is refused


def _of_rows(block: Block, name: str, caller: Stage, numbers: bool) -> Texts:
    texts = cells(block, name, caller)
    if numbers:
        texts = [str(value) if type(value) is int else value for value in texts]
    for place, value in enumerate(texts):
        if value is None:
            raise _null(name, int(block.ids[place]), caller)
        if not isinstance(value, str):
            error = _no_text(name, type(value).__name__, caller)
            blame(error, caller, int(block.ids[place]))
            raise error
    try:
        return python_to_arrow(texts, pa.large_string())
    except UnicodeEncodeError as error:
        bad = next(k for k, text in enumerate(texts) if text == error.object)
        said = "holds a surrogate (half of a character), which UTF-8 cannot write"
        cell = BadCell(bad, f"{said}; clean it in the map() that makes it")
        raise in_column(cell, name, caller, block.ids) from error


def _null(name: str, row_id: int, caller: Stage) -> DataError:
    message = (
        f"{caller}: column {name!r} is null, and there is no text to tokenize; drop such rows with "
        f".filter(pc.field({name!r}).is_valid()) before"
    )
    return at_row(message, caller, row_id)


def _no_text(name: str, found: str, caller: Stage) -> DataError:
    way = "make it a string with map_batches()"
    return refused(
        caller, f": column {name!r} holds {found}, and only text can be tokenized; {way}"
    )


def outputs_of(columns: Any, concat: Any, templated: bool, pair: bool) -> dict[str, list[str]]:
    named = [columns != "text", concat is not None, templated]
    if sum(named) > 1 or (pair and any(named[1:])):
        raise ConfigError(
            "tokenize takes one of columns, concat and template, and pair with a list of two columns"
        )
    if templated:
        return {"input_ids": []}
    if concat is not None:
        return {"input_ids": column_names(concat, "tokenize(concat)")}
    option = "tokenize(columns)"
    names: list[str] = []
    if isinstance(columns, Mapping):
        good = columns and all(isinstance(n, str) for item in columns.items() for n in item)
        require(good, option, "a dict of text columns and names for their ids", columns)
        outputs = {ids: [text] for text, ids in columns.items()}
        way = f"to join them, concat={list(columns)}"
        rule = "a dict with another column of ids for each text column"
        require(len(outputs) == len(columns), option, rule, columns, way)
    else:
        names = column_names(columns, option)
        one = pair or isinstance(columns, str)
        outputs = {"input_ids": names} if one else {f"{name}_ids": [name] for name in names}
    require(not pair or len(names) == 2, "tokenize(pair=True)", "a list of two columns", columns)
    return outputs


def labelled_of(labels: Any, outputs: Mapping[str, list[str]]) -> list[str] | bool | None:
    if labels is None or labels is False:
        return None
    option, joined = "tokenize(labels)", outputs.get("input_ids")
    if joined is None:
        raise ConfigError(
            f'{option} needs ids in a column "input_ids", and here they are in {list(outputs)}; join '
            'columns by concat=[...], or name a column of ids "labels" instead'
        )
    if labels is True:
        return True
    names = column_names(labels, option)
    for name in names:
        rule = f"some of the columns that are joined, {joined}, or True"
        require(name in joined, option, rule, name, nearest(name, joined)[2:-1])
    return names


T = TypeVar("T")


class ByTable(Generic[T]):
    """What was made of tables, each known by itself, not by what it holds."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, T]] = {}

    def of(self, table: Any, make: Callable[[Any], T]) -> T:
        key = id(table)
        found = self._kept.get(key)
        if found is None or found[0]() is not table:
            kept = self._kept
            gone = ref(table, lambda _: kept.pop(key, None))
            found = kept[key] = gone, make(table)
        return found[1]
