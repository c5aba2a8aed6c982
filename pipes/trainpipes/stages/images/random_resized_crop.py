"""``random_resized_crop``: a random part of each image, brought to one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY

from trainpipes._internal.checks import ColumnName, Seed, need, several
from trainpipes.stages.images.image_stage import RandomImageStage, Size, of_bytes, size_of
from trainpipes.stages.images.pixels import Interpolation, Pixels, resized

#: How often a part is drawn that does not fit, before the middle is taken.
TRIES = 10


class RandomResizedCrop(RandomImageStage):
    """Cuts a part of random size and shape out of each image, and brings it to one size: the usual
    augmentation for training on photos (Szegedy et al., "Going deeper with convolutions", 2015, section 6).

    In: rows with an image, uint8 ``[C, H, W]``. Out: the same rows, dicts, with images of ``size``. Cursor:
    none of its own. Costs 0.2 to 1 ms an image. The part is a function of seed, epoch and row: another one
    in every epoch, and the same after a resume and on any topology. The rule is that of torchvision's
    ``RandomResizedCrop``, with other random numbers.

    Args:
        size: side of a square, or (height, width), in pixels.
        scale: the part's least and greatest area, as a share of the image's.
        ratio: its least and greatest ratio of width to height.
        column: the image.
        interpolation: as ``resize`` has it.
        seed: for the draws.

    Raises:
        DataError: a row holds no image; names the row.
        MissingExtraError: Pillow is not installed.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.zeros((3, 40, 60), np.uint8)}])
    >>> next(iter(rows.random_resized_crop(24)))["image"].shape
    (3, 24, 24)
    """

    draws = 4 * TRIES

    size: Size
    _: KW_ONLY
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    column: ColumnName = "image"
    interpolation: Interpolation = "bilinear"
    seed: Seed = 0

    def check(self) -> None:
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            given = self.options[name]
            pair = list(given) if several(given) else []
            good = [isinstance(x, int | float) and not isinstance(x, bool) for x in pair]
            rule = f"(least, greatest), above 0{' up to 1' if most == 1 else ''}"
            self._require(
                len(pair) == 2 and all(good) and 0 < pair[0] <= pair[1] <= most, name, rule
            )
        need("PIL", "random_resized_crop()")

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        height, width = image.shape[1:]
        box = self._box(height, width, drawn)
        size = size_of(self.size, "random_resized_crop(size)")
        return resized(of_bytes(image, self), size, self.interpolation, box)

    def _box(self, height: int, width: int, drawn: Sequence[float]) -> tuple[int, int, int, int]:
        """Left, top, right and bottom edge of the part."""
        (least, most), (narrow, wide) = self.scale, self.ratio
        for k in range(0, self.draws, 4):
            area = height * width * (least + (most - least) * drawn[k])
            ratio = narrow * (wide / narrow) ** drawn[k + 1]
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = (
                    int(drawn[k + 2] * (height - h + 1)),
                    int(drawn[k + 3] * (width - w + 1)),
                )
                return left, top, left + w, top + h
        # The largest part of the middle that is neither too narrow nor too wide.
        w = min(width, max(1, round(height * wide)))
        h = min(height, max(1, round(width / narrow)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h
