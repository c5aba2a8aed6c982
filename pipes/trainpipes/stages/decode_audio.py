from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY
from io import BytesIO
from typing import Annotated, Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import ColumnName, Count, Seed, is_name, need, require
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.errors import hidden, shown
from trainpipes.filesystems.retry import Retry
from trainpipes.filesystems.systems import open_named
from trainpipes.interfaces.quarantine import OnBadRow
from trainpipes.interfaces.read_columns import cell, refused
from trainpipes.media import Undecodable, bytes_of
from trainpipes.media.sound import (
    WHOLE,
    Clip,
    Header,
    NoSound,
    header_of,
    mixed,
    refuse_infinite,
    resampled,
    samples_of,
)
from trainpipes.stages.columns import columns_of, row_table
from trainpipes.stages.decoding import Decoder

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
    """A stage on files of sound or video, or parts of them: ``start``, ``duration``, ``seed``, ``folder``,
    ``storage_options`` and ``retry`` are its options.
    """

    free = frozenset({"folder", "storage_options", "retry"})
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

    def clip_of(self, row: Any, rng: Any) -> Clip:
        start, duration = self.options["start"], self.options["duration"]
        if self._crop is not None:
            return Clip(self._seconds(row, start) or 0.0, self._crop, float(rng.random()))
        return Clip(self._seconds(row, start) or 0.0, self._seconds(row, duration))

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
        """What a value names, opened: bytes, a path or URL, or a struct of both. What cannot be decoded of a
        path is raised with it.
        """
        content = bytes_of(value)
        if isinstance(value, Mapping) and not isinstance(content, bytes):
            content = value.get("path")
        if content is None:
            raise Undecodable("it is null")
        if isinstance(content, bytes):
            yield BytesIO(content)
            return
        if not isinstance(content, str | os.PathLike):
            got = f"{shown(content, 60)} ({type(content).__name__})"
            column = self.options["column"]
            rule = (
                f": column {column!r} holds the bytes of files, or their paths or URLs, got {got}"
            )
            raise refused(self, rule)
        path, given_options = os.fspath(content), self.options
        try:
            folder, options = given_options["folder"], given_options["storage_options"]
            about = None if folder is None else os.fspath(folder), options, given_options["retry"]
            with closing(open_named(path, *about, whole=whole)) as file:
                yield file
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise Undecodable(
                f"{hidden(path)}: {error.strerror or 'there is no such file'}"
            ) from None
        except Undecodable as error:
            raise Undecodable(f"{hidden(path)}: {error}") from error

    def check(self) -> None:
        need(self.package, f"{self.name}()")
        self._set(retry=Retry.of(self.options["retry"], f"{self.name}(retry)"))


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
        start: seconds from the file's start, or the name of a column of these; null is 0.
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
        with self.opened(value, clip == WHOLE) as file:
            samples, rate = samples_of(file, clip)
            if self.mono:
                samples = mixed(samples)
            wanted = self.sampling_rate or rate
            samples = resampled(samples, rate, wanted)
            refuse_infinite(samples)
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

    def decoded(self, value: Any, row: Any, rng: Any) -> Header:
        with self.opened(value, False) as file:
            header = header_of(file)
            if header.samples < 0:
                raise NoSound("its header does not say how long it is")
        return header

    def _decoded_row(self, row: Any, rng: Any) -> Any:
        return self.decoded(row, row, rng)

    def _items(self, run: Run) -> Sequence[Any]:
        names = [f"{self.column}_{name}" for name in INFO]
        table = row_table(run, self, [self.column], names)[1]
        values: list[Any] = table.column(self.column).to_pylist()
        return values

    def _filled(self, block: Block, headers: list[Any]) -> Block:
        known = [header if isinstance(header, Header) else Header(1, 0, 0) for header in headers]
        rates, channels, samples = np.array(known, dtype=np.int64).reshape(-1, 3).T
        wanted = rates if self.sampling_rate is None else self.sampling_rate
        counts = np.floor(samples * wanted / rates + 0.5).astype(np.int64)
        table = columns_of(block, self).data
        assert isinstance(table, pa.Table)
        for name, column in zip(INFO, (samples / rates, counts, rates, channels), strict=True):
            array = to_arrow(np.ascontiguousarray(column))
            table = table.append_column(f"{self.column}_{name}", array)
        return block.with_data(table)
