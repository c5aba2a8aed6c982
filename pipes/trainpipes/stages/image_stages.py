"""Stages on images. More than 500 lines: they share draws, columns, sizes and the checks of these."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch

from trainpipes._internal import checks
from trainpipes._internal.messages import need_columns
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.columns.types import as_array
from trainpipes.engine.calling import RowKey, row_words
from trainpipes.engine.planning.row_names import unit
from trainpipes.errors import ConfigError, DataError, shown
from trainpipes.interfaces.options import either, identify
from trainpipes.interfaces.read_columns import blame, cell, each, refused
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.order.permutation import random_key
from trainpipes.stages.decoding import Box, Interpolation, NoPicture, Pixels, resized
from trainpipes.stages.map import RowFunction

#: How many an image may have.
CHANNELS = (1, 3, 4)


class ImageStage(RunStage, per_row=True, gives="objects"):
    """A stage on columns of images, row by row: an image, a list, or the frames of a video in an array. A
    row has one draw, for all of them.
    """

    thread_safe = True

    def check(self) -> None:
        self._by_column  # noqa: B018

    @abstractmethod
    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        """What becomes of an image, ``[C, H, W]``."""

    @property
    def _sides(self) -> tuple[int, int]:
        return size_of(self.options["size"], f"{self.name}(size)")

    def process(self, run: Run) -> Run:
        block = run.block
        self._check_rows(run)
        stages = self._by_column.items()
        rows = block.rows()
        drawn = self._drawn(block)
        changed_rows: list[dict[str, Any]] = []
        try:
            for row, numbers in zip(rows, drawn, strict=True):
                self._check_images(row)
                changed = {name: stage._changed(row, name, numbers) for name, stage in stages}
                changed_rows.append({**row, **changed})
        except Exception as error:
            if isinstance(error, NoPicture):
                error = refused(self, f": the image {error}", DataError)
            blame(error, self, int(block.ids[len(changed_rows)]))
            raise error from None
        return run.with_block(block.with_data(changed_rows))

    def _changed(self, row: Any, column: str, drawn: Sequence[float]) -> Any:
        value = cell(row, column, self)
        changed = [self.changed(image, drawn) for image in images_in(value, column, self)]
        if isinstance(value, list | tuple):
            return changed
        return np.stack(changed) if getattr(value, "ndim", 0) == 4 else changed[0]

    def _check_images(self, row: Any) -> None:
        """Raise DataError where the images of a row don't go together."""

    @made_once
    def _by_column(self) -> dict[str, Self]:
        """The stage for each column, with its value of options that are dicts."""
        columns = checks.column_names(self.options["column"], f"{self.name}(column)")
        several = {k: v for k, v in self.options.items() if isinstance(v, Mapping)}
        for option, values in several.items():
            good = values.keys() == {*columns}
            self._require(good, option, f"a value, or a dict of one for each of {columns}")
        if self.options["column"] == columns[0] and not several:
            return {columns[0]: self}
        values_of = {c: {k: v[c] for k, v in several.items()} for c in columns}
        return {c: self._replaced(column=c, **values) for c, values in values_of.items()}

    def _drawn(self, block: Block) -> Sequence[Sequence[float]]:
        """Random numbers for each row."""
        return [()] * len(block)


class RandomImageStage(ImageStage, depends_on={"row", "epoch"}):
    """One that draws ``draws`` numbers from 0 to 1 for each row and epoch."""

    draws: ClassVar[int] = 1

    _turn = 0  # its number among stages with the same name

    def _resolve(self, below: Sequence[Stage]) -> Self:
        return self._resolved(_turn=sum(other.name == self.name for other in below))

    @made_once
    def _key(self) -> RowKey:
        return RowKey(random_key(self.options["seed"], self.name, self._turn))

    def _drawn(self, block: Block) -> Sequence[Sequence[float]]:
        # Raw bits, of which NumPy promises that they stay the same.
        words = row_words(block).tolist()
        raw = [self._key.generator(w).bit_generator.random_raw(self.draws) for w in words]
        drawn = unit(np.concatenate([*raw, np.empty(0, dtype=np.uint64)]).astype(np.uint64))
        numbers: list[list[float]] = drawn.reshape(-1, self.draws).tolist()
        return numbers


def images_in(value: Any, column: str, caller: object) -> Sequence[Pixels]:
    """The image, or the images of a list or a video."""
    if isinstance(value, list | tuple):
        return [image_of(image, column, caller) for image in value]
    if getattr(value, "ndim", 0) == 4:
        return frames_of(value, column, caller)
    return [image_of(value, column, caller)]


def frames_of(video: Any, column: str, caller: object) -> Sequence[Pixels]:
    """The frames ``[C, H, W]`` of an array ``[T, C, H, W]`` or ``[T, H, W, C]``, one or more."""
    frames: Any = as_array(video)
    if is_channels_last(frames.shape):
        frames = np.ascontiguousarray(frames.transpose(0, 3, 1, 2))
    if not len(frames):
        raise DataError(f"{caller}: the image has no frames", stage=str(caller))
    return [image_of(frame, column, caller) for frame in frames]


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether frames are ``[T, H, W, C]``, and not ``[T, C, H, W]``."""
    return shape[1] not in CHANNELS and shape[3] in CHANNELS


def image_of(image: Any, column: str, caller: object) -> Pixels:
    image = as_array(image)
    is_array = isinstance(image, np.ndarray)
    if is_array and image.ndim == 3 and image.shape[0] in CHANNELS and image.size:
        return image  # type: ignore[no-any-return]
    got = f"an array {list(image.shape)}" if is_array else shown(image, 60)
    encoded = isinstance(image, bytes | Mapping)
    way = "put decode_image() before" if encoded else "make these in a map()"
    rule = (
        f"column {column!r} holds images, arrays [C, H, W] (of a video [T, C, H, W] or [T, H, W, C]) with "
        "pixels and 1, 3 or 4 channels"
    )
    raise DataError(f"{caller}: {rule}, got {got}: {way}", stage=str(caller))


def cropped(image: Pixels, size: tuple[int, int], drawn: Sequence[float] = ()) -> Pixels:
    """A copy of a part of an image, at the place drawn or in the middle."""
    height, width = size
    room = image.shape[1] - height, image.shape[2] - width
    if min(room) < 0:
        sizes = f"{image.shape[1]} x {image.shape[2]} pixels, and {height} x {width}"
        raise NoPicture(f"has {sizes} are cut out of it: put resize() before")
    top, left = round(room[0] / 2), round(room[1] / 2)  # as torchvision, half to even
    if drawn:
        top, left = (int(part * (free + 1)) for part, free in zip(drawn, room, strict=True))
    return np.array(image[:, top : top + height, left : left + width], order="C")


def numbers_in(value: Any) -> list[float]:
    values = list(value) if checks.several(value) else [value]
    good = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    return values if good and np.isfinite(values).all() else []


def size_of(value: Any, option: str) -> tuple[int, int]:
    sides = list(value) if checks.several(value) else [value, value]
    checks.require(len(sides) == 2, option, "a number of pixels, or (height, width)", value)
    height, width = (checks.whole_number(side, 1, option, "pixels of a side") for side in sides)
    return height, width


def shorter_side(pixels: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side is to have so many pixels."""
    short = min(height, width)
    return pixels * height // short, pixels * width // short


def _by_name(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A check of a value, but not of a dict: those in it are looked at by column."""
    return lambda value, option: isinstance(value, Mapping) or check(value, option)


def _interpolation(value: Any, option: str) -> None:
    names = get_args(Interpolation)
    checks.require(value in names, option, either(names), value)


#: A side of a square, or height and width.
Size = Annotated[int | Sequence[int], size_of]
#: A value for all columns, or a dict of one for each.
Interpolations = Annotated[Interpolation | Mapping[str, Interpolation], _by_name(_interpolation)]
Fill = Annotated[int | Mapping[str, int], _by_name(checks.Ge(0, 255))]


class Resize(ImageStage):
    """Resize images, uint8 ``[C, H, W]``.

    Args:
        size: pixels of the shorter side, which keeps the aspect ratio; or (height, width).
        column: the image, or several columns in a list, as of an image and its mask.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos", antialiased except "nearest", which
            masks need: the others mix the numbers of their classes. Or a dict of one for each column.

    Raises:
        DataError: a row holds no image.
        MissingExtraError: Pillow is not installed.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.zeros((3, 40, 60), np.uint8)}])
    >>> next(iter(rows.resize(20)))["image"].shape, next(iter(rows.resize((8, 9))))["image"].shape
    ((3, 20, 30), (3, 8, 9))
    """

    size: Size
    _: KW_ONLY
    column: checks.ColumnNames = "image"
    interpolation: Interpolations = "bilinear"

    def check(self) -> None:
        super().check()
        checks.need("PIL", "resize()")

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        return resized(image, self._size(*image.shape[1:]), self.options["interpolation"])

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, int):
            return shorter_side(self.size, height, width)
        return self._sides


class RandomCutStage(RandomImageStage):
    """One that cuts the same part out of the images of all columns."""

    #: What is the same of these images.
    alike = "size"

    def _check_images(self, row: Any) -> None:
        if len(self._by_column) == 1:
            return
        sizes = {
            name: sorted(
                {image.shape[1:] for image in images_in(cell(row, name, self), name, self)}
            )
            for name in self._by_column
        }
        first, *others = sizes.values()
        if not all(self._are_alike(first, other) for other in others):
            texts = {
                name: " and ".join(f"{h} x {w}" for h, w in each) for name, each in sizes.items()
            }
            got = ", ".join(f"{name} {size}" for name, size in texts.items())
            rule = "images of several columns are cut at the same place and need the same"
            way = f"put resize() before, or give each column a {self.name}() of its own"
            raise refused(self, f": {rule} {self.alike}, got {got}: {way}", DataError)

    def _are_alike(
        self, sizes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
    ) -> bool:
        return sizes == others


class RandomCrop(RandomCutStage):
    """Crop each image ``[C, H, W]`` at a random place.

    The place depends on seed, epoch, row and the ``random_crop`` stages before it: all images of a list
    have the same.

    Args:
        size: side of a square, or (height, width), in pixels.
        padding: pixels put around the image first.
        fill: the value of these pixels, or a dict of one for each column.
        column: the image, or several in a list, which have the same draw.
        seed: for the places.

    Raises:
        DataError: a row holds no image, a smaller image, or columns with images of different sizes.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.arange(64, dtype=np.uint8).reshape(1, 8, 8)}])
    >>> pipe = rows.random_crop(2)
    >>> [next(iter(pipe))["image"].tolist() for epoch in range(2)]
    [[[[3, 4], [11, 12]]], [[[12, 13], [20, 21]]]]
    """

    draws = 2

    size: Size
    _: KW_ONLY
    padding: checks.Natural = 0
    fill: Fill = 0
    column: checks.ColumnNames = "image"
    seed: checks.Seed = 0

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        if self.padding:
            around = (self.padding, self.padding)
            image = np.pad(image, ((0, 0), around, around), constant_values=self.options["fill"])
        return cropped(image, self._sides, drawn)


class CenterCrop(ImageStage):
    """Crop the middle out of each image ``[C, H, W]``.

    Args:
        size: side of a square, or (height, width), in pixels.
        column: the image, or several in a list.

    Raises:
        DataError: a row holds no image, or a smaller image.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.arange(36, dtype=np.uint8).reshape(1, 6, 6)}])
    >>> next(iter(rows.center_crop((2, 4))))["image"].tolist()
    [[[13, 14, 15, 16], [19, 20, 21, 22]]]
    """

    size: Size
    _: KW_ONLY
    column: checks.ColumnNames = "image"

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        return cropped(image, self._sides)


#: How often a part is drawn that does not fit, before the middle is taken.
TRIES = 10


class RandomResizedCrop(RandomCutStage):
    """Crop a part of random size and shape out of each image, uint8 ``[C, H, W]``, and resize it.

    Follows torchvision's ``RandomResizedCrop`` (Szegedy et al., "Going deeper with convolutions",
    2015, section 6). Draws depend on seed, epoch, row and the ``random_resized_crop`` stages before it:
    all images of a list have the same, and the same interpolation: see ``resize``.

    Args:
        size: side of a square, or (height, width), in pixels.
        scale: the part's least and greatest area, as a share of the image's.
        ratio: its least and greatest ratio of width to height.
        column: the image, or several in a list, which have the same draw.
        interpolation: as in ``resize``.
        seed: for the draws.

    Raises:
        DataError: a row holds no image, or columns with images of different proportions.
        MissingExtraError: Pillow is not installed.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.zeros((3, 40, 60), np.uint8)}])
    >>> next(iter(rows.random_resized_crop(24)))["image"].shape
    (3, 24, 24)
    """

    draws = 4 * TRIES
    alike = "proportions"

    size: Size
    _: KW_ONLY
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    column: checks.ColumnNames = "image"
    interpolation: Interpolations = "bilinear"
    seed: checks.Seed = 0

    def check(self) -> None:
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            pair = numbers_in(self.options[name])
            rule = f"(least, greatest), above 0{' up to 1' if most == 1 else ''}"
            self._require(len(pair) == 2 and 0 < pair[0] <= pair[1] <= most, name, rule)
        super().check()
        checks.need("PIL", "random_resized_crop()")

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        height, width = image.shape[1:]
        box = self._box(height, width, drawn)
        return resized(image, self._sides, self.options["interpolation"], box)

    def _are_alike(
        self, sizes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
    ) -> bool:
        """Whether these are those by a factor, up to a pixel: the same share is cut out."""
        pairs = product(sizes, others)
        return sizes == others or all(
            abs(h * v - g * w) <= max(h, w, g, v) for (h, w), (g, v) in pairs
        )

    def _box(self, height: int, width: int, drawn: Sequence[float]) -> Box:
        (least, most), (narrow, wide) = self.scale, self.ratio
        for k in range(0, self.draws, 4):
            area = height * width * (least + (most - least) * drawn[k])
            ratio = narrow * (wide / narrow) ** drawn[k + 1]
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(drawn[k + 2] * (height - h + 1))
                left = int(drawn[k + 3] * (width - w + 1))
                return left, top, left + w, top + h
        # The largest part of the middle that is neither too narrow nor too wide.
        w = min(width, max(1, round(height * wide)))
        h = min(height, max(1, round(width / narrow)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


class Flip(RandomImageStage):
    """Mirror some images ``[C, H, W]``. The choice depends on seed, epoch, row and the ``flip`` stages
    before it: all images of a list are mirrored, or none.

    Args:
        p: the probability of mirroring an image, 0 to 1.
        direction: "horizontal", left to right; or "vertical".
        column: the image, or several in a list, which have the same draw.
        seed: for the choice.

    Raises:
        DataError: a row holds no image.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.array([[[1, 2, 3]]], np.uint8)}] * 4)
    >>> [row["image"].tolist() for row in rows.flip(seed=2)]
    [[[[1, 2, 3]]], [[[3, 2, 1]]], [[[3, 2, 1]]], [[[1, 2, 3]]]]
    """

    p: checks.Share = 0.5
    _: KW_ONLY
    direction: Literal["horizontal", "vertical"] = "horizontal"
    column: checks.ColumnNames = "image"
    seed: checks.Seed = 0

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        if drawn[0] >= self.p:
            return image
        axis = 2 if self.direction == "horizontal" else 1
        return np.ascontiguousarray(np.flip(image, axis))


#: Of the photos of ImageNet, which most published models were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalize(ImageStage):
    """Turn pixels into float32: ``(x / 255 - mean) / std``, by channel.

    Takes rows with an image ``[C, H, W]``, or after ``collate`` batches ``[B, C, H, W]``,
    ``[B, T, C, H, W]`` or ``[B, T, H, W, C]`` (of which the second comes out), which is faster. Floats
    are not divided; integers of 8 and 16 bits are divided by the largest of their type.

    Args:
        mean: of each channel, for values from 0 to 1, or one for all; by default those of ImageNet.
        std: of each channel, or a single value for all.
        column: the image.

    Raises:
        ConfigError: a mean or deviation above 1, and images of integers.
        DataError: an image has another number of channels.
        SchemaError: batches have no such column of tensors, or pixels are integers of 32 or 64 bits.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.array([[[0, 51, 255]]], np.uint8)}])
    >>> next(iter(rows.normalize(0.5, 0.5)))["image"].tolist()
    [[[-1.0, -0.6000000238418579, 1.0]]]
    """

    mean: float | Sequence[float] = MEAN
    std: float | Sequence[float] = STD
    _: KW_ONLY
    column: checks.ColumnName = "image"

    def check(self) -> None:
        for name in ("mean", "std"):
            value = self.options[name]
            values = numbers_in(value)
            checks.require(values, f"normalize({name})", "a number, or one of each channel", value)
            checks.require(name != "std" or min(values) > 0, "normalize(std)", "above 0", value)

    @made_once
    def _numbers(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        by_channel = [
            value if checks.several(value) else [value] for value in (self.mean, self.std)
        ]
        mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in by_channel)
        return mean, std

    @made_once
    def _above_1(self) -> str | None:
        names = zip(("mean", "std"), self._numbers, strict=True)
        return next((name for name, values in names if values.max() > 1), None)

    def process(self, run: Run) -> Run:
        if run.items is None:
            return super().process(run)
        return run.with_items(each(self, self._of_batch, run))

    def changed(self, image: Pixels, drawn: Sequence[float]) -> Pixels:
        mean, std = self._numbers
        channels = image.shape[-3]
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                got = f"{channels} channels, and {name} {len(values)} values: give one for each"
                raise refused(self, f": an image has {got}", DataError)
        pixels: Pixels = image.astype(np.float32)
        if image.dtype.kind in "iu":
            if image.dtype.itemsize > 2:
                ways = "with map(), or of a batch with pad_collate(dtype=torch.uint8)"
                way = f"make them uint8, or floats from 0 to 1, {ways}"
                rule = "pixels are integers of 8 or 16 bits, or floats"
                said = f": column {self.column!r} holds {image.dtype}, and {rule}: {way}"
                raise refused(self, said)
            if self._above_1:
                most, got = np.iinfo(image.dtype).max, self.options[self._above_1]
                rule = f"up to 1, as {image.dtype} is divided by {most} first, got {got}"
                way = f"divide it by {most}"
                raise ConfigError(f"{self}: {self._above_1} must be {rule}: {way}", stage=str(self))
            pixels /= np.float32(np.iinfo(image.dtype).max)
        pixels -= mean
        pixels /= std
        return pixels

    def _of_batch(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            got = f"{type(batch).__name__}: put collate() before it, or use map()"
            raise refused(self, f" works on batches that are dicts of tensors, got {got}")
        need_columns(list(batch), [self.column], self)
        images = batch[self.column]
        if not isinstance(images, torch.Tensor) or images.dim() not in (4, 5):
            got = shown(list(images.shape) if isinstance(images, torch.Tensor) else images, 60)
            rule = "holds images, a tensor [B, C, H, W], or of videos [B, T, C, H, W]"
            raise refused(self, f": column {self.column!r} {rule}, got {got}")
        if images.dim() == 5 and is_channels_last(images.shape[1:]):
            images = images.movedim(-1, 2).contiguous()
        return {**batch, self.column: torch.from_numpy(self.changed(as_array(images), ()))}


class ImageTransform(
    RowFunction, depends_on={"row", "epoch"}, in_caller=True, versioned="transform"
):
    """Apply a transform, such as one of ``torchvision.transforms.v2``, to each image ``[C, H, W]``, or to
    the frames of a video ``[T, C, H, W]`` at once.

    torch's global generator is seeded for the row before each call, and put back after it: draws
    depend on seed, epoch, row and the stages with this transform before it. In a process only the thread
    that iterates calls it. For draws from Python's ``random`` or NumPy's global generator use
    ``map(fn, rng=True)``.

    Args:
        transform: takes a tensor ``[C, H, W]`` or ``[T, C, H, W]``, uint8 after ``decode_image``, and
            returns the new value.
        column: the image.
        seed: for the draws.
        version: names the transform in checkpoints. Left out, a module is known by how it prints, a
            function by module and name.
        num_workers: processes that call it; 0 for none.

    Raises:
        DataError: a row holds no image, or the transform returned None.
        ConfigError: with workers, the transform does not pickle.

    >>> import numpy as np, torch, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.zeros((1, 1, 1), np.uint8)}] * 3)
    >>> noisy = rows.image_transform(lambda image: image + torch.randint(100, ()), version="1")
    >>> [int(row["image"]) for row in noisy], [int(row["image"]) for row in noisy]
    ([80, 51, 58], [6, 33, 18])
    """

    free = frozenset({"num_workers"})

    transform: checks.Function
    _: KW_ONLY
    column: checks.ColumnName = "image"
    seed: checks.Seed = 0
    version: str | None = None
    num_workers: checks.Natural = 0

    @property
    def function(self) -> tuple[Callable[..., Any], Any]:
        return self._fresh()._seeded, self._drawn_by[0]

    def _resolve(self, below: Sequence[Stage]) -> Self:
        alike = (s for s in below if type(s) is type(self) and s._drawn_by == self._drawn_by)
        return self._resolved(_turn=sum(1 for _ in alike))

    @property
    def _drawn_by(self) -> tuple[str, int]:
        """What draws depend on beside the row; stages of the same in other columns draw other numbers."""
        known = identify(self.transform if self.version is None else self.version)
        return str(known), self.seed

    def _seeded(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        pixels_given = cell(row, self.column, self)
        is_video = getattr(pixels_given, "ndim", 0) == 4
        pixels = (frames_of if is_video else image_of)(pixels_given, self.column, self)
        image = torch.from_numpy(np.array(pixels))
        generator = torch.default_generator
        before = generator.get_state()
        # Not torch.manual_seed, which seeds the devices' generators, too.
        generator.manual_seed(int(rng.bit_generator.random_raw()) >> 1)
        try:
            transformed = self.transform(image)
        finally:
            generator.set_state(before)
        if transformed is None:
            way = "return the image, also where it is changed in place"
            raise DataError(f"{self}: the transform returned None; {way}")
        if isinstance(transformed, torch.Tensor):
            transformed = transformed.as_subclass(torch.Tensor)
        return {**row, self.column: transformed}
