"""How a column is padded: the options of ``pad_collate``, and what cuts it into those of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import Ge, IntArray, repeated, require, wrong
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import Array, gathered
from trainpipes.columns.python_values import python_values
from trainpipes.columns.rectangles import RaggedRows, Side
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import declared_checks

#: Pad values that hold for any ``value``: masked places must not depend on the pad token.
FIXED = {"labels": -100, "attention_mask": 0, "token_type_ids": 0}
OPTIONS = "a dict of column names and dicts of options"
#: Options of a column that say that it is padded.
PADDING = {"max_length", "pad_to_multiple_of", "padding_side", "truncation_side", "value"}
#: Makes a column of a batch by its number; or of all batches.
Cut = Callable[[int], dict[str, Any]]


class Writer(NamedTuple):
    """Cuts a column of the rows at these places, or of all, into those of batches."""

    row_bytes: float
    cut: Callable[[IntArray | None, IntArray], Cut]

    def to(self, name: str, dtype: torch.dtype) -> Writer:
        def cut(index: IntArray | None, bounds: IntArray) -> Cut:
            make = self.cut(index, bounds)
            return lambda k: (batch := make(k)) | {name: batch[name].to(dtype)}

        return self._replace(cut=cut)


def numpy_dtype(dtype: Any, option: str) -> np.dtype[Any]:
    try:
        if not isinstance(dtype, torch.dtype):  # torch takes None and Python's types, too
            raise TypeError
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        rule, way = "a torch.dtype that NumPy has, too", "for another, convert in a map() after it"
        raise wrong(option, rule, dtype, way) from None


def dtype_of_numbers(dtype: Any, option: str) -> None:
    good = numpy_dtype(dtype, option).kind in "iuf"
    require(good, option, "a dtype of integers or floats", dtype)


def check_pad_value(value: Any, option: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    require(good, option, "a number to pad with", value)


def check_mask_name(value: Any, option: str) -> None:
    good = isinstance(value, str) or value is False
    require(good, option, "a name for the mask, or False", value)


Cells = Annotated[int, Ge(1, 2**31 - 1)]
PadValue = Annotated[float, check_pad_value]


@dataclass(frozen=True)
class Rule:
    """How a column is padded; None leaves it to the tokenizer or the column's type."""

    max_length: Cells | None = None
    pad_to_multiple_of: Cells | None = None
    padding_side: Side | None = None
    truncation_side: Side | None = None
    value: PadValue | None = None
    mask: Annotated[str | bool, check_mask_name] | None = None
    dtype: Annotated[torch.dtype, numpy_dtype] | None = None

    def of_column(self, name: str, options: Mapping[str, Any]) -> Rule:
        option, known = "pad_collate(columns)", [field.name for field in fields(Rule)]
        require(isinstance(options, Mapping), option, OPTIONS, {name: options})
        for unknown in set(options) - set(known):
            there = f"{nearest(str(unknown), known)} for {name!r}; there are {', '.join(known)}"
            raise ConfigError(f"{option} has no option {unknown!r}{there}")
        rule = replace(self, **{"value": None, **options})
        for option, check in declared_checks(Rule).items():
            check(getattr(rule, option), f"pad_collate(columns[{name!r}])({option})")
        return rule


def is_naming(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(n, str) for p in value.items() for n in p)


def asked_masks(mask: Any, rules: Mapping[str, Rule]) -> dict[str, str]:
    good = mask is None or mask is False or is_naming(mask)
    rule = 'False, or a dict of columns and their masks such as {"input_ids": "input_mask"}'
    require(good, "pad_collate(mask)", rule, mask)
    masks: dict[str, str] = dict(mask or {})
    masks |= {name: rule.mask for name, rule in rules.items() if isinstance(rule.mask, str)}
    twice = sorted(repeated(masks.values()))
    require(not twice, "pad_collate(mask)", "another name for each mask", twice)
    return masks


def ragged_writer(
    name: str, rows: RaggedRows, mask: str | None, length: str | None = None
) -> Writer:
    def cut(index: IntArray | None, bounds: IntArray) -> Cut:
        rectangles = rows.rectangles(index, bounds)
        lengths = rows.lengths if index is None else rows.lengths[index]

        def batch(k: int) -> dict[str, Any]:
            cells, real = rectangles[k]
            tensors = {name: torch.from_numpy(cells)}
            if mask is not None and real is not None:
                tensors[mask] = torch.from_numpy(real)
            if length is not None:
                tensors[length] = torch.from_numpy(lengths[bounds[k] : bounds[k + 1]].copy())
            return tensors

        return batch

    return Writer(rows.average_bytes, cut)


def even_writer(name: str, values: Array, dtype: np.dtype[Any]) -> Writer:
    def cut(index: IntArray | None, bounds: IntArray) -> Cut:
        edges = bounds.tolist()

        def batch(k: int) -> dict[str, Any]:
            part = slice(edges[k], edges[k + 1])
            picked = values[part] if index is None else values[index[part]]
            return {name: torch.from_numpy(picked.astype(dtype, order="C", copy=index is None))}

        return batch

    return Writer(float(np.prod(values.shape[1:], dtype=np.int64)) * dtype.itemsize, cut)


def object_writer(name: str, values: list[Any] | pa.Array) -> Writer:
    def cut(index: IntArray | None, bounds: IntArray) -> Cut:
        edges, objects = bounds.tolist(), values
        if isinstance(values, pa.Array):
            objects = python_values(values if index is None else gathered(values, index))
        return lambda k: {name: list(objects[edges[k] : edges[k + 1]])}

    return Writer(float("inf"), cut)
