"""Videos as files of many formats."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np


def pictures(count: int, height: int, width: int, seed: int = 0) -> list[Any]:
    """Pictures that move, each another one: uint8 ``[height, width, 3]``."""
    base = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width]
    return [
        (np.stack([2 * x + 5 * n, 2 * y + 3 * n, np.full_like(x, 7 * n)], 2) % 256 * 3 // 4
         + np.roll(base, 2 * n, 1) // 4).astype(np.uint8)
        for n in range(count)
    ]  # fmt: skip


def video(
    frames: int | Sequence[Any] = 50,
    container: str = "mp4",
    codec: str = "libx264",
    *,
    rate: int = 25,
    size: tuple[int, int] = (48, 64),
    gop: int = 12,
    pixels: str = "yuv420p",
    times: Sequence[int] | None = None,
    rotation: int = 0,
    sound: int = 0,
    seed: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A video; ``times`` in milliseconds are those of its frames, else ``rate`` says them. ``sound`` is
    seconds of silence beside it.
    """
    import av

    file = io.BytesIO()
    shown = pictures(frames, *size, seed) if isinstance(frames, int) else frames
    with av.open(file, "w", format=container, options=container_options or {}) as out:
        quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
        stream: Any = out.add_stream(
            codec, rate=rate, options={"g": str(gop), **quiet, **(options or {})}
        )
        stream.height, stream.width = shown[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.thread_count = 1  # so that all machines make the same file
        tick = Fraction(1, rate) if times is None else Fraction(1, 1000)
        stream.time_base = stream.codec_context.time_base = tick
        if rotation:
            stream.set_display_rotation(rotation)
        silence: Any = out.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for number, picture in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(picture).reformat(format=pixels)
            frame.pts, frame.time_base = number if times is None else times[number], tick
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        for at in range(0, 16_000 * sound, 1024):
            part = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            part.sample_rate, part.pts = 16_000, at
            out.mux(silence.encode(part))
        if sound:
            out.mux(silence.encode(None))
    return file.getvalue()
