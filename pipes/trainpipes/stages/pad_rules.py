from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import torch

from trainpipes._internal.checks import Ge, repeated, require, wrong
from trainpipes._internal.messages import nearest
from trainpipes.columns.rectangles import Side
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import declared_checks

#: Pad values that hold for any ``value``: what is masked must not depend on the pad token.
FIXED = {"labels": -100, "attention_mask": 0, "token_type_ids": 0}
OPTIONS = "a dict of column names and dicts of options"


def numpy_dtype(dtype: Any, option: str) -> np.dtype[Any]:
    try:
        if not isinstance(dtype, torch.dtype):  # torch takes None and Python's types, too
            raise TypeError
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        rule, way = "a torch.dtype that NumPy has, too", "for another, convert in a map() after it"
        raise wrong(option, rule, dtype, way) from None


def dtype_of_numbers(dtype: Any, option: str) -> None:
    good = numpy_dtype(dtype, option).kind in "iuf"
    require(good, option, "a dtype of integers or floats", dtype)


def number(value: Any, option: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    require(good, option, "a number to pad with", value)


def mask_name(value: Any, option: str) -> None:
    good = isinstance(value, str) or value is False
    require(good, option, "a name for the mask, or False", value)


Cells = Annotated[int, Ge(1, 2**31 - 1)]
PadValue = Annotated[float, number]


@dataclass(frozen=True)
class Rule:
    """How one column is padded; None leaves it to the tokenizer or the column's type."""

    max_length: Cells | None = None
    pad_to_multiple_of: Cells | None = None
    padding_side: Side | None = None
    truncation_side: Side | None = None
    value: PadValue | None = None
    mask: Annotated[str | bool, mask_name] | None = None
    dtype: Annotated[torch.dtype, numpy_dtype] | None = None

    def of_column(self, name: str, own: Mapping[str, Any]) -> Rule:
        option, known = "pad_collate(columns)", [field.name for field in fields(Rule)]
        require(isinstance(own, Mapping), option, OPTIONS, {name: own})
        for unknown in set(own) - set(known):
            there = f"{nearest(str(unknown), known)} for {name!r}; there are {', '.join(known)}"
            raise ConfigError(f"{option} has no option {unknown!r}{there}")
        rule = replace(self, **{"value": None, **own})
        for option, check in declared_checks(Rule).items():
            check(getattr(rule, option), f"pad_collate(columns[{name!r}])({option})")
        return rule


def asked_masks(mask: Any, rules: Mapping[str, Rule]) -> dict[str, str]:
    good = mask is None or mask is False
    if isinstance(mask, Mapping):
        good = all(isinstance(name, str) for pair in mask.items() for name in pair)
    rule = 'False, or a dict of columns and their masks such as {"input_ids": "input_mask"}'
    require(good, "pad_collate(mask)", rule, mask)
    masks: dict[str, str] = dict(mask or {})
    masks |= {name: rule.mask for name, rule in rules.items() if isinstance(rule.mask, str)}
    twice = sorted(repeated(masks.values()))
    require(not twice, "pad_collate(mask)", "another name for each mask", twice)
    return masks
