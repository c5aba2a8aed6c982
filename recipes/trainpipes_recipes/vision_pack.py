"""Conversations with pictures that share rows of one length: which go together, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

import trainpipes as tp
from trainpipes._internal.checks import ColumnName, Count, IntArray, Seed
from trainpipes.columns.arrays import stretches
from trainpipes.columns.packing import (
    IGNORED,
    Placing,
    best_fit,
    best_window,
    fit_a_row,
    joint_window,
    placed,
)
from trainpipes.columns.run import Run
from trainpipes.interfaces.held import Held, around, opened
from trainpipes.interfaces.read_columns import at_row, lengths_of
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import BatchingStage, OpenBelow
from trainpipes.order.permutation import permutation
from trainpipes_recipes.vision import Processor

__all__ = ["PackBatches", "check_packs", "packed", "rows_of"]

#: Processors whose models give packed rows the loss that they have one by one; those with positions of
#: three axes, and the class of transformers that knows them.
FAMILIES: Mapping[str, str] = {
    "LlavaProcessor": "",
    "LlavaNextProcessor": "",
    "Idefics3Processor": "",
    "Qwen2VLProcessor": "qwen2_vl.Qwen2VL",
    "Qwen2_5_VLProcessor": "qwen2_5_vl.Qwen2_5_VL",
}


class PackBatches(BatchingStage, keeps_rows=False):
    """Group rows into batches that ``packed`` makes ``rows`` rows of ``max_length`` tokens of.

    Rows of a buffer are placed by best fit, as in ``pack``; none is split. Batches of a buffer come
    in an order drawn with ``seed``; the last one made of it may have fewer rows.

    Args:
        max_length: tokens of a packed row.
        rows: packed rows in a batch.
        column: gives a row's length.
        buffer_size: rows that are placed together.
        seed: for the order.

    Raises:
        DataError: a row is longer than ``max_length``.

    >>> lengths = tp.from_dataset([{"length": n} for n in (3, 6, 5, 4, 7)])
    >>> [[row["length"] for row in rows] for rows in lengths.then(PackBatches(10))]
    [[3, 7], [5], [6, 4]]
    """

    max_length: Count
    _: KW_ONLY
    rows: Count = 1
    column: ColumnName = "length"
    buffer_size: Count = 1024
    seed: Seed = 0

    _reorders: ClassVar[bool] = False

    def _resolve(self, below: Sequence[Stage]) -> Self:
        return self._resolved(_reorders=any(stage.traits.reorders for stage in below))

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        at, used = opened(at)
        return self._batches(Held(self, below(at), joints=True), used)

    def _batches(self, held: Held, used: int) -> Iterator[Run]:
        size, least = self.buffer_size, 0
        while held.fill(size, least):
            count = min(size, held.rows)
            block = held.waiting().block.slice(0, count)
            lengths = self._lengths(block)
            joints = held.joints(size)
            begun, end = around(joints, fit_a_row(lengths, joints, self.max_length, None))
            if end is None and count < size and not held.ended:
                least = 2 * count  # one row holds conversations of many epochs
                continue
            least = 0
            count, placing = self._placed(lengths[:end], end, begun, count == size)
            order = permutation(len(placing), self.seed, "rows", int(block.ids[0]))
            placing = placing.take(order)
            bounds = placing.bounds[np.append(np.arange(0, len(placing), self.rows), len(placing))]
            mixed, cursors = held.window(len(bounds) - 1, count, used, "pack", self._reorders)
            sizes = np.diff(bounds)[mixed]
            places = placing.document[stretches(bounds[:-1][mixed], sizes)]
            cuts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
            for number in range(used, len(mixed)):
                rows = block.take(places[cuts[number] : cuts[number + 1]])
                cut = np.array([0, len(rows)], dtype=np.int64)
                yield Run(rows, cursors(number, number + 1), cut)
            used = 0

    def _placed(
        self, lengths: IntArray, end: int | None, begun: int, full: bool
    ) -> tuple[int, Placing]:
        if end is not None:
            return joint_window(lengths, self.max_length, None, best_fit, begun)
        if full:
            return best_window(lengths, self.max_length, None, begun)
        return len(lengths), placed(lengths, self.max_length, None, best_fit, begun)

    def _lengths(self, block: Any) -> IntArray:
        lengths = lengths_of(block, self.column, self)
        if (lengths > self.max_length).any():
            place = int(np.argmax(lengths > self.max_length))
            rule = (
                f"a row has at most max_length={self.max_length:,} tokens, got {lengths[place]:,}"
            )
            raise at_row(f"{self}: {rule}: raise it, or leave the row out", self, block.ids[place])
        return lengths


def rows_of(lengths: Sequence[int], max_length: int) -> list[int]:
    """The packed row of each of the rows of a batch: the next one where a row has no room.

    >>> rows_of([3, 7, 6, 4, 5], 10)
    [0, 0, 1, 1, 2]
    """
    numbers, row, used = [], 0, 0
    for length in lengths:
        if used + length > max_length:
            row, used = row + 1, 0
        used += length
        numbers.append(row)
    return numbers


def check_packs(processor: Processor) -> None:
    """Raise unless rows of this processor can be packed."""
    if not {*FAMILIES} & {*processor.families}:
        known = ", ".join(name.removesuffix("Processor") for name in FAMILIES)
        rule = f"vision_chat(packed=True) packs for the processors of {known}"
        why = (
            "of others it is not known whether packed rows have the loss that they have one by one"
        )
        raise tp.ConfigError(
            f"{rule}, got {processor.family}, and {why}: leave packed out, and give max_tokens"
        )


def packed(
    batch: Mapping[str, Any], processor: Processor, rows: Sequence[int], max_length: int
) -> dict[str, Any]:
    """A batch whose rows share rows of ``max_length`` tokens.

    Args:
        batch: of ``Processor.batch``: conversations ``[n, L]``, with "attention_mask".
        rows: the packed row of each, ascending.
    """
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    shape = rows[-1] + 1, max_length
    row, start = np.array(rows), np.cumsum(lengths) - lengths
    first = np.searchsorted(row, row)  # the first conversation of the same packed row
    begins = row * max_length + start - start[first]
    cells = torch.from_numpy(stretches(begins, np.array(lengths)))

    def spread(values: Tensor, fill: int) -> Tensor:
        """``[..., n, L]`` to ``[..., rows, max_length]``."""
        out = values.new_full((*values.shape[:-2], shape[0] * shape[1]), fill)
        out[..., cells] = values[..., mask]
        return out.view(*values.shape[:-2], *shape)

    labels = batch["labels"].clone()
    labels[:, 0] = IGNORED  # which the last token before would be compared with
    fills = {"input_ids": processor.pad_id, "labels": IGNORED}
    columns = {
        name: spread(value, fills.get(name, 0)) if _is_of_tokens(value, mask) else value
        for name, value in {**batch, "labels": labels}.items()
        if name != "attention_mask"
    }
    positions = _positions(batch, processor, mask)
    columns["position_ids"] = spread(positions, 0)
    if positions.ndim == 2:  # else the model's part for pictures would take them for its own
        ends = begins + lengths
        edges = np.unique(np.concatenate([begins, ends, np.arange(shape[0] + 1) * max_length]))
        columns["cu_seqlens"] = torch.from_numpy(edges.astype(np.int32))
        columns["max_seqlen"] = max(b - a for a, b in pairwise(edges.tolist()))
    return columns


def _is_of_tokens(value: Any, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mask.shape


def _positions(batch: Mapping[str, Any], processor: Processor, mask: Tensor) -> Tensor:
    """From 0 in each conversation, ``[n, L]``; of three axes ``[4, n, L]``, these first."""
    plain = torch.arange(mask.shape[1]).expand(mask.shape)
    names = (FAMILIES[name] for name in processor.families if name in FAMILIES)
    where = next(names, "")
    if not where:
        return plain
    module, _, name = where.partition(".")
    models = import_module(f"transformers.models.{module}.modeling_{module}")
    knows = _Knows(getattr(models, f"{name}Model"), getattr(models, f"{name}Config"), processor)
    axes, _ = knows.get_rope_index(
        batch["input_ids"], mm_token_type_ids=batch["mm_token_type_ids"],
        image_grid_thw=batch.get("image_grid_thw"), attention_mask=batch["attention_mask"],
    )  # fmt: skip
    return torch.cat([plain[None], axes])


class _Knows:
    """A model's functions of positions, without the model."""

    def __init__(self, model: Any, config: Any, processor: Processor) -> None:
        self._model = model
        self.config = config()
        merged = processor.loaded.processor.image_processor.merge_size
        self.config.vision_config.spatial_merge_size = merged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name).__get__(self)
