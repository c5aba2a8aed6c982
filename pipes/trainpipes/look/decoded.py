"""The token ids of an item: padding, ids in the loss, and their text in pieces.

Labels stand to the ids beside them in one of these layouts:

- ``aligned``: a label is the token at its place, as in transformers; the model shifts them, and the first
  token of a row is never in the loss.
- ``masked``: a label is the token that was hidden at its place.
- ``own``: labels are a text of their own, such as that of an encoder-decoder.
- ``mask``: no labels; a mask may say which tokens are in the loss.

Other labels, such as classes of tokens, have no text. The loss ignores negative labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import escaped
from trainpipes.interfaces.stage import Stage
from trainpipes.look.values import MASKS, Array, MakesPictures, head
from trainpipes.stages.columns import Rename
from trainpipes.stages.decode_clips import DecodeAudio
from trainpipes.stages.pack import Pack
from trainpipes.stages.token_ids import MaskTokens
from trainpipes.tokenizers.engine import TokenizerEngine

#: Names of columns of token ids and of labels, which may have a prefix such as "chosen_".
IDS = re.compile(r"(|.*[_.])(?:input_ids|token_ids)")
LABELS = re.compile(r"(|.*[_.])(?:labels|target_ids)")
#: Columns that may stand beside ids, after the same prefix, and tell which ids are in the loss.
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
#: What stands where a row has no number.
MISSING = -(1 << 63)
#: Tokens of a row that are shown, and of a piece; so few more are shown, too.
ROW, PIECE, SPARED = 400, 120, 16


# What the pipeline knows


@runtime_checkable
class MakesIds(Protocol):
    """A stage that makes columns of token ids, and the tokenizer of these."""

    @property
    def maker(self) -> TokenizerEngine: ...

    @property
    def id_columns(self) -> list[str]: ...


@dataclass
class KnownIds:
    """What the stages of a pipeline say of the columns that come out."""

    engines: dict[str, TokenizerEngine | None] = field(default_factory=dict)
    masked: bool = False
    pictures: MakesPictures | None = None
    #: Samples a second of columns of sound.
    rates: dict[str, int] = field(default_factory=dict)

    def engine(self, name: str) -> TokenizerEngine | None:
        """The tokenizer of a column; of a new name, the only tokenizer."""
        if name in self.engines:
            return self.engines[name]
        different = {id(engine): engine for engine in self.engines.values()}
        return next(iter(different.values())) if len(different) == 1 else None


def known_ids(plan: Plan) -> KnownIds:
    ids = KnownIds()
    engines = ids.engines
    for stage in _stages(plan.inputs):
        if isinstance(stage, MakesIds):
            for name in stage.id_columns:
                other = engines.get(name, stage.maker)
                same = other is not None and other.fingerprint() == stage.maker.fingerprint()
                engines[name] = stage.maker if same else None
        elif isinstance(stage, Rename):
            names = stage.names.items()
            engines |= {new: engines.pop(old) for old, new in names if old in engines}
            ids.rates |= {new: ids.rates.pop(old) for old, new in names if old in ids.rates}
        elif isinstance(stage, DecodeAudio) and stage.sampling_rate is not None:
            ids.rates[stage.output_column or stage.column] = stage.sampling_rate
        elif isinstance(stage, Pack) and stage.column in engines:
            engines["input_ids"] = engines[stage.column]
        ids.masked |= isinstance(stage, MaskTokens)
        if isinstance(stage, MakesPictures):
            ids.pictures = stage
    return ids


def _stages(inputs: Inputs) -> Iterator[Stage]:
    for part in inputs.parts:
        yield from _stages(part)
    yield from inputs.chain.stages


# The ids of an item


@dataclass(eq=False)
class TokenGrid:
    """Token ids of an item, and facts about each."""

    name: str
    ids: Array
    there: Array
    engine: TokenizerEngine | None = None
    layout: str = ""
    labels: str = ""
    in_loss: Array | None = None
    truth: Array | None = None
    starts: Array | None = None
    picture_token: int | None = None

    @property
    def padding(self) -> int:
        return int(np.count_nonzero(~self.there))

    @property
    def loss_count(self) -> int:
        """Targets of the loss; those on padding are counted, as the loss does."""
        return 0 if self.in_loss is None else int(np.count_nonzero(self.in_loss))


def token_grids(
    values: Mapping[str, Any], known: KnownIds, of_row: bool = False
) -> list[TokenGrid]:
    grids: list[TokenGrid] = []
    for name, value in values.items():
        match = IDS.fullmatch(name)
        if match or (name in known.engines and not LABELS.fullmatch(name)):
            ids = number_grid(value)
            if ids is not None:
                grids.append(_grid(name, match[1] if match else "", ids, values, known, of_row))
    taken = {grid.labels for grid in grids}
    for name, value in values.items():
        if grids and name not in taken and LABELS.fullmatch(name):
            labels = number_grid(value)
            is_ids = name in known.engines or (labels is not None and _stands_at_start(labels))
            if labels is not None and is_ids and (of_row or getattr(value, "ndim", 2) > 1):
                there, engine = labels >= 0, known.engine(name)
                if there.all() and not of_row:
                    there = _unpadded(labels, engine)
                grids.append(TokenGrid(name, labels, there, engine, layout="own", in_loss=there))
    return grids


def _grid(
    name: str, prefix: str, ids: Array, values: Mapping[str, Any], known: KnownIds, of_row: bool
) -> TokenGrid:
    def beside(*names: str) -> Array | None:
        """The first column of these names, after the same prefix, that is as large."""
        candidates = (values.get(f"{prefix}{part}") for part in names)
        # Of positions with several axes, the first is that of the text.
        grids = (
            number_grid(value[0] if isinstance(value, torch.Tensor) and value.ndim == 3 else value)
            for value in candidates
        )
        return next((grid for grid in grids if grid is not None and grid.shape == ids.shape), None)

    engine, segments, positions = known.engine(name), beside("segment_ids"), beside("position_ids")
    mask, weight, labels = beside(*MASKS), beside(*LOSS_MASKS), beside("labels")
    there = ids != MISSING
    if mask is not None:
        there &= mask > 0
    elif there.all() and not of_row:
        there = _unpadded(ids, engine)
    tokens = TokenGrid(name, ids, there, engine)
    if known.pictures is not None:
        tokens.picture_token = known.pictures.picture_token
    if segments is not None:
        tokens.starts = _starts(segments[:, 1:] != segments[:, :-1], there)
    elif positions is not None:
        tokens.starts = _starts(positions[:, 1:] == 0, there)
    weighted = np.ones_like(there) if weight is None else weight > 0
    if labels is None:
        tokens.layout, tokens.in_loss = ("", None) if weight is None else ("mask", weighted)
    elif known.masked or _looks_masked(ids, labels):
        tokens.layout, tokens.in_loss, tokens.truth = "masked", weighted & (labels >= 0), labels
    elif (ids == labels)[labels >= 0].all():
        tokens.layout, tokens.in_loss = "aligned", weighted & (labels >= 0)
    tokens.labels = f"{prefix}labels" if tokens.layout in ("masked", "aligned") else ""
    if tokens.in_loss is not None and tokens.truth is None:
        tokens.in_loss[:, :1] = False
    return tokens


def _looks_masked(ids: Array, labels: Array) -> bool:
    hidden = ids[(labels >= 0) & (ids != labels)]
    most = np.unique(hidden, return_counts=True)[1].max(initial=0)
    return most * 2 > hidden.size and not _stands_at_start(labels)


def _stands_at_start(labels: Array) -> bool:
    valid = labels >= 0
    return bool(valid.any()) and bool((valid[:, 1:] <= valid[:, :-1]).all())


def _starts(begins: Array, there: Array) -> Array:
    """Cells with which documents begin; padding on the left begins nothing."""
    starts = np.zeros_like(there)
    starts[:, 1:] = begins & there[:, 1:] & np.logical_or.accumulate(there, axis=1)[:, :-1]
    return starts


def _unpadded(ids: Array, engine: TokenizerEngine | None) -> Array:
    """All but pad tokens at the ends of rows; where they also end texts, the first stays."""
    pad = None if engine is None else engine.special.pad
    if pad is None or engine is None:
        return np.ones(ids.shape, dtype=np.bool_)
    real = ids != pad
    first = np.logical_or.accumulate(real, axis=1)
    last = np.logical_or.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    there: Array = first & last
    if pad in engine.special.ends.values():
        there[:, 1:] |= last[:, :-1] & ~last[:, 1:] & first[:, 1:]
    return there


def number_grid(value: Any) -> Array | None:
    """Whole numbers as ``[B, L]``, filled up with ``MISSING``; None for anything else."""
    if isinstance(value, torch.Tensor | np.ndarray) and not _is_ragged(value):
        numbers = head(value)
        if (
            numbers is None
            or numbers.dtype.kind not in "biu"
            or not numbers.size
            or numbers.ndim > 2
        ):
            return None
        return np.atleast_2d(numbers)
    value = value.cpu().unbind() if isinstance(value, torch.Tensor) else value
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        return None
    nested = isinstance(value[0], list | tuple | np.ndarray | torch.Tensor)
    try:
        rows = [
            torch.as_tensor(np.asarray(row), device="cpu") for row in (value if nested else [value])
        ]
        if any(row.ndim != 1 or (len(row) and row.is_floating_point()) for row in rows):
            return None
        whole = [row.to(torch.int64) for row in rows]
        filled: Array = pad_sequence(whole, batch_first=True, padding_value=MISSING).numpy()
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # of texts, lists of several lengths, other devices
        return None
    return filled if filled.size else None


def _is_ragged(value: Any) -> bool:
    return value.is_nested if isinstance(value, torch.Tensor) else value.dtype == object


# Their text


class Piece(NamedTuple):
    """Some tokens that stand side by side."""

    kind: str
    text: str = ""
    tokens: int = 0
    truth: str | None = None


def pieces_of(grid: TokenGrid, row: int, most: int = ROW) -> list[Piece]:
    """A row in pieces of tokens that are the same to the loss, at most so many decoded."""
    ids, there, engine = grid.ids[row], grid.there[row], grid.engine
    in_loss = np.zeros_like(there) if grid.in_loss is None else grid.in_loss[row]
    starts = np.zeros_like(there) if grid.starts is None else grid.starts[row]
    shown = there | in_loss
    drawn = shown & (ids == (MISSING if grid.picture_token is None else grid.picture_token))
    cuts = np.ones(len(ids), dtype=np.bool_)
    cuts[1:] = (shown[1:] != shown[:-1]) | (in_loss[1:] != in_loss[:-1]) | starts[1:]
    cuts[1:] |= drawn[1:] != drawn[:-1]
    if grid.truth is not None:  # each hidden token has a label of its own
        cuts[1:] |= in_loss[1:]
    pieces: list[Piece] = []
    for start, stop in pairwise([*np.flatnonzero(cuts).tolist(), len(ids)]):
        if starts[start]:
            pieces.append(Piece("document"))
        if not shown[start]:
            pieces.append(Piece("padding", tokens=stop - start))
            continue
        if drawn[start]:
            pieces.append(Piece("picture", _text(engine, ids, start, start + 1), stop - start))
            continue
        if most <= 0 and stop < len(ids):
            tokens = int(np.count_nonzero(there[start:]))
            pieces.append(Piece("left_out", tokens=tokens))
            if tokens < len(ids) - start:
                pieces.append(Piece("padding", tokens=len(ids) - start - tokens))
            break
        share = min(PIECE, max(most, SPARED))
        share = stop - start if stop - start <= share + SPARED else share
        most -= share
        kind, truth = "loss" if in_loss[start] else "plain", None
        if in_loss[start] and grid.truth is not None and ids[start] != grid.truth[row, start]:
            kind, truth = "masked", _text(engine, grid.truth[row, start : start + 1], 0, 1)
        first, last = start + share - share // 2, stop - share // 2
        for begin, end in [(start, first), (last, stop)] if first < last else [(start, stop)]:
            if begin > start:
                pieces.append(Piece("left_out", tokens=last - first))
            pieces.append(Piece(kind, _text(engine, ids, begin, end), end - begin, truth))
    return pieces


def _text(engine: TokenizerEngine | None, ids: Array, start: int, stop: int) -> str:
    """The text of tokens after those before them, so that no space or part is lost."""
    context = max(0, start - 8)
    whole = None if engine is None else engine.decode(ids[context:stop].tolist())
    before = None if engine is None else engine.decode(ids[context:start].tolist())
    if whole is None or before is None:
        return " ".join(map(str, ids[start:stop].tolist()))
    same = (k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b)
    return escaped(whole[next(same, len(before)) :])
