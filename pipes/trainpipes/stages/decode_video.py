from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, Seed, require
from trainpipes.filesystems.retry import Retry
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.media.video import Choice, Frames, frames_of
from trainpipes.stages.columns import taken
from trainpipes.stages.decode_audio import ClipDecoder, Duration, Start
from trainpipes.stages.image_stages import Size, shorter_side, size_of


def rate(value: Any, option: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    require(good, option, "a number of frames above 0 in a second", value)


class DecodeVideo(ClipDecoder):
    """Decode videos, or clips of them: MP4, MOV, MKV, WebM, AVI, MPEG-TS and other files of FFmpeg.

    The column holds the files' bytes, their paths or URLs, or structs with ``bytes`` or ``path``; rows become
    dicts with an array, uint8 ``[frames, height, width, 3]``, which stages on images take. A list of videos
    becomes a list of arrays. Frames are found by seeking to the key frame before; of a file on a server only
    only the parts needed are read, where the format tells where they are. They are those that FFmpeg's own
    command shows at these times, turned upright. Put it after ``shuffle``, whose buffer then holds no pixels.

    Of ``num_frames``, ``fps`` and ``frames`` give one at most; without, all frames of the clip are decoded.

    Args:
        column: the column of bytes, paths or URLs.
        num_frames: so many frames, from the middles of equal parts of the clip. A clip with fewer
            has some of them several times.
        fps: so many frames of each second, as FFmpeg's filter of this name takes them; at least one.
        frames: the numbers of frames, from 0. For these the whole file is read, not decoded.
        size: pixels of the shorter side, or (height, width); None for those of the file.
        start: the clip's first second, or a column of these.
        duration: seconds of the clip, a column of these, or ``trainpipes.random_crop(seconds)``. A
            clip ends where its file does.
        output_column: the column of arrays; ``column`` by default.
        times_column: a new column of the times of frames in seconds, float64 ``[frames]``.
        on_error: for a file that cannot be decoded, or a null: "raise"; or "skip" the row and log
            how many.
        seed: of the places of random crops, which depend on seed, epoch and row alone.
        folder: that paths are relative to.
        storage_options: options of the fsspec file system of URLs; never shown or saved.
        retry: as in ``list_files``.

    Raises:
        MissingExtraError: av is not installed.
        SchemaError: the column is not there, or a new column already is.
        UnreadableError: a file cannot be decoded.

    >>> import io, av, numpy as np, trainpipes as tp
    >>> file = io.BytesIO()
    >>> with av.open(file, "w", format="mp4") as out:
    ...     stream = out.add_stream("mpeg4", rate=10)
    ...     stream.width, stream.height = 64, 48
    ...     for n in range(20):
    ...         gray = np.full((48, 64, 3), 10 * n, np.uint8)
    ...         out.mux(stream.encode(av.VideoFrame.from_ndarray(gray)))
    ...     out.mux(stream.encode(None))
    >>> rows = tp.from_dataset([{"video": file.getvalue(), "label": 3}])
    >>> row = next(iter(rows.decode_video(num_frames=4, size=24, times_column="times")))
    >>> row["video"].shape, row["label"], row["times"].tolist()
    ((4, 24, 32, 3), 3, [0.2, 0.7, 1.2, 1.7])
    """

    said, unit = "video", "video"
    package: ClassVar[str] = "av"

    column: ColumnName = "video"
    _: KW_ONLY
    num_frames: Count | None = None
    fps: Annotated[float, rate] | None = None
    frames: Annotated[Sequence[int], Each(Ge(0))] | None = None
    size: Size | None = None
    start: Start | None = None
    duration: Duration | None = None
    output_column: ColumnName | None = None
    times_column: ColumnName | None = None
    on_error: OnBadRow = "raise"
    seed: Seed = 0
    folder: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: Retry | Mapping[str, Any] = Retry()

    def check(self) -> None:
        super().check()
        names = [n for n in ("num_frames", "fps", "frames") if self.options[n] is not None]
        if len(names) > 1:
            way = "one of num_frames, fps and frames says which are wanted"
            self._require(False, names[1], f"left out beside {names[0]}", way)
        if self.frames is not None:
            self._require(len(self.frames), "frames", "a list of numbers of frames, at least one")
            for name in ("start", "duration"):
                way = "use num_frames or fps, which choose frames of a clip"
                self._require(self.options[name] is None, name, "left out with frames", way)
        if self.times_column in (self.column, self.output_column):
            self._require(self.times_column is None, "times_column", "a column of its own")

    def decoded(self, value: Any, row: Any, rng: Any) -> Frames:
        choice = Choice(self.num_frames, self.fps, self.frames)
        clip = self.clip_of(row, rng)
        with self.opened(value, whole=False) as file:
            return frames_of(file, choice, clip, None if self.size is None else self._size)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, int):
            return shorter_side(self.size, height, width)
        return size_of(self.size, "decode_video(size)")

    def _decoded_row(self, row: Any, rng: Any) -> dict[str, Any]:
        decoded = super()._decoded_row(row, rng)
        clips = decoded[self._output]
        alone = isinstance(clips, Frames)
        pixels, times = ([c[n] for c in ([clips] if alone else clips)] for n in (0, 1))
        decoded[self._output] = pixels[0] if alone else pixels
        if self.times_column is not None:
            if self.times_column in decoded:
                raise taken(self.times_column, self)
            decoded[self.times_column] = times[0] if alone else times
        return decoded
