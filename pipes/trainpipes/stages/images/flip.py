"""``flip``: images mirrored by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Literal

import numpy as np

from trainpipes._internal.checks import ColumnName, Seed, Share
from trainpipes.stages.images.image_stage import RandomImageStage
from trainpipes.stages.images.pixels import Pixels


class Flip(RandomImageStage):
    """Mirrors some images, left to right or top to bottom.

    In: rows with an image ``[C, H, W]``. Out: the same rows, dicts. Cursor: none of its own. Costs about
    40 us for an image of 224 x 224 pixels that is mirrored. The choice is a function of seed, epoch and row:
    another one in every epoch, and the same after a resume and on any topology.

    Args:
        p: the probability of mirroring an image, 0 to 1.
        direction: "horizontal", left to right; or "vertical".
        column: the image.
        seed: for the choice.

    Raises:
        DataError: a row holds no image; names the row.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.array([[[1, 2, 3]]], np.uint8)}] * 4)
    >>> [row["image"].tolist() for row in rows.flip(seed=2)]
    [[[[1, 2, 3]]], [[[3, 2, 1]]], [[[3, 2, 1]]], [[[1, 2, 3]]]]
    """

    p: Share = 0.5
    _: KW_ONLY
    direction: Literal["horizontal", "vertical"] = "horizontal"
    column: ColumnName = "image"
    seed: Seed = 0

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        if drawn[0] >= self.p:
            return image
        axis = 2 if self.direction == "horizontal" else 1
        return np.ascontiguousarray(np.flip(image, axis))
