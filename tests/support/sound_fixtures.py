"""Sounds as files of many formats."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def tone(
    seconds: float = 1.0, rate: int = 16_000, channels: int = 1, seed: int = 0, noise: float = 0.05
) -> Any:
    """A tone that rises, with some noise: float32 ``[samples, channels]``, from -1 to 1."""
    time = np.arange(round(seconds * rate)) / rate
    noises = np.random.default_rng(seed).standard_normal((len(time), channels))
    waves = 0.4 * np.sin(2 * np.pi * (200 + 100 * time) * time)
    return (waves[:, None] + noise * noises).astype(np.float32)


def encoded(
    samples: Any,
    rate: int = 16_000,
    format: str = "WAV",
    subtype: str | None = None,
    **options: Any,
) -> bytes:
    import soundfile

    file = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(file, "w", rate, channels, subtype, format=format, **options) as sound:
        for at in range(0, len(samples), 20_000):  # libsndfile writes no long Vorbis at once
            sound.write(samples[at : at + 20_000])
    return file.getvalue()


def by_ffmpeg(
    samples: Any,
    rate: int,
    container: str,
    codec: str,
    video: bool = False,
    timed: bool = True,
    **options: Any,
) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        stream: Any = out.add_stream(codec, rate=rate, layout=layout, **options)
        if video:
            picture: Any = out.add_stream("mpeg4", rate=5)
            picture.width = picture.height = 32
            for number in range(10):
                shown = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number, np.uint8))
                out.mux(picture.encode(shown))
            out.mux(picture.encode(None))
        for at in range(0, len(samples), 960):
            part = np.ascontiguousarray(samples[at : at + 960].T)
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, at if timed else None
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()
