"""Sound as models take it: spectrograms, and masks on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import cache
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes._internal.checks import ColumnName, Count, Natural, Seed, Share, require
from trainpipes.columns.block import Block
from trainpipes.columns.python_values import python_rows
from trainpipes.columns.run import Run
from trainpipes.columns.types import as_array
from trainpipes.errors import shown
from trainpipes.interfaces.read_columns import at_row, cell, cells, numbers_of, refused
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import Rename, taken
from trainpipes.stages.decode_clips import DecodeAudio, seconds_above_0
from trainpipes.stages.image_stages import RandomImageStage

Floats = npt.NDArray[np.float32]
#: The power that counts as silence, and decades below a sound's loudest that are kept (Whisper).
SILENCE, DECADES = 1e-10, 8.0


def number(value: Any, option: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    require(good, option, "a number", value)


def hertz_to_mel(hertz: Any) -> Any:
    """Slaney's scale: linear up to 1,000 Hz, then logarithmic."""
    bent = 15 + 27 * np.log(np.maximum(hertz, 1000) / 1000) / np.log(6.4)
    return np.where(hertz < 1000, hertz * 3 / 200, bent)


def mel_to_hertz(mel: Any) -> Any:
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((np.maximum(mel, 15) - 15) / 27))


@cache
def mel_filters(num_mels: int, n_fft: int, sampling_rate: int) -> torch.Tensor:
    """Triangles of equal area on Slaney's scale, from 0 Hz to half the sampling rate: float32
    ``[n_fft // 2 + 1, num_mels]``.
    """
    half = sampling_rate / 2
    bins = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    edges = mel_to_hertz(np.linspace(0, hertz_to_mel(np.float64(half)), num_mels + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - bins
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(np.ascontiguousarray(triangles.T, dtype=np.float32))


class LogMel(RunStage, per_row=True, gives="objects"):
    """Turn samples, ``[samples]``, into log-mel spectrograms, float32 ``[num_mels, frames]``.

    As Whisper's feature extractor in transformers does: frames of ``n_fft`` samples, a Hann window, the
    power's sums in mel bands (Slaney), log10, cut off 8 below a sound's largest, and ``(x + 4) / 4``. There
    is a frame for each ``hop_length`` samples.

    Args:
        num_mels: bands.
        column: the samples.
        output_column: the column of spectrograms, in place of the samples.
        sampling_rate: of the samples.
        n_fft: samples of a frame.
        hop_length: samples from frame to frame.
        pad_seconds: length to which a sound is padded with silence, or cut; Whisper's is 30. None leaves
            each its own.
        time_first: give ``[frames, num_mels]``, which ``pad_collate`` pads in batches of several lengths.
        frames_column: a new column of how many frames are no padding, for ``mask_spans``.

    Raises:
        ConfigError: ``decode_audio`` before it gives another sampling rate.
        DataError: a sound is shorter than a frame, and not padded.
        SchemaError: a column is not there, or holds no samples; or a new one already is.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"audio": np.zeros(8000, np.float32)}])
    >>> next(iter(rows.log_mel()))["input_features"].shape
    (80, 50)
    >>> next(iter(rows.log_mel(128, pad_seconds=30)))["input_features"].shape
    (128, 3000)
    """

    thread_safe = True
    _rows_of_batches = _gives_arrays = True

    num_mels: Count = 80
    _: KW_ONLY
    column: ColumnName = "audio"
    output_column: ColumnName = "input_features"
    sampling_rate: Count = 16_000
    n_fft: Count = 400
    hop_length: Count = 160
    pad_seconds: Annotated[float, seconds_above_0] | None = None
    time_first: bool = False
    frames_column: ColumnName | None = None

    def check(self) -> None:
        other = self.frames_column not in (self.column, self.output_column)
        self._require(other, "frames_column", "a column of its own")
        self._require(self.n_fft >= 2, "n_fft", "2 or more")
        good = self.hop_length <= self.n_fft
        self._require(good, "hop_length", f"at most n_fft, {self.n_fft}")
        least = f"a frame's hop_length or more, {self.hop_length / self.sampling_rate:g} seconds"
        good = self._samples is None or self._samples >= self.hop_length
        self._require(good, "pad_seconds", least)

    def _resolve(self, below: Sequence[Stage]) -> Self:
        for stage in reversed(below):
            if isinstance(stage, Rename) or stage._calls_function:  # which may resample
                break
            if isinstance(stage, DecodeAudio) and self.column == (
                stage.output_column or stage.column
            ):
                rate = stage.sampling_rate or self.sampling_rate
                rule = f"that of {stage.name}() before it, {rate:,}"
                self._require(self.sampling_rate == rate, "sampling_rate", rule)
                break
        return self

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        block = run.block
        sounds = self._sounds(block)
        if block.has_columns:  # lists of samples become no Python objects
            others: Any = block.data
            others = others.drop_columns(self.column) if others.num_columns > 1 else None
            rows = [{}] * len(block) if others is None else python_rows(others)
        else:
            rows = block.rows()
        for name in (self.output_column, self.frames_column):
            if rows and name != self.column and name in rows[0]:
                raise taken(name, self)
        spectrograms = [
            {**{k: v for k, v in row.items() if k != self.column}, self.output_column: spectrogram}
            for row, spectrogram in zip(rows, map(self._spectrogram, sounds), strict=True)
        ]
        if self.frames_column is not None:
            time = 0 if self.time_first else 1
            for row, sound in zip(spectrograms, sounds, strict=True):
                frames, most = (
                    -(-len(sound) // self.hop_length),
                    row[self.output_column].shape[time],
                )
                row[self.frames_column] = min(frames, most)
        return run.with_block(block.with_data(spectrograms))

    def _sounds(self, block: Block) -> list[Floats]:
        """The samples of each row, cut to the length that is wanted."""
        column = cells(block, self.column, self)
        if isinstance(column, pa.ChunkedArray):
            values, lengths = numbers_of(block, self.column, self)
            sounds: list[Any] = np.split(values, np.cumsum(lengths)[:-1])
        else:
            sounds = [as_array(value) for value in column]
        most = self._samples
        least = 1 if most is not None else max(self.n_fft // 2 + 1, self.hop_length)
        for row, sound in enumerate(sounds):
            if getattr(sound, "ndim", 0) != 1 or sound.dtype.kind not in "fiu":
                way = "put decode_audio() before"
                rule = f"column {self.column!r} holds samples, float arrays [samples], got"
                got = list(getattr(sound, "shape", ())) or type(sound).__name__
                raise refused(self, f": {rule} {got}: {way}")
            if len(sound) < least:
                way = "leave such rows out with filter(), or pass pad_seconds=..."
                rule = f"a sound must have {least} samples or more, got {len(sound)}"
                raise at_row(f"{self}: {rule}; {way}", self, block.ids[row])
            if sound.dtype.kind != "f":
                way = "divide them by the largest, such as 32,768 for int16, or put decode_audio() before"
                rule = (
                    f"column {self.column!r} holds samples, floats from -1 to 1, got {sound.dtype}"
                )
                raise refused(self, f": {rule}: {way}")
        return [np.asarray(sound[:most], dtype=np.float32) for sound in sounds]

    @property
    def _samples(self) -> int | None:
        return None if self.pad_seconds is None else round(self.pad_seconds * self.sampling_rate)

    def _spectrogram(self, sound: Floats) -> Floats:
        # Sound by sound: products of larger matrices may round the same rows in another way.
        frames = torch.from_numpy(self._frames(sound)) * torch.hann_window(self.n_fft, device="cpu")
        power = torch.fft.rfft(frames).abs().square_()
        mels = power @ mel_filters(self.num_mels, self.n_fft, self.sampling_rate)
        return self._scaled(mels.clamp_(min=SILENCE).log10_(), sound)

    def _frames(self, sound: Floats) -> Floats:
        """Frames around every ``hop_length``-th sample, ``[frames, n_fft]``, mirrored at the ends: without
        those of which all is silence.
        """
        around, most = self.n_fft // 2, self._samples
        if most is None or len(sound) > most - around - 1:
            whole = sound if most is None else np.pad(sound, (0, most - len(sound)))
            count = len(whole) // self.hop_length
            padded = np.pad(whole, around, mode="reflect" if len(whole) > around else "constant")
        else:
            heard = np.pad(sound, (0, around + 1)) if len(sound) <= around else sound
            front = heard[1 : around + 1][::-1]
            padded = np.concatenate([front, sound, np.zeros(self.n_fft, np.float32)])
            count = min(most // self.hop_length, (len(sound) + around) // self.hop_length + 1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)
        return np.array(windows[:: self.hop_length][:count], order="C")

    def _scaled(self, logs: torch.Tensor, sound: Floats) -> Floats:
        most = self._samples
        count = (len(sound) if most is None else most) // self.hop_length
        floor = max(float(logs.max()), np.log10(SILENCE)) - DECADES
        scaled = np.full((count, self.num_mels), max(floor, np.log10(SILENCE)), np.float32)
        np.maximum(logs.numpy(), np.float32(floor), out=scaled[: len(logs)])
        scaled += 4
        scaled /= 4
        return scaled if self.time_first else np.ascontiguousarray(scaled.T)


class MaskSpans(RandomImageStage):
    """Mask spans of time and of frequency in spectrograms ``[bands, frames]`` (Park et al., "SpecAugment",
    2019, section 2); of ``[samples]`` spans of time.

    Each mask's width is drawn from 0 to the largest, and then its place, by seed, epoch and row alone.

    Args:
        time_masks: how many masks of time.
        time_width: frames of a mask, at most.
        frequency_masks: how many masks of frequency.
        frequency_width: bands of a mask, at most.
        time_share: of all frames, the share that a mask of time has at most.
        value: to fill in.
        column: the spectrogram, which is copied.
        time_first: spectrograms are ``[frames, bands]``.
        frames_column: how many frames are no padding, as ``log_mel`` says: masks of time lie among these.
        seed: for the draws.

    Raises:
        SchemaError: the column is not there, or holds no arrays of floats.

    >>> import numpy as np, trainpipes as tp
    >>> rows = tp.from_dataset([{"input_features": np.ones((3, 9), np.float32)}])
    >>> pipe = rows.mask_spans(1, 4, 1, 1, time_share=1.0, seed=3)
    >>> next(iter(pipe))["input_features"].astype(int).tolist()
    [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]
    """

    thread_safe = True
    _rows_of_batches = _gives_arrays = True

    time_masks: Natural = 2
    time_width: Natural = 100
    frequency_masks: Natural = 2
    frequency_width: Natural = 27
    _: KW_ONLY
    time_share: Share = 0.1
    value: Annotated[float, number] = 0.0
    column: ColumnName = "input_features"
    time_first: bool = False
    frames_column: ColumnName | None = None
    seed: Seed = 0

    @property
    def draws(self) -> int:  # type: ignore[override]
        return max(1, 2 * (self.time_masks + self.frequency_masks))

    def changed(self, image: Any, drawn: Sequence[float], most: int | None = None) -> Any:
        masked = np.array(image)
        time = 0 if self.time_first or masked.ndim == 1 else 1
        frames = masked.shape[time] if most is None else min(most, masked.shape[time])
        widest = min(self.time_width, int(self.time_share * frames))
        spans = [(time, widest)] * self.time_masks
        if masked.ndim == 2:
            bands = min(self.frequency_width, masked.shape[1 - time])
            spans += [(1 - time, bands)] * self.frequency_masks
        for number, (axis, most) in enumerate(spans):
            width = int(drawn[2 * number] * (most + 1))
            room = frames if axis == time else masked.shape[axis]
            first = int(drawn[2 * number + 1] * (room - width + 1))
            span = slice(first, first + width)
            masked[(span,) if axis == 0 else (slice(None), span)] = self.value
        return masked

    def _changed(self, row: Any, column: str, drawn: Sequence[float]) -> Any:
        features = as_array(cell(row, column, self))
        if getattr(features, "ndim", 0) in (1, 2) and features.dtype.kind == "f":
            if self.frames_column is None:
                return self.changed(features, drawn)
            frames = cell(row, self.frames_column, self)
            if isinstance(frames, int | np.integer) and frames >= 0:
                return self.changed(features, drawn, int(frames))
            rule = f"column {self.frames_column!r} holds numbers of frames, got {shown(frames, 60)}"
            raise refused(self, f": {rule}: log_mel(frames_column=...) makes them")
        got = shown(features, 60)
        rule = f"column {column!r} holds spectrograms, float arrays [bands, frames], got {got}"
        raise refused(self, f": {rule}: put log_mel() before")
