"""What ``pad_collate`` is told of a column: sides, lengths, pad value, dtype, mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trainpipes._internal.checks import repeated, require, whole_number, wrong
from trainpipes._internal.messages import nearest
from trainpipes.columns.rectangles import Side
from trainpipes.errors import ConfigError

#: Pad values that hold whatever ``value`` says: what is masked must not depend on the pad token.
FIXED = {"labels": -100, "attention_mask": 0, "token_type_ids": 0}


@dataclass(frozen=True)
class Rule:
    """How one column is padded; None leaves it to the tokenizer or the column's type. Options are
    those of ``PadCollate``."""

    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    padding_side: Side | None = None
    truncation_side: Side | None = None
    value: float | None = None
    mask: str | bool | None = None
    dtype: torch.dtype | None = None

    def check(self, asker: str) -> None:
        for name in ("max_length", "pad_to_multiple_of"):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                whole_number(value, 1, f"{asker}({name})", "cells of a row", most=2**31 - 1)
        for name in ("padding_side", "truncation_side"):
            side = getattr(self, name)
            require(side in (None, "right", "left"), f"{asker}({name})", '"right" or "left"', side)
        number = not isinstance(self.value, bool) and isinstance(self.value, int | float | None)
        require(number, f"{asker}(value)", "a number to pad with", self.value)
        good = isinstance(self.mask, str | None) or self.mask is False
        require(good, f"{asker}(mask)", "a name for the mask, or False", self.mask)
        if self.dtype is not None:
            numpy_dtype(self.dtype, asker)


def numpy_dtype(dtype: Any, asker: str) -> np.dtype[Any]:
    """NumPy's name for a torch dtype."""
    try:
        if not isinstance(dtype, torch.dtype):  # torch takes None and Python's types, too
            raise TypeError
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        rule, way = "a torch.dtype that NumPy has, too", "for another, convert in a map() after it"
        raise wrong(f"{asker}(dtype)", rule, dtype, way) from None


def column_options(name: str, own: Any) -> dict[str, Any]:
    """What ``columns`` says of one column."""
    known = [field.name for field in fields(Rule)]
    rule = "a dict of column names and dicts of options"
    require(isinstance(own, Mapping), "pad_collate(columns)", rule, {name: own})
    for option in own:
        if option not in known:
            raise ConfigError(
                f"pad_collate(columns) has no option {option!r}{nearest(str(option), known)} for "
                f"{name!r}; there are {', '.join(known)}"
            )
    return dict(own)


def column_rule(rule: Rule, name: str, own: Mapping[str, Any]) -> Rule:
    """The rule of one column: that of all, but for what ``columns`` says of it."""
    found = replace(rule, **{"value": None, **own})
    found.check(f"pad_collate(columns[{name!r}])")
    return found


def asked_masks(mask: Any, rules: Mapping[str, Rule]) -> dict[str, str]:
    """Masks asked for by name: column and name of its mask."""
    if isinstance(mask, Mapping):
        good = all(isinstance(name, str) for pair in mask.items() for name in pair)
    else:
        good = mask is None or mask is False
    rule = 'False, or a dict of columns and their masks such as {"input_ids": "input_mask"}'
    require(good, "pad_collate(mask)", rule, mask)
    masks: dict[str, str] = dict(mask or {})
    masks |= {name: rule.mask for name, rule in rules.items() if isinstance(rule.mask, str)}
    names = list(masks.values())
    twice = sorted(repeated(names))
    if twice:
        raise wrong("pad_collate(mask)", "another name for each mask", twice)
    return masks
