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

from trainpipes._internal.checks import column_names, require, several, wrong
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import is_text, one_chunk, python_to_arrow, to_numpy
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import at_row, blame, in_column, refused
from trainpipes.kinds.stage import Stage
from trainpipes.stages.read_columns import cells

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
    """Columns of text, or with ``numbers`` of integers, too, as text."""
    columns = {}
    for name in names:
        column = cells(block, name, caller)
        if isinstance(column, torch.Tensor):
            raise refused(caller, " works on columns of text, got tensors")
        nulls = _nulls(column)
        if nulls.any():
            message = (
                f"{caller}: column {name!r} is null, and there is no text to tokenize; drop such rows with "
                f".filter(pc.field({name!r}).is_valid()) before"
            )
            raise at_row(message, caller, block.ids[np.argmax(nulls)])
        row, found = None, ""
        if isinstance(column, list):
            good = (str, int) if numbers else (str,)
            row = next(
                (k for k, v in enumerate(column) if type(v) is bool or not isinstance(v, good)),
                None,
            )
            found = "" if row is None else type(column[row]).__name__
        elif not _is_text(column.type) and not (numbers and pa.types.is_integer(column.type)):
            found = str(column.type)
        if found:
            way = "and only text can be tokenized; make it a string with map_batches()"
            error = refused(caller, f": column {name!r} holds {found}, {way}")
            blame(error, caller, None if row is None else int(block.ids[row]))
            raise error
        if isinstance(column, list):
            columns[name] = _written([str(value) for value in column], name, caller, block)
        else:
            columns[name] = one_chunk(column.cast(pa.large_string()))
    return columns


def null_texts(block: Block, names: Sequence[str], caller: Stage) -> npt.NDArray[np.bool_]:
    """Which rows have a null in some columns, bool ``[rows]``."""
    found = np.zeros(len(block), dtype=np.bool_)
    for name in names:
        found |= _nulls(cells(block, name, caller))
    return found


def _nulls(column: Any) -> npt.NDArray[np.bool_]:
    if isinstance(column, list):
        return np.array([value is None for value in column], dtype=np.bool_)
    if isinstance(column, torch.Tensor):
        return np.zeros(len(column), dtype=np.bool_)
    if pa.types.is_dictionary(column.type):  # which may hold null itself
        column = column.cast(column.type.value_type)
    if not column.null_count:
        return np.zeros(len(column), dtype=np.bool_)
    return to_numpy(column.is_null())


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or bool(pa.types.is_null(kind))  # of no row


def _written(texts: list[str], name: str, caller: Stage, block: Block) -> Texts:
    try:
        return python_to_arrow(texts, pa.large_string())
    except UnicodeEncodeError as error:
        bad = next(k for k, text in enumerate(texts) if text == error.object)
        said = "holds a surrogate (half of a character), which UTF-8 cannot write"
        cell = BadCell(bad, f"{said}; clean it in the map() that makes it")
        raise in_column(cell, name, caller, block.ids) from error


def outputs_of(columns: Any, concat: Any, templated: bool, pair: bool) -> dict[str, list[str]]:
    """Columns of ids, and the columns of text that each is made of."""
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
