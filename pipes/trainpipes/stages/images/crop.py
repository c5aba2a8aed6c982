"""``random_crop`` and ``center_crop``: parts of images, all of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np

from trainpipes._internal.checks import ColumnName, Ge, Natural, Seed
from trainpipes.stages.images.image_stage import ImageStage, RandomImageStage, Size, size_of
from trainpipes.stages.images.pixels import NoPicture, Pixels


class RandomCrop(RandomImageStage):
    """Cuts a part out of each image, at a random place.

    In: rows with an image ``[C, H, W]``. Out: the same rows, dicts, with images of ``size``. Cursor: none of
    its own. Costs about 20 us an image. The place is a function of seed, epoch and row: another one in every
    epoch, and the same after a resume and on any topology.

    Args:
        size: side of a square, or (height, width), in pixels.
        padding: pixels that are put around the image first.
        fill: the value of these pixels, in all channels.
        column: the image.
        seed: for the places.

    Raises:
        DataError: a row holds no image, or one that is smaller; names the row.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.arange(64, dtype=np.uint8).reshape(1, 8, 8)}])
    >>> pipe = rows.random_crop(2)
    >>> [next(iter(pipe))["image"].tolist() for epoch in range(2)]
    [[[[3, 4], [11, 12]]], [[[12, 13], [20, 21]]]]
    """

    draws = 2

    size: Size
    _: KW_ONLY
    padding: Natural = 0
    fill: Annotated[int, Ge(0, 255)] = 0
    column: ColumnName = "image"
    seed: Seed = 0

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        if self.padding:
            around = (self.padding, self.padding)
            image = np.pad(image, ((0, 0), around, around), constant_values=self.fill)
        height, width = size_of(self.size, "random_crop(size)")
        room = image.shape[1] - height + 1, image.shape[2] - width + 1
        if min(room) < 1:
            raise too_small(image, (height, width))
        return part(image, int(drawn[0] * room[0]), int(drawn[1] * room[1]), height, width)


class CenterCrop(ImageStage):
    """Cuts the middle out of each image: for evaluation.

    In: rows with an image ``[C, H, W]``. Out: the same rows, dicts, with images of ``size``. Cursor: none of
    its own. Costs about 10 us an image.

    Args:
        size: side of a square, or (height, width), in pixels.
        column: the image.

    Raises:
        DataError: a row holds no image, or one that is smaller; names the row.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.arange(36, dtype=np.uint8).reshape(1, 6, 6)}])
    >>> next(iter(rows.center_crop((2, 4))))["image"].tolist()
    [[[13, 14, 15, 16], [19, 20, 21, 22]]]
    """

    size: Size
    _: KW_ONLY
    column: ColumnName = "image"

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        height, width = size_of(self.size, "center_crop(size)")
        room = image.shape[1] - height, image.shape[2] - width
        if min(room) < 0:
            raise too_small(image, (height, width))
        return part(image, room[0] // 2, room[1] // 2, height, width)


def part(image: Pixels, top: int, left: int, height: int, width: int) -> Pixels:
    """A part of an image, in memory of its own."""
    return np.array(image[:, top : top + height, left : left + width], order="C")


def too_small(image: Pixels, size: tuple[int, int]) -> NoPicture:
    """What to raise where an image is smaller than what is to be cut out of it."""
    return NoPicture(
        f"has {image.shape[1]} x {image.shape[2]} pixels, and {size[0]} x {size[1]} are cut out of it: put "
        "resize() before"
    )
