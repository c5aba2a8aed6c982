"""What ``pad_collate`` is told of a column: sides, lengths, pad value, dtype, mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import nearest
from trainpipes._internal.text import shown
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
            if getattr(self, name) not in (None, "right", "left"):
                raise ConfigError(
                    f'{asker}({name}) is "right" or "left", got {shown(getattr(self, name))}'
                )
        if isinstance(self.value, bool) or not isinstance(self.value, int | float | None):
            raise ConfigError(f"{asker}(value) is a number to pad with, got {shown(self.value)}")
        if not isinstance(self.mask, str | None) and self.mask is not False:
            raise ConfigError(
                f"{asker}(mask) of a column is a name for its mask, or False, got {shown(self.mask)}"
            )
        if self.dtype is not None:
            numpy_dtype(self.dtype, asker)


def numpy_dtype(dtype: Any, asker: str) -> np.dtype[Any]:
    """NumPy's name for a torch dtype."""
    try:
        if not isinstance(
            dtype, torch.dtype
        ):  # torch takes None, and Python's types, for some dtype
            raise TypeError
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise ConfigError(
            f"{asker}(dtype) is a torch.dtype that NumPy has too (torch.int64, torch.float32, …), got "
            f"{dtype!r}; for another, convert in a map() after it"
        ) from None


def column_options(name: str, own: Any) -> dict[str, Any]:
    """What ``columns`` says of one column."""
    known = [field.name for field in fields(Rule)]
    if not isinstance(own, Mapping):
        raise ConfigError(
            f"pad_collate(columns) is a dict of column names and dicts of options, got {shown(own)} for "
            f"{name!r}"
        )
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
        if not all(isinstance(name, str) for pair in mask.items() for name in pair):
            raise ConfigError(
                f"pad_collate(mask) is a dict of column names and names, got {shown(mask)}"
            )
    elif mask is not None and mask is not False:
        raise ConfigError(
            "pad_collate(mask) is False for none, or a dict of columns and names of their masks "
            f'({{"input_ids": "input_mask"}}), got {shown(mask)}'
        )
    masks: dict[str, str] = dict(mask or {})
    masks |= {name: rule.mask for name, rule in rules.items() if isinstance(rule.mask, str)}
    names = list(masks.values())
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"pad_collate(mask): each mask needs a name of its own, got {twice} twice"
        )
    return masks
