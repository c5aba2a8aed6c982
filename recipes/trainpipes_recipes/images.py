from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from trainpipes import ConfigError, DataError, Pipeline, RowStage, SchemaError
from trainpipes_recipes.folders import metadata_in, rooted
from trainpipes_recipes.inputs import LABELS, Input, OnBadRow, documented

__all__ = ["CLASSES", "MEAN", "STD", "Labelled", "images"]

#: Of ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Common names of columns, the first that is there is taken.
PICTURES = (
    "image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp", "bytes", "pixels", "image_path", "path",
    "file_name", "filename", "image_id",
)  # fmt: skip
CLASSES = (*LABELS, ("cls",), ("fine_label",), ("y",))


@documented
def images(
    files: Any,
    *,
    image: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    size: int = 224,
    train: bool = True,
    scale: tuple[float, float] = (0.08, 1.0),
    padding: int | None = None,
    flip: float = 0.5,
    transform: Callable[[Tensor], Any] | None = None,
    normalize: bool = True,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    resize: int | None = None,
    min_size: int | None = None,
    on_error: OnBadRow = "raise",
    batch_size: int = 32,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    folder: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches of pictures and their classes, for training or evaluating a classifier.

    Each is a dict:

        images           float32 ``[B, C, H, W]``, or uint8 with ``normalize=False``; B = ``batch_size``,
                         C = 3, H = W = ``size``
        labels           int64 ``[B]``, the number of the class

    Augmentations depend on seed, epoch and row alone. Small pictures come faster from a memory map
    (``write_memmap`` of the decoded rows).

    Args:
        files: a folder with a folder of pictures for each class, or with a metadata.csv or .jsonl that
            names its pictures; files of any format (tar archives, Parquet with bytes or images, a
            CSV with paths, a folder that ``write_memmap`` wrote, ...); or a pipeline of rows.
        image: column of the pictures, as bytes, paths, URLs, or arrays uint8 ``[C, H, W]``; by
            default the first of image, img, picture, photo, jpg, jpeg, png, webp, bytes, pixels,
            path and a few more.
        label: column of the classes, numbers or names; by default the first of label, labels,
            class, category, target and a few more. Folders are numbered in the order of their
            names.
        classes: the names of all classes, in the order of their numbers. To evaluate, pass those of
            the training, as folders are numbered by the names that are there.
        size: H and W, in pixels.
        train: False to evaluate: every row once, cut to the middle.
        scale: to train, the least and greatest share of a picture's area to cut out, 0 to 1.
        padding: to train small pictures, instead of ``scale``: put this many pixels around the
            picture, and cut ``size`` x ``size`` out at a random place.
        flip: to train, the probability of mirroring left to right.
        transform: to train, replaces all of these: see ``image_transform``. Its results must have
            one size.
        normalize: float32, ``(x / 255 - mean) / std``; False gives uint8.
        mean: of each channel, or a single value for all.
        std: of each channel, or a single value for all.
        resize: to evaluate, pixels of the shorter side before the middle is cut out; 8/7 of
            ``size`` by default.
        min_size: decode large JPEG files faster, at a smaller size: see ``decode_image``.
        on_error: for pictures that cannot be decoded: "raise"; or "skip" and log how many.
        seed: for the order of rows and the augmentations.
        folder: that paths are relative to; by default the folder of ``files``; of a list, or of a
            pattern of several folders, that of each row's file.

    Raises:
        UnreadableError: a picture cannot be decoded.
        DataError: a label is no class.

    >>> import numpy as np, trainpipes as tp
    >>> rows = [{"image": np.full((3, 8, 8), 9 * n, np.uint8), "label": n % 2} for n in range(6)]
    >>> batch = images(tp.from_dataset(rows), size=4, batch_size=6, num_shards=1).peek()
    >>> batch["images"].shape, batch["images"].dtype, batch["labels"]
    (torch.Size([6, 3, 4, 4]), torch.float32, tensor([1, 0, 0, 0, 1, 1]))
    """
    files = metadata_in(files, storage_options)
    data = Input("images", files, storage_options)
    (image,) = data.find({"image": image}, [(name,) for name in PICTURES])
    if label is None and classes is not None and "class" in data.columns:
        label = "class"  # folders' names; their numbers count these folders alone
    (label,) = data.find({"label": label}, [(name,) for (name,) in CLASSES if name != image])
    for name in (image, label):
        if name not in data.columns:
            raise SchemaError(f"images: there is no column {name!r}, only {data.columns}")
    # Python's rows stay as they are: pictures of different sizes make no column.
    rows = data.rows(None if isinstance(files, Pipeline) else [image, label])
    by_folders = any(getattr(stage, "labels", None) == "folder" for stage in rows.stages)
    if by_folders and label == "label" and classes is None and not train:
        data.warn_of_own_classes()

    first = next(iter(rows.distributed(rank=0, world_size=1)), {image: None})[image]
    first = data.first(image) if first is None else first
    content = first.get("bytes") if isinstance(first, Mapping) else first
    rows = data.arrange(rows, train, buffer_size, seed, num_shards)
    if content is None or isinstance(content, str):
        rows, folder = rooted(rows, image, files, folder, storage_options)
    if not isinstance(first, np.ndarray | Tensor):
        rows = rows.decode_image(
            image, output_column=image, on_error=on_error, min_size=min_size, folder=folder,
            storage_options=storage_options,
        )  # fmt: skip
    if not train:
        rows = rows.resize(resize or size * 8 // 7, column=image).center_crop(size, column=image)
    elif transform is not None:
        rows = rows.image_transform(transform, column=image, seed=seed)
    elif padding is not None:
        rows = rows.random_crop(size, padding=padding, column=image, seed=seed)
    else:
        rows = rows.random_resized_crop(size, scale=scale, column=image, seed=seed)
    if train and transform is None:
        rows = rows.flip(flip, column=image, seed=seed)

    rows = rows.then(Labelled(image, label, classes=classes))
    batches = rows.batch(batch_size, drop_last=train and drop_last).collate()
    return batches.normalize(mean, std, column="images") if normalize else batches


class Labelled(RowStage):
    thread_safe = True
    recipe: ClassVar[str] = "images"

    image: str
    label: str
    _: KW_ONLY
    classes: Sequence[str] | None = None

    def check(self) -> None:
        names = self.classes
        texts = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if names is not None and (not texts or len(set(names)) < len(names)):
            raise ConfigError(
                f"{self.recipe}(classes) must be the name of each class once, got {names!r}"
            )

    def apply(self, row: Any) -> Any:
        return {"images": row[self.image], "labels": self.number(row[self.label])}

    def number(self, label: Any) -> int:
        if isinstance(label, np.generic | np.ndarray | Tensor):
            label = label.item() if math.prod(label.shape) == 1 else label.tolist()
        names, written = self.classes or (), isinstance(label, bytes)
        text = label.decode(errors="replace").strip() if isinstance(label, bytes) else label
        if text in names:
            return names.index(text)
        if isinstance(text, str) and text.isdecimal() and (written or not names):
            text = int(text)
        if isinstance(text, float) and text.is_integer():
            text = int(text)
        if isinstance(text, int) and 0 <= text < (len(names) or 2**63):
            return int(text)
        known = "numbers from 0 on, or names that classes=[...] lists in the order of their numbers"
        if names:
            known = f"{len(names)}: {', '.join(names[:9])}{', …' if len(names) > 9 else ''}"
        said = f"{self.recipe}: column {self.label!r} holds {text!r}, which is no class"
        raise DataError(f"{said}: the classes are {known}")
