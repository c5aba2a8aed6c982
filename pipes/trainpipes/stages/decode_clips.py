"""``decode_audio`` and ``decode_video``: files of sound and video, or clips of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY
from typing import Annotated, Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, Seed, is_name, need, require
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.errors import shown
from trainpipes.filesystems.retry import Retry
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.read_columns import cell, refused
from trainpipes.media import Undecodable, bytes_of, sound
from trainpipes.media.video import Choice, Frames, frames_of
from trainpipes.stages.columns import columns_of, row_table, taken
from trainpipes.stages.decoding import Decoder
from trainpipes.stages.image_stages import Size, shorter_side, size_of

#: What ``random_crop`` gives.
CROP = "random_crop"


def random_crop(seconds: float) -> dict[str, float]:
    """A ``duration`` of so many seconds, at a place drawn by seed, epoch and row.

    >>> import trainpipes as tp
    >>> tp.random_crop(2.5)
    {'random_crop': 2.5}
    """
    seconds_above_0(seconds, "random_crop(seconds)")
    return {CROP: float(seconds)}


def is_seconds(value: Any) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and 0 <= value < math.inf


def seconds_above_0(value: Any, option: str) -> None:
    require(is_seconds(value) and value > 0, option, "a number of seconds above 0", value)


def seconds_or_column(value: Any, option: str) -> None:
    good = is_seconds(value) or is_name(value)
    rule = "a number of seconds of 0 or more, or the name of a column of them"
    require(good, option, rule, value)


def length(value: Any, option: str) -> None:
    if isinstance(value, Mapping) and value.keys() == {CROP}:
        return seconds_above_0(value[CROP], option)
    good = is_name(value) or (is_seconds(value) and value > 0)
    rule = "a number of seconds above 0, the name of a column of them, or tp.random_crop(seconds)"
    return require(good, option, rule, value)


#: Options that say which part of a file is decoded.
Start = Annotated[float | str, seconds_or_column]
Duration = Annotated[float | str | Mapping[str, float], length]


class ClipDecoder(Decoder):
    """A stage on files of sound or video, or parts of them: ``start``, ``duration`` and ``seed`` are its
    options.
    """

    package: ClassVar[str] = "soundfile"

    @property
    def _crop(self) -> float | None:
        duration = self.options.get("duration")
        return duration[CROP] if isinstance(duration, Mapping) else None

    @property
    def rng(self) -> bool:  # type: ignore[override]
        return self._crop is not None

    def _traits(self) -> dict[str, Any]:
        depends: dict[str, Any] = {"depends_on": {"row", "epoch"}} if self.rng else {}
        return {**super()._traits(), **depends}

    def identity(self) -> dict[str, Any]:
        identity = {**super().identity(), "decoder": self.package}
        if not self.rng:  # a seed that nothing is drawn with
            identity.pop("seed", None)
        return identity

    def clip_of(self, row: Any, rng: Any) -> sound.Clip:
        start, duration = self.options["start"], self.options["duration"]
        if self._crop is not None:
            return sound.Clip(self._seconds(row, start) or 0.0, self._crop, float(rng.random()))
        length = self._seconds(row, duration)
        if length == 0:
            raise Undecodable(f"its {duration!r} must be a number of seconds above 0, got 0")
        return sound.Clip(self._seconds(row, start) or 0.0, length)

    def _seconds(self, row: Any, limit: Any) -> float | None:
        if not isinstance(limit, str):
            return None if limit is None else float(limit)
        value = cell(row, limit, self)
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or is_seconds(value):
            return None if value is None else float(value)
        raise Undecodable(
            f"its {limit!r} must be a number of seconds from 0 on, got {shown(value, 40)}"
        )

    @contextmanager
    def opened(self, value: Any, whole: bool) -> Iterator[BinaryIO]:
        decoded = isinstance(value, Mapping) and value.get("array") is not None
        if decoded and not isinstance(bytes_of(value), bytes):
            column = self.options["column"]
            way = f"cast_column({column!r}, Audio(decode=False)) of datasets keeps the files"
            raise refused(self, f": column {column!r} holds sound that is decoded: {way}")
        with super().opened(value, whole) as file:
            yield file

    def check(self) -> None:
        super().check()
        need(self.package, f"{self.name}()")


class DecodeAudio(ClipDecoder):
    """Decode sound: WAV, FLAC, MP3, Ogg, AIFF and other formats of libsndfile; with the package av also
    AAC, M4A, WebM and the sound of videos.

    The column holds the files' bytes, their paths or URLs, or structs with ``bytes`` or ``path``; rows become
    dicts with an array, float32 ``[samples]`` from -1 to 1. Put it after ``shuffle``, whose buffer then holds
    no samples, and after ``bucket_by_length`` if ``audio_info`` gives the lengths. Where a format can be
    sought in, only the part that is asked for is decoded, and read of a file on a server.

    Args:
        column: the column of bytes, paths or URLs.
        sampling_rate: samples a second, to which the sound is resampled (soxr's HQ); None leaves it.
        mono: mix all channels down to their mean, ``[samples]``; else ``[channels, samples]``.
        normalize: give each channel a mean of 0 and a variance of 1, as Wav2Vec2's feature extractor does.
        start: seconds from the first sample, which in a file with video may play later than the first
            frame; or the name of a column of these; null is 0.
        duration: seconds of sound, at most; the name of a column of these, whose null is all;
            ``tp.random_crop(seconds)`` for a part at a random place, shorter sounds as a whole.
        output_column: the column of samples; by default in place of ``column``.
        on_error: for a file that cannot be decoded, is not there, or holds no samples, or a null: "raise";
            or "skip" the row and log how many; or list it, too, with ``Quarantine``. After ``batch`` its
            batch has a row less.
        seed: for random places.
        folder: that paths are relative to.
        storage_options: options of the fsspec file system of URLs; never shown or saved.
        retry: as in ``list_files``.

    Raises:
        MissingExtraError: soundfile is not installed; or soxr, or av, and a file needs it.
        SchemaError: a column is not there, or ``output_column`` already is.
        UnreadableError: a file cannot be decoded.

    >>> import io, numpy as np, soundfile, trainpipes as tp
    >>> file = io.BytesIO()
    >>> soundfile.write(file, np.zeros(8000), 8000, format="WAV")
    >>> rows = tp.from_dataset([{"audio": file.getvalue(), "text": "hush"}])
    >>> next(iter(rows.decode_audio(sampling_rate=16_000)))["audio"].shape
    (16000,)
    >>> next(iter(rows.decode_audio(start=0.25, duration=tp.random_crop(0.5))))["audio"].shape
    (4000,)
    """

    said, unit = "sound", "sound"

    column: ColumnName = "audio"
    sampling_rate: Count | None = None
    _: KW_ONLY
    mono: bool = True
    normalize: bool = False
    start: Start | None = None
    duration: Duration | None = None
    output_column: ColumnName | None = None
    on_error: OnBadRow = "raise"
    seed: Seed = 0
    folder: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: Retry | Mapping[str, Any] = Retry()

    def decoded(self, value: Any, row: Any, rng: Any) -> npt.NDArray[np.float32]:
        clip = self.clip_of(row, rng)
        with self.opened(value, clip == sound.WHOLE) as file:
            samples, rate = sound.samples_of(file, clip)
            if self.mono:
                samples = sound.mixed(samples)
            wanted = self.sampling_rate or rate
            samples = sound.resampled(samples, rate, wanted)
            sound.refuse_infinite(samples)
        if clip.duration is not None:
            samples = samples[:, : max(1, round(clip.duration * wanted))]
        if self.normalize:
            mean, variance = (fn(samples, axis=1, keepdims=True) for fn in (np.mean, np.var))
            samples = (samples - mean) / np.sqrt(variance + 1e-7)
        return np.ascontiguousarray(samples[0] if self.mono else samples)


#: What the columns of ``audio_info`` are called after.
INFO = ("seconds", "samples", "sampling_rate", "channels")


class AudioInfo(ClipDecoder, takes="columns", gives="rows"):
    """Add how long sounds are, as their headers say, without decoding them: to filter, bucket and balance
    rows by, before ``decode_audio``.

    Columns are named after ``column``: "audio_seconds", float64; "audio_samples", int64, of each channel, at
    ``sampling_rate``; "audio_sampling_rate" and "audio_channels" of the file, int64. A file whose header does
    not say how long it is counts as unreadable.

    Args:
        column: the column of bytes, paths or URLs, as ``decode_audio`` takes it.
        sampling_rate: at which samples are counted; None for the file's.
        on_error: for a file whose header cannot be read; see ``decode_audio``.
        folder: that paths are relative to.
        storage_options: options of the fsspec file system of URLs; never shown or saved.
        retry: as in ``list_files``.

    Raises:
        MissingExtraError: soundfile is not installed; or av, and a file needs it.
        SchemaError: the column is not there, or a new column already is.
        UnreadableError: a header cannot be read.

    >>> import io, numpy as np, soundfile, trainpipes as tp
    >>> file = io.BytesIO()
    >>> soundfile.write(file, np.zeros(4000), 8000, format="WAV")
    >>> rows = tp.from_dataset([{"audio": file.getvalue()}]).audio_info(sampling_rate=16_000)
    >>> next(iter(rows.drop_columns("audio")))
    {'audio_seconds': 0.5, 'audio_samples': 8000, 'audio_sampling_rate': 8000, 'audio_channels': 1}
    """

    said, unit = "sound", "sound"
    _gives_arrays = False

    column: ColumnName = "audio"
    _: KW_ONLY
    sampling_rate: Count | None = None
    on_error: OnBadRow = "raise"
    folder: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: Retry | Mapping[str, Any] = Retry()

    def decoded(self, value: Any, row: Any, rng: Any) -> sound.Header:
        with self.opened(value, False) as file:
            header = sound.header_of(file)
            if header.samples < 0:
                raise sound.NoSound("its header does not say how long it is")
        return header

    def _decoded_row(self, row: Any, rng: Any) -> Any:
        return self.decoded(row, row, rng)

    def _items(self, run: Run) -> Sequence[Any]:
        names = [f"{self.column}_{name}" for name in INFO]
        table = row_table(run, self, [self.column], names)[1]
        values: list[Any] = table.column(self.column).to_pylist()
        return values

    def _filled(self, block: Block, headers: list[Any]) -> Block:
        known = [
            header if isinstance(header, sound.Header) else sound.Header(1, 0, 0)
            for header in headers
        ]
        rates, channels, samples = np.array(known, dtype=np.int64).reshape(-1, 3).T
        wanted = rates if self.sampling_rate is None else self.sampling_rate
        counts = np.floor(samples * wanted / rates + 0.5).astype(np.int64)
        table = columns_of(block, self).data
        assert isinstance(table, pa.Table)
        for name, column in zip(INFO, (samples / rates, counts, rates, channels), strict=True):
            array = to_arrow(np.ascontiguousarray(column))
            table = table.append_column(f"{self.column}_{name}", array)
        return block.with_data(table)


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
        start: the clip's first second, from the first frame on, which may be shown later than the sound
            begins; or a column of these.
        duration: seconds of the clip, a column of these, or ``trainpipes.random_crop(seconds)``. A
            clip ends where its file does; one between two frames has the one that is shown then.
        output_column: the column of arrays; ``column`` by default.
        times_column: a new column of the times of frames in seconds, float64 ``[frames]``.
        on_error: for a file that cannot be decoded or is not there, or a null: "raise"; or "skip" the row
            and log how many; or list it, too, with ``Quarantine``.
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
