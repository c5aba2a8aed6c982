"""The token ids among an item's values, with what stands beside them: masks, labels, documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainpipes.look.preview.grids import Array, grid
from trainpipes.look.preview.known_ids import KnownIds
from trainpipes.look.preview.targets import agree, follow, is_own, targets_of
from trainpipes.tokenizers.engine import Engine

__all__ = ["TokenGrid", "token_grids"]

#: What columns of token ids are called, some of them after a prefix such as "chosen_".
IDS = re.compile(
    r"(?P<prefix>|.*[_.])(input_ids|token_ids)"
    r"|(?P<whole>|.*\.)(tokens|inputs|input|ids|idx)"
    r"|(?P<side>(|.*\.)(prompt|chosen|rejected|completion)_)ids"
)
#: What stands beside them after the same prefix: labels, and what they are if they are a text of their own.
LABELS = ("labels", "targets", "target_ids", "target")
OWN = re.compile(r"(|.*[_.])(labels|target_ids)")
MASKS = ("attention_mask", "input_mask")
LEARNT = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "response_mask")
SEGMENTS = ("segment_ids", "document_ids", "doc_ids", "seq_idx")
POSITIONS = ("position_ids", "positions", "input_pos")
EDGES = ("cu_seqlens", "cu_seq_lens_q")


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """Token ids of an item, and what is known of each.

    Attributes:
        name: of the column.
        ids: ``[B, L]``.
        there: which cells hold a token, bool ``[B, L]``; the others are padding.
        layout: how targets stand to ids: see ``targets``; "" where there are none.
        learnt: which tokens are targets, bool ``[B, L]``; None where nothing says so.
        truth: labels that the tokens differ from, ``[B, L]``, where tokens are masked.
        beyond: of shifted labels, the target after each row's last token ``[B]``, -1 for none.
        starts: with which tokens a document begins, bool ``[B, L]``; None where a row is one.
        told: whether the batch says what is padding; else it is told by the tokenizer's pad token.
        engine: the tokenizer.
    """

    name: str
    ids: Array
    there: Array
    layout: str = ""
    learnt: Array | None = None
    truth: Array | None = None
    beyond: Array | None = None
    starts: Array | None = None
    told: bool = True
    engine: Engine | None = None

    @property
    def tokens(self) -> int:
        return int(np.count_nonzero(self.there))

    @property
    def padding(self) -> int:
        return int(self.there.size) - self.tokens

    @property
    def learnt_count(self) -> int:
        """Targets, those on padding included: the loss counts them."""
        beyond = 0 if self.beyond is None else int(np.count_nonzero(self.beyond >= 0))
        return beyond + (0 if self.learnt is None else int(np.count_nonzero(self.learnt)))

    @property
    def learnt_padding(self) -> int:
        """Targets that are padding."""
        return 0 if self.learnt is None else int(np.count_nonzero(self.learnt & ~self.there))


def token_grids(
    values: Mapping[str, Any], known: KnownIds, of_row: bool = False
) -> list[TokenGrid]:
    """The token ids among an item's values.

    Args:
        values: by name.
        known: what the pipeline says of them.
        of_row: whether they are of one row, which has no padding.
    """
    found: list[TokenGrid] = []
    taken = set(known.classes)
    for name in values:
        prefix = _prefix(name, known)
        if prefix is None or name in taken:
            continue
        made = _grid_of(name, prefix, values, known, taken, of_row)
        if made is not None:
            taken.add(name)
            found.append(made)
    for name in values:
        if name not in taken and OWN.fullmatch(name) and (found or name in known.own):
            own = _own(name, values[name], known, of_row)
            found += [] if own is None else [own]
    return found or _pair(values, known)


def _prefix(name: str, known: KnownIds) -> str | None:
    """What the name of a column of ids begins with; None of another column."""
    match = IDS.fullmatch(name)
    if match is not None:
        return next(part for part in match.group("prefix", "whole", "side") if part is not None)
    return "" if name in known.engines and not OWN.fullmatch(name) else None


def _beside(
    prefix: str, ends: tuple[str, ...], values: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[str, Array] | None:
    """The first column of these names beside ids that is as large."""
    for name in [f"{prefix}{end}" for end in ends]:
        found = _whole(values.get(name))
        if found is not None and found.shape == shape:
            return name, found
    return None


def _whole(value: Any) -> Array | None:
    made = grid(_as_numbers(value))
    if made is None:
        return None
    return made[0] if made[1] is None else np.where(made[1], made[0], -100)


def _as_numbers(value: Any) -> Any:
    """Bools as whole numbers."""
    if str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return value.int() if hasattr(value, "int") else value.astype(np.int8)
    if isinstance(value, list | tuple) and value and isinstance(value[0], bool):
        return [int(one) for one in value]
    return value


def _grid_of(
    name: str,
    prefix: str,
    values: Mapping[str, Any],
    known: KnownIds,
    taken: set[str],
    of_row: bool,
) -> TokenGrid | None:
    """A column of ids with what stands beside it; adds what is its labels to ``taken``."""
    made = grid(values[name])
    if made is None or not made[0].size:
        return None
    ids, there = made
    shape = ids.shape
    engine = known.engine(name)
    told = True
    mask = _beside(prefix, MASKS, values, shape)
    segments = _beside(prefix, SEGMENTS, values, shape)
    if there is None and mask is not None:
        there = mask[1] > 0
    if there is None and segments is not None:
        there = segments[1] > 0
    if there is None:
        there, told = _unpadded(ids, None if of_row else engine), False
    grid_ = TokenGrid(name, ids, there, told=told, engine=engine)
    starts = _starts(prefix, values, shape, there, segments)
    labels = _labels(prefix, name, values, known, shape)
    weight = _beside(prefix, LEARNT, values, shape)
    if labels is None and weight is not None:
        learnt = weight[1] > 0
        learnt[:, :1] = False
        return _with(grid_, layout="mask", learnt=learnt, starts=starts)
    if labels is None:
        return _with(grid_, starts=starts)
    taken.add(labels[0])
    compared = labels[1] if weight is None else np.where(weight[1] > 0, labels[1], -100)
    return _with(
        grid_, starts=starts, **vars(targets_of(ids, compared, there, labels[1], known.masked))
    )


def _with(made: TokenGrid, **changes: Any) -> TokenGrid:
    return TokenGrid(**{**vars(made), **changes})


def _labels(
    prefix: str, name: str, values: Mapping[str, Any], known: KnownIds, shape: tuple[int, ...]
) -> tuple[str, Array] | None:
    """The labels of a column of ids, unless they are a text of their own."""
    no = {*known.own, *known.classes}
    names = tuple(end for end in LABELS if f"{prefix}{end}" not in no)
    found = _beside(prefix, names, values, shape)
    if found is None and "." in prefix:  # ({"input": ids}, labels)
        rest = {key: value for key, value in values.items() if not key.startswith(prefix)}
        if len(rest) == 1:
            found = _beside("", tuple(rest), rest, shape)
    if found is None:
        return None
    ids = _whole(values[name])
    assert ids is not None
    return None if is_own(ids, found[1]) and not known.masked else found


def _starts(
    prefix: str,
    values: Mapping[str, Any],
    shape: tuple[int, ...],
    there: Array,
    segments: tuple[str, Array] | None,
) -> Array | None:
    """With which tokens documents begin, the first of a row left out; None where rows are not packed."""
    found = np.zeros(shape, dtype=np.bool_)
    positions = _beside(prefix, POSITIONS, values, shape)
    edges = next(
        (e for end in EDGES if (e := _whole(values.get(f"{prefix}{end}"))) is not None), None
    )
    if segments is not None:
        found[:, 1:] = segments[1][:, 1:] != segments[1][:, :-1]
    elif positions is not None:
        found[:, 1:] = positions[1][:, 1:] == 0
    elif edges is not None:
        inside = edges.reshape(-1)
        found.reshape(-1)[inside[(inside > 0) & (inside < found.size)]] = True
    else:
        return None
    found &= there
    found[:, 0] = False
    before = np.zeros(shape, dtype=np.bool_)  # padding on the left begins nothing
    before[:, 1:] = np.logical_or.accumulate(there, axis=1)[:, :-1]
    return found & before


def _own(name: str, value: Any, known: KnownIds, of_row: bool) -> TokenGrid | None:
    """Targets that are a text of their own."""
    made = grid(value)
    if made is None or not made[0].size or (made[0].shape[0] == 1 and not of_row and _flat(value)):
        return None
    ids, there = made
    engine = known.engine(name)
    told = there is not None or bool((ids < 0).any())
    there = ids >= 0 if there is None else there & (ids >= 0)
    if not told and not of_row:
        there = _unpadded(ids, engine)
    return TokenGrid(name, ids, there, "own", there, told=told, engine=engine)


def _flat(value: Any) -> bool:
    """Whether it is one number a row: classes."""
    return getattr(value, "ndim", 1) == 1


def _unpadded(ids: Array, engine: Engine | None) -> Array:
    """Where no padding is: that of the tokenizer's pad token, at a row's start or end. One that also ends
    texts stands for an end once."""
    pad = None if engine is None else engine.pad_id()
    if pad is None or engine is None:
        return np.ones(ids.shape, dtype=np.bool_)
    real = ids != pad
    first = np.logical_or.accumulate(real, axis=1)
    last = np.logical_or.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    there: Array = first & last
    if pad in engine.ends().values():
        ended = ~last
        there |= ended & ~np.pad(ended, ((0, 0), (1, 0)))[:, :-1] & first
    return there


def _pair(values: Mapping[str, Any], known: KnownIds) -> list[TokenGrid]:
    """(inputs, targets) without names: the second one the first, shifted."""
    if list(values) != ["0", "1"]:
        return []
    ids, labels = _whole(values["0"]), _whole(values["1"])
    if ids is None or labels is None or ids.shape != labels.shape or ids.size < 2:
        return []
    there = np.ones(ids.shape, dtype=np.bool_)
    same = bool((labels >= 0).any()) and agree(ids, labels, labels >= 0)
    if not same and not follow(ids, labels, there):
        return []
    made = TokenGrid("0", ids, there, told=False, engine=known.engine("0"))
    return [_with(made, **vars(targets_of(ids, labels, there, labels, False)))]
