"""What stages on images share: each row by itself, on one column, with numbers that are drawn for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch

from trainpipes._internal.checks import require, several, whole_number
from trainpipes._internal.messages import need_columns
from trainpipes._internal.text import shown
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.calling.row_call import RowKey, row_words
from trainpipes.engine.layout import random_key
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.stage import Stage, made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.images.pixels import NoPicture, Pixels


class ImageStage(RunStage):
    """A stage on the image of each row. Rows are dicts from here on. Any thread may call it.

    A class below it has the option ``column``.
    """

    per_row = True
    makes_objects = True
    thread_safe = True

    @abstractmethod
    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        """What becomes of an image, ``[C, H, W]``.

        Args:
            image: the image; it is not to be changed.
            drawn: numbers from 0 up to 1, as many as the stage draws for a row.
        """

    def process(self, run: Run) -> Run:
        block = run.block
        rows = self._rows(run)
        column = self.options["column"]
        drawn = self._drawn(block)
        found: list[dict[str, Any]] = []
        try:
            for row, numbers in zip(rows, drawn, strict=True):
                image = image_of(row, column, self)
                found.append({**row, column: self.changed(image, numbers)})
        except Exception as error:
            refused = error
            if isinstance(error, NoPicture):
                refused = DataError(f"{self}: the image {error}", stage=str(self))
            blame(refused, self, int(block.ids[len(found)]))
            raise refused from None
        return run.with_block(block.with_data(found))

    def _rows(self, run: Run) -> Sequence[Any]:
        """The rows, batches or not."""
        if run.items is not None:
            raise ConfigError(
                f"{self} works on the image of each row, and after collate() there are only "
                "batches: put it before collate()"
            )
        return run.block.rows()

    def _drawn(self, block: Block) -> Sequence[Sequence[float]]:
        """The numbers of each row."""
        return [()] * len(block)


class RandomImageStage(ImageStage):
    """One whose outcome is drawn: a function of seed, epoch and row. It has the option ``seed``.

    Attributes:
        draws: numbers that it draws for a row.
    """

    by_row = True
    by_epoch = True
    draws: ClassVar[int] = 1

    _turn = 0  # which one it is of several with the same name

    def resolve(self, below: Sequence[Stage]) -> Self:
        return self.resolved(_turn=sum(other.name == self.name for other in below))

    @made_once
    def _key(self) -> RowKey:
        return RowKey(random_key(self.options["seed"], self.name, self._turn))

    def _drawn(self, block: Block) -> Sequence[Sequence[float]]:
        # Raw bits, of which NumPy promises that they stay the same.
        raw = [
            self._key.generator(words).bit_generator.random_raw(self.draws)
            for words in row_words(block).tolist()
        ]
        numbers = (np.array(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        drawn: list[list[float]] = numbers.reshape(len(block), self.draws).tolist()
        return drawn


def image_of(row: Any, column: str, asker: object) -> Pixels:
    """The image of a row, ``[C, H, W]``.

    Raises:
        DataError: it is null, or no image.
        SchemaError: the row has no such column.
    """
    if not isinstance(row, Mapping):
        raise SchemaError(
            f"{asker} works on rows that are dicts, got {type(row).__name__}: make dicts with map()",
            stage=str(asker),
        )
    if column not in row:
        need_columns(list(row), [column], asker)
    image = row[column]
    if isinstance(image, torch.Tensor):
        image = image.numpy(force=True)
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[0] in (1, 3, 4):
        if not image.size:
            raise DataError(f"{asker}: an image has pixels, got one of {list(image.shape)}")
        return image
    if isinstance(image, bytes | Mapping):
        cure = "its bytes: put decode_image() before"
    elif isinstance(image, np.ndarray):
        cure = f"an array {list(image.shape)}: bring it to that in a map()"
    else:
        cure = "null" if image is None else shown(image, 60)
    raise DataError(
        f"{asker}: column {column!r} holds images, arrays [C, H, W] with 1, 3 or 4 channels, and here {cure}",
        stage=str(asker),
    )


def of_bytes(image: Pixels, asker: Stage) -> Pixels:
    """An image, if it is of uint8.

    Raises:
        DataError: it is not.
    """
    if image.dtype != np.uint8:
        raise DataError(
            f"{asker} works on images of uint8, got one of {image.dtype}: put normalize() after it",
            stage=str(asker),
        )
    return image


def size_of(value: Any, option: str) -> tuple[int, int]:
    """Height and width of an option that is a number, for a square, or both.

    Raises:
        ConfigError: it is neither.
    """
    sides = list(value) if several(value) else [value, value]
    require(len(sides) == 2, option, "a number of pixels, or (height, width)", value)
    height, width = (whole_number(side, 1, option, "pixels of a side") for side in sides)
    return height, width


#: A side of a square, or height and width.
Size = Annotated[int | Sequence[int], size_of]
