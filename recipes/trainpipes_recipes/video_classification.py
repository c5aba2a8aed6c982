from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainpipes import Pipeline, SchemaError, random_crop
from trainpipes_recipes.folders import in_folders, rooted, warn_of_parts
from trainpipes_recipes.images import CLASSES, MEAN, STD, Labelled
from trainpipes_recipes.inputs import Input, OnBadRow, documented

__all__ = ["video_classification"]

#: Common names of columns, the first one that is there is taken.
VIDEOS = ("video", "clip", "mp4", "webm", "mov", "mkv", "avi", "path", "file", "bytes")


@documented
def video_classification(
    files: Any,
    *,
    video: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    num_frames: int = 16,
    seconds: float | None = None,
    size: int = 224,
    resize: int | None = None,
    train: bool = True,
    flip: float = 0.5,
    mean: float | Sequence[float] = MEAN,
    std: float | Sequence[float] = STD,
    folder: str | os.PathLike[str] | None = None,
    on_error: OnBadRow = "raise",
    batch_size: int = 8,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches of clips and their classes, for training or evaluating a classifier of videos.

    Each is a dict, as VideoMAE, TimeSformer and ViViT take it:

        pixel_values     float32 ``[B, T, C, H, W]``, ``(x / 255 - mean) / std``; B = ``batch_size``,
                         T = ``num_frames``, C = 3, H = W = ``size``
        labels           int64 ``[B]``, the number of the class

    Clips, crops and flips depend on seed, epoch and row alone; all frames of a clip have the same.

    Args:
        files: a folder with a folder of videos for each class; files of any format with a column of
            bytes, paths or URLs; or a pipeline of rows.
        video: column of the videos; by default the first of video, clip, mp4, path, bytes and a few
            more.
        label: column of the classes, numbers or names; as in ``images``.
        classes: the names of all classes, in the order of their numbers; of folders that of their
            names, by default; to evaluate, pass those of the training.
        num_frames: T, the middles of equal parts of a clip.
        seconds: to train, of a clip at a random place; None for whole videos. Evaluation takes whole
            videos.
        size: H and W, in pixels.
        resize: pixels of the shorter side before ``size`` is cut out; 8/7 of it by default.
        train: False to evaluate: every row once, cut to the middle.
        flip: to train, the probability of mirroring left to right.
        mean: of each channel, or one for all.
        std: of each channel, or one for all.
        folder: that paths are relative to; by default the folder of ``files``; of a list, or of a
            pattern of several folders, that of each row's file.
        on_error: for videos that cannot be decoded: "raise"; or "skip" and log how many.
        seed: for the order of rows, the clips, crops and flips.

    Raises:
        MissingExtraError: av or Pillow is not installed.
        UnreadableError: a video cannot be decoded.
        DataError: a label is no class.

    >>> import io, av, numpy as np, trainpipes as tp
    >>> file = io.BytesIO()
    >>> with av.open(file, "w", format="mp4") as out:
    ...     stream = out.add_stream("mpeg4", rate=10)
    ...     stream.width = stream.height = 32
    ...     for n in range(20):
    ...         out.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), n, np.uint8))))
    ...     out.mux(stream.encode(None))
    >>> rows = tp.from_dataset([{"video": file.getvalue(), "label": n % 2} for n in range(4)])
    >>> batch = video_classification(rows, num_frames=4, size=16, batch_size=4, num_shards=1).peek()
    >>> batch["pixel_values"].shape, batch["labels"].sort().values
    (torch.Size([4, 4, 3, 16, 16]), tensor([0, 0, 1, 1]))
    """
    own_classes = False
    listed = None if video or label else in_folders("video_classification", files, storage_options)
    if listed is not None:
        files, folder, names = listed
        own_classes = classes is None and not train
        classes = names if classes is None else classes
    data = Input("video_classification", files, storage_options)
    if own_classes:
        data.warn_of_own_classes()
    (video,) = data.find({"video": video}, [(name,) for name in VIDEOS])
    (label,) = data.find({"label": label}, [(name,) for (name,) in CLASSES if name != video])
    for name in (video, label):
        if name not in data.columns:
            said = f"video_classification: there is no column {name!r}, only {data.columns}"
            raise SchemaError(said)
    warn_of_parts(data, video, label)
    rows = data.rows(None if isinstance(files, Pipeline) else [video, label])

    rows = data.arrange(rows, train, buffer_size, seed, num_shards)
    if not isinstance(files, Pipeline) and not isinstance(data.first(video), bytes):
        rows, folder = rooted(rows, video, files, folder, storage_options)
    rows = rows.decode_video(
        video,
        num_frames=num_frames,
        duration=random_crop(seconds) if train and seconds is not None else None,
        size=resize or size * 8 // 7,
        folder=folder,
        on_error=on_error,
        seed=seed,
        storage_options=storage_options,
    )
    if train:
        rows = rows.random_crop(size, column=video, seed=seed)
        rows = rows.flip(flip, column=video, seed=seed)
    else:
        rows = rows.center_crop(size, column=video)
    rows = rows.then(LabelledClips(video, label, classes=classes))
    batches = rows.batch(batch_size, drop_last=train and drop_last).collate()
    return batches.normalize(mean, std, column="pixel_values")


class LabelledClips(Labelled):
    recipe = "video_classification"

    def apply(self, row: Any) -> Any:
        return {"pixel_values": row[self.image], "labels": self.number(row[self.label])}
