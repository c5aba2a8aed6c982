"""Sound out of files: by libsndfile, and by FFmpeg for other formats."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import need
from trainpipes.media import Undecodable, check

#: Samples, ``[channels, samples]``.
Samples = npt.NDArray[np.float32]

#: What FFmpeg may take a file for: none of those that name other files, as playlists do.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac,mp3,mp2,wav,w64,flac,ogg,mpegts,mpeg,aiff,caf,avi,asf,flv,amr,"
    "amrnb,amrwb,au,ape,wv,tta,ac3,eac3,dts,mpc,mpc8,oma"
)
#: How files begin that libsndfile does not know, from which byte.
FOR_FFMPEG = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (0, b"\x00\x00\x01\xba"), (0, b"0&\xb2u"))
#: Samples of all channels that are decoded at most (2 GiB), and that are asked of libsndfile at a time.
MOST, AT_ONCE = 1 << 29, 1 << 24
#: What libsndfile takes for the length of FLAC whose header does not say it.
UNKNOWN = (1 << 63) - 1
#: Seconds that FFmpeg decodes before the first second that is wanted: codecs need some sound before it.
#: Seconds at its end that a file may lack, by its header.
BEFORE, LACKING = 0.2, 0.5


#: What soundfile raises beside its own.
SNDFILE_ERRORS = (RuntimeError, TypeError, ValueError)


class NoSound(Undecodable):
    """A file of which no sound can be made."""


class Header(NamedTuple):
    """What a file says of its sound; ``samples`` is -1 where it does not say."""

    sampling_rate: int
    channels: int
    samples: int


@dataclass(frozen=True)
class Clip:
    """The part of a sound that is wanted, in seconds; ``place``, from 0 to 1, says where in the room after
    ``start`` it lies.
    """

    start: float = 0.0
    duration: float | None = None
    place: float | None = None

    def within(self, samples: int, rate: int) -> tuple[int, int]:
        """The first sample, and the end; raises ``NoSound`` for none."""
        first = round(self.start * rate)
        if first >= samples > 0:
            raise NoSound(
                f"it ends after {samples / rate:g} s, and is to start at {self.start:g} s"
            )
        if self.duration is None:
            return first, samples
        # Another sample for the resampler, whose number is rounded.
        wanted = math.ceil(self.duration * rate - 1e-6) + 1
        if self.place is not None:
            first += int(self.place * max(0, samples - first - wanted + 2))
        return first, min(samples, first + wanted)


WHOLE = Clip()


def before_mp3(rate: int) -> float:
    """Seconds to be decoded before a part of MP3: a frame has up to 511 of its bytes in those before it, and
    below 32,000 Hz 255 in frames that may have 3 each.
    """
    return 0.5 if rate >= 32_000 else 2.5


@contextmanager
def _explained(file: BinaryIO, libraries: tuple[type[BaseException], ...]) -> Iterator[None]:
    """What a library raises of a file as ``NoSound``."""
    try:
        yield
    except NoSound:
        raise
    except libraries as error:
        check(file)
        names = ("error_string", "strerror")  # of soundfile, of av
        said = next((said for name in names if (said := getattr(error, name, None))), str(error))
        raise NoSound(" ".join(said.split()) or type(error).__name__) from error
    check(file)


def opened(file: BinaryIO) -> Any:
    """A file as libsndfile's; None of those that it does not know."""
    import soundfile

    file.seek(0)
    head = file.read(16)
    check(file)
    if not head:
        raise NoSound("it is empty")
    file.seek(0)
    if any(head[at:].startswith(mark) for at, mark in FOR_FFMPEG):
        return None
    # Files of this machine it reads by itself, and need not wait for Python's lock.
    descriptor = _descriptor(file)
    stands = None if descriptor is None else os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        if descriptor is not None:
            os.lseek(descriptor, 0, os.SEEK_SET)
        which = file if descriptor is None else descriptor
        sound = soundfile.SoundFile(which, closefd=False)
        if sound.frames < UNKNOWN:
            return sound
        sound.close()
    except (*SNDFILE_ERRORS, soundfile.SoundFileError):
        check(file)
    if descriptor is not None and stands is not None:
        os.lseek(descriptor, stands, os.SEEK_SET)  # where the file takes it to stand
    file.seek(0)
    return None


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno() if os.name == "posix" else None
    except (AttributeError, OSError):
        return None


def header_of(file: BinaryIO) -> Header:
    """What a file says of its sound, without decoding it."""
    return _decoded(file, None)[1]


def samples_of(file: BinaryIO, clip: Clip = WHOLE) -> tuple[Samples, int]:
    """The samples of a part of a file, and how many a second has."""
    samples, header = _decoded(file, clip)
    if not samples.size:
        raise NoSound("it holds no samples")
    return samples, header.sampling_rate


def refuse_infinite(samples: Samples) -> None:
    """Raise for samples of which one is infinite or no number; resampling and mixing keep that."""
    with np.errstate(all="ignore"):  # a sum is finite where all are, and it takes a single pass
        total = samples.sum()
    if not np.isfinite(total) and not np.isfinite(samples).all():
        raise NoSound("it holds samples that are infinite or no numbers")


def _decoded(file: BinaryIO, clip: Clip | None) -> tuple[Samples, Header]:
    sound = opened(file)
    return _by_ffmpeg(file, clip) if sound is None else _by_sndfile(file, sound, clip)


def _by_sndfile(file: BinaryIO, sound: Any, clip: Clip | None) -> tuple[Samples, Header]:
    import soundfile

    with _explained(file, (*SNDFILE_ERRORS, soundfile.SoundFileError)), sound:
        header = Header(sound.samplerate, sound.channels, sound.frames)
        refuse_cut_off(sound.extra_info)
        if clip is None:
            return np.empty((sound.channels, 0), dtype=np.float32), header
        first, stop = clip.within(sound.frames, sound.samplerate)
        refuse_long((stop - first) * sound.channels)
        is_mp3, is_opus = sound.subtype.startswith("MPEG_LAYER"), sound.subtype == "OPUS"
        most_before = round(before_mp3(sound.samplerate) * sound.samplerate) if is_mp3 else 0
        if is_opus or (first and not is_mp3):  # what Opus begins with is skipped by seeking only
            sound.seek(first)
        parts = []
        while first < stop:
            count = min(stop - first, max(1, AT_ONCE // sound.channels))
            before = min(first, most_before)
            if before:  # to be read at once, since soundfile seeks after each read
                sound.seek(first - before)
            part = sound.read(before + count, dtype="float32", always_2d=True)
            parts.append(part[before:].copy() if before else part)
            first += len(parts[-1])
            if len(parts[-1]) < count:
                break
        lacking = (stop - first) / sound.samplerate
    if lacking > LACKING:
        raise NoSound(f"it is cut off, or damaged: {lacking:.3g} s of it cannot be decoded")
    samples = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((0, 1), "f4")])
    return samples.T, header


def refuse_cut_off(log: str) -> None:
    """Raise for a file that has fewer bytes than its header says, by libsndfile's log of it."""
    for line in log.splitlines():
        name, _, rest = line.partition(":")
        said, _, there = rest.partition("(should be ")
        if name.strip() in ("data", "SSND") and there:
            size, real = int(said), int(there.rstrip(") \r"))
            # A size that nobody knew as the file was begun is as large as can be, or 0.
            if real < size < 0x7FFFF000:
                raise NoSound(f"it is cut off: it has {real:,} of {size:,} bytes")


def refuse_long(count: float) -> None:
    if count > MOST:
        way = "decode parts of it, by start= and duration="
        raise NoSound(f"it has {count:,.0f} samples, and up to {MOST:,} are decoded: {way}")


def _by_ffmpeg(file: BinaryIO, clip: Clip | None, by_header: bool = True) -> tuple[Samples, Header]:
    """``by_header``: whether what a header says of the length is believed."""
    need(
        "av",
        "sound that is none of libsndfile's formats (WAV, MP3, Ogg, AIFF, FLAC with its length, ...)",
    )
    import av

    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
    errors = av.FFmpegError, EOFError, OverflowError, TypeError, ValueError, IndexError
    with (
        _explained(file, errors),
        av.open(file, "r", options=options, metadata_errors="ignore") as container,
    ):
        if not container.streams.audio:
            raise NoSound(
                f"it has no sound ({container.format.long_name or container.format.name})"
            )
        stream = container.streams.audio[0]
        coded, tick = stream.codec_context, float(stream.time_base or 0)
        if coded is None or not (coded.sample_rate and tick and coded.channels):
            raise NoSound("it does not say how its sound is coded, or in a way that FFmpeg lacks")
        rate = coded.sample_rate
        length = stream.duration * tick if stream.duration else (container.duration or -1e6) / 1e6
        own, is_own = length_of(container, stream)
        if own is not None and length - own > LACKING:
            length = float(own)  # those nearer stay as they are: batches are made by lengths
        if container.format.name == "aac":  # has no header, and FFmpeg guesses by a bit rate
            length = -1.0
        header = Header(rate, coded.channels, max(-1, round(length * rate)))
        if clip is None:
            return np.empty((header.channels, 0), dtype=np.float32), header
        known = header.samples if by_header else -1
        if clip.place is not None and known < 0:
            first, stop = 0, MOST  # drawn when all is decoded
        else:
            first, stop = clip.within(known if known >= 0 else MOST, rate)
        start = stream.start_time or 0
        before = first / rate - (before_mp3(rate) if coded.name.startswith("mp3") else BEFORE)
        if before > 0:
            if coded.name == "opus":
                # FFmpeg counts the samples to be skipped at the rate of the source, and Opus has 48,000.
                packet = next(container.demux(stream))
                shown = math.ceil(coded.delay / 48_000 / tick)
                start = min(start, start if packet.pts is None else packet.pts + shown)
            container.seek(start + int(before / tick), stream=stream)
        parts: list[Any] = []
        at, count = None, 0
        for frame in container.decode(stream):
            if at is None:
                late = ((frame.pts if frame.pts is not None else start) - start) * tick
                at = round(late * rate) if before > 0 else 0
            if frame.sample_rate != rate:
                raise NoSound(f"its sampling rate changes, from {rate:,} to {frame.sample_rate:,}")
            count += frame.samples
            refuse_long(count * header.channels)
            parts.append(planes_of(frame))
            if at + count >= stop and clip.duration is not None:
                break
    lacking = (stop - (at or 0) - count) / rate if known >= 0 else 0.0
    if lacking > LACKING and clip.place is not None and not is_own:  # another stream is longer
        file.seek(0)
        return _by_ffmpeg(file, clip, by_header=False)
    if not parts or at is None:
        raise NoSound("it holds no samples")
    shapes = {part.shape[0] for part in parts}
    if len(shapes) > 1:
        raise NoSound(f"its number of channels changes: {sorted(shapes)}")
    samples = np.concatenate(parts, axis=1)
    if known < 0:
        first, stop = clip.within(at + count, rate)
    if lacking > LACKING and clip.duration is None and is_own:
        raise NoSound(f"it is cut off, or damaged: {lacking:.3g} s of it cannot be decoded")
    if clip.duration is None:
        stop = at + count
    return floats_of(samples[:, max(0, first - at) : max(0, stop - at)]), header


def length_of(container: Any, stream: Any) -> tuple[Fraction | None, bool]:
    """Seconds of a stream of PyAV's as its file says, None if it does not; and whether they are its own, and
    not those of the longest stream.
    """
    tick = Fraction(stream.time_base)
    if stream.duration is not None:
        return stream.duration * tick, True
    if container.duration is None:
        return None, False
    length = Fraction(container.duration, 1_000_000)
    # Matroska's tag is written by FFmpeg and mkvmerge, for each stream.
    tag = re.match(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", ""))
    if tag is not None:
        hours, minutes, seconds = map(Fraction, tag.groups())
        length = 3600 * hours + 60 * minutes + seconds
    # Both count from 0 and not from the stream's start, but for the tag that mkvmerge writes.
    counts_from_0 = tag is None or "_STATISTICS_TAGS" not in stream.metadata
    if "matroska" in container.format.name and counts_from_0:
        length -= (stream.start_time or 0) * tick
    is_own = tag is not None or len(container.streams) == 1
    return (length, is_own) if length > 0 else (None, False)


def planes_of(frame: Any) -> Any:
    """A frame's samples as they are coded, ``[channels, samples]``."""
    array = frame.to_ndarray()
    return array if frame.format.is_planar else array.reshape(frame.samples, -1).T


def floats_of(samples: Any) -> Samples:
    """Integers as floats from -1 to 1."""
    if samples.dtype.kind == "f":
        return np.asarray(samples, dtype=np.float32)
    info = np.iinfo(samples.dtype)
    half = (float(info.max) + 1) / (1 if info.min else 2)
    values = samples.astype(np.float32) if info.min else samples.astype(np.float32) - half
    return np.asarray(values / half, dtype=np.float32)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Samples at another rate, ``[channels, samples]``; of n there are ``n * wanted / rate``, rounded.
    Raises ``NoSound`` for none.
    """
    if rate == wanted:
        return samples
    need("soxr", f"resampling from {rate:,} to {wanted:,} Hz")
    import soxr

    flat = np.ascontiguousarray(samples.T if len(samples) > 1 else samples[0])
    converted: Samples = soxr.resample(flat, rate, wanted)
    if not converted.size:
        raise NoSound(f"it is so short that it has no samples at {wanted:,} Hz")
    return converted.T if converted.ndim == 2 else converted[None]


def mixed(samples: Samples) -> Samples:
    """All channels as a single one, ``[1, samples]``: their mean."""
    if len(samples) == 1:
        return samples
    mean: Samples = samples.mean(axis=0, dtype=np.float32, keepdims=True)
    return mean
