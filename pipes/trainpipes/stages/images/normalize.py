"""``normalize``: pixels to floats around 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainpipes._internal.checks import ColumnName, require, several
from trainpipes._internal.messages import need_columns
from trainpipes._internal.text import shown
from trainpipes.columns.run import Run
from trainpipes.errors import DataError, SchemaError
from trainpipes.kinds.blame import each
from trainpipes.kinds.stage import made_once
from trainpipes.stages.images.image_stage import ImageStage
from trainpipes.stages.images.pixels import Pixels

#: Of the photos of ImageNet, which most published models were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalize(ImageStage):
    """Turns pixels into float32: ``(x / 255 - mean) / std``, with the mean and the standard deviation of each
    channel. Floats are not divided; integers other than uint8 are divided by the largest of their type.

    In: rows with an image ``[C, H, W]``; or, after ``collate``, batches with images ``[B, C, H, W]``, which
    is faster, and gives the same numbers. Out: the same, float32. Cursor: none of its own. Costs about 60 us
    for an image of 224 x 224 pixels. Where a GPU waits for data, let the model do this instead: copying
    bytes costs a quarter of copying floats.

    Args:
        mean: of each channel, for values from 0 to 1, or one for all; by default those of ImageNet.
        std: of each channel, or one for all.
        column: the image.

    Raises:
        DataError: an image has another number of channels; names the row.
        SchemaError: batches have no such column of tensors.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.array([[[0, 51, 255]]], np.uint8)}])
    >>> next(iter(rows.normalize(0.5, 0.5)))["image"].tolist()
    [[[-1.0, -0.6000000238418579, 1.0]]]
    >>> next(iter(rows.batch(1).collate().normalize(0.5, 0.5)))["image"].shape
    torch.Size([1, 1, 1, 3])
    """

    mean: float | Sequence[float] = MEAN
    std: float | Sequence[float] = STD
    _: KW_ONLY
    column: ColumnName = "image"

    def check(self) -> None:
        for name in ("mean", "std"):
            given = self.options[name]
            values = list(given) if several(given) else [given]
            good = [isinstance(x, int | float) and not isinstance(x, bool) for x in values]
            finite = values and all(good) and np.isfinite(values).all()
            require(finite, f"normalize({name})", "a number, or one of each channel", given)
            require(name != "std" or min(values) > 0, "normalize(std)", "above 0", given)

    @made_once
    def _numbers(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Mean and deviation, float32 ``[C, 1, 1]`` or ``[1, 1, 1]``."""
        mean, std = (
            np.array(value if several(value) else [value], dtype=np.float32)[:, None, None]
            for value in (self.mean, self.std)
        )
        return mean, std

    def process(self, run: Run) -> Run:
        if run.items is None:
            return super().process(run)
        return run.with_items(each(self, self._of_batch, run))

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        mean, std = self._numbers
        channels = image.shape[-3]
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise DataError(
                    f"{self}: an image has {channels} channels, and {name} {len(values)} values: give one "
                    "for each",
                    stage=str(self),
                )
        found: Pixels = image.astype(np.float32)
        if image.dtype.kind in "iu":
            found /= np.float32(np.iinfo(image.dtype).max)
        found -= mean
        found /= std
        return found

    def _of_batch(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise SchemaError(
                f"{self} works on batches that are dicts of tensors, got {type(batch).__name__}: "
                "put collate() before it, or use map()",
                stage=str(self),
            )
        need_columns(list(batch), [self.column], self)
        images = batch[self.column]
        if not isinstance(images, torch.Tensor) or images.dim() != 4:
            said = list(images.shape) if isinstance(images, torch.Tensor) else shown(images, 60)
            raise SchemaError(
                f"{self}: column {self.column!r} holds images, a tensor [B, C, H, W], got {said}",
                stage=str(self),
            )
        return {**batch, self.column: torch.from_numpy(self.changed(images.numpy(), ()))}
