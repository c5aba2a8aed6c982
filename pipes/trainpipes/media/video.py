"""Frames out of video files, by FFmpeg: found by their times, from the key frame before each."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainpipes.media import Undecodable, check
from trainpipes.media.sound import Clip, length_of

#: What FFmpeg may take a file for: none of those that name other files, as playlists do.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,asf,flv,ogg,gif,apng,ivf,nut,h264,hevc,"
    "m4v,mjpeg,dv,mxf,rm"
)
#: Bytes of the pixels of a clip, at most.
MOST = 1 << 31
#: Seconds that are read on rather than sought over; that a file may lack at its end, by its header.
NEAR, LACKING = 1, Fraction(1, 2)
#: Codecs of which frames that no other frame needs can be left out while others are decoded.
SKIPPABLE = {"h264", "mpeg4", "mpeg2video", "mpeg1video"}
#: Bytes that FFmpeg asks a file for at a time.
BUFFER = 64 << 10


class NoVideo(Undecodable):
    """A file of which no frames can be made."""


class Header(NamedTuple):
    """What a file says of its video; ``seconds`` is -1 where it does not say. Height and width are those of
    the frames as they are coded, in pixels.
    """

    seconds: float
    fps: float
    height: int
    width: int


@dataclass(frozen=True)
class Choice:
    """Which frames of a clip are wanted: ``count`` of them, ``rate`` in a second, by ``numbers``, or all."""

    count: int | None = None
    rate: float | None = None
    numbers: Sequence[int] | None = None

    def middles(self, length: Fraction) -> list[Fraction]:
        """The middles of equal parts of a clip of ``length`` seconds."""
        if self.count is not None:
            return [length * (2 * n + 1) / (2 * self.count) for n in range(self.count)]
        assert self.rate is not None
        rate = exact(self.rate)
        count = max(1, int(length * rate + Fraction(1, 2)))
        if count * 3 > MOST:
            raise NoVideo(f"{count:,} frames would be decoded: lower fps, or give a duration")
        return [min((2 * n + 1) / (2 * rate), length) for n in range(count)]


class Frames(NamedTuple):
    """Pixels, uint8 ``[frames, height, width, 3]``, and the time of each frame in seconds."""

    pixels: npt.NDArray[np.uint8]
    times: npt.NDArray[np.float64]


def exact(seconds: float) -> Fraction:
    return Fraction(seconds).limit_denominator(1_000_000)


@contextmanager
def opened(file: BinaryIO) -> Iterator[Video]:
    """The first video of a file."""
    import av

    errors = (
        av.FFmpegError, OverflowError, ValueError
    )  # fmt: skip
    video = None
    try:
        if not file.read(1):
            check(file)
            raise NoVideo("it is empty")
        video = Video(file)
        yield video
    except NoVideo:
        check(file)
        raise
    except errors as error:
        check(file)
        said = getattr(error, "strerror", None) or str(error)
        raise NoVideo(" ".join(said.split()) or type(error).__name__) from error
    finally:
        if video is not None:
            video.track.close()
    check(file)


def header_of(file: BinaryIO) -> Header:
    """What a file says of its video, without decoding it."""
    with opened(file) as video:
        stream = video.track.stream
        seconds = -1.0 if video.length is None else float(video.length)
        shape = stream.codec_context.height, stream.codec_context.width
        return Header(seconds, float(stream.average_rate or 0), *shape)


def frames_of(
    file: BinaryIO,
    choice: Choice,
    clip: Clip,
    size: Callable[[int, int], tuple[int, int]] | None = None,
) -> Frames:
    """Frames of a part of a file; ``size`` gives the new height and width."""
    with opened(file) as video:
        try:
            return video.frames(video.ticks(choice, clip), size)
        except Shorter as error:
            video.length, video.is_own_length = error.seconds, True
        video.track.rewind()
        return video.frames(video.ticks(choice, clip), size)


class Shorter(Exception):
    """A video ends earlier than its container does."""

    def __init__(self, seconds: Fraction) -> None:
        super().__init__()
        self.seconds = seconds


class Video:
    """A video whose frames are chosen by their times, which count in ticks.

    Attributes:
        length: seconds; None if unknown. Found by reading, if need be.
        is_own_length: whether it is that of the frames, and not of all that the file holds.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.track = track = Track(file)
        self.length, self.is_own_length = length_of(track.container, track.stream)

    def ticks(self, choice: Choice, clip: Clip) -> list[Fraction]:
        """For each frame that is wanted, a time at which it was the last to come."""
        track = self.track
        if choice.numbers is not None:
            times = track.times()
            most = max(choice.numbers)
            if most >= len(times):
                raise NoVideo(f"it has {len(times):,} frames, and number {most:,} is wanted")
            return [Fraction(times[n] + 1) for n in choice.numbers]
        if self.length is None:
            times = track.times()
            step = times[-1] - times[-2] if len(times) > 1 else 1
            self.length = (times[-1] + step - track.start) * track.tick if times else Fraction(0)
            self.is_own_length = True
        begin, length = exact(clip.start), self.length
        if begin >= length > 0:
            raise NoVideo(f"it ends after {float(length):g} s, and is to start at {clip.start:g} s")
        duration = length - begin
        if clip.duration is not None:
            wanted = exact(clip.duration)
            if clip.place is not None:
                begin += exact(clip.place) * max(Fraction(0), duration - wanted)
            duration = min(duration, wanted)
        if choice.count is not None or choice.rate is not None:
            return [track.start + (begin + t) / track.tick for t in choice.middles(duration)]
        first = None if begin == 0 else track.start + begin / track.tick
        stop = None if clip.duration is None else track.start + (begin + duration) / track.tick
        times = track.times(first, stop)
        if not times:  # the frame that is shown all the time
            return [track.start + (begin + duration / 2) / track.tick]
        return [Fraction(time + 1) for time in times]

    def frames(
        self, ticks: Sequence[Fraction], size: Callable[[int, int], tuple[int, int]] | None
    ) -> Frames:
        """The frames that are shown just before ``ticks``."""
        from av.video.reformatter import VideoReformatter

        track, converter = self.track, VideoReformatter()
        times = np.empty(len(ticks))
        pixels: Any = None
        # Of frames as they are coded; the last frame's place and time.
        shape, before = (0, 0), (-1, 0)
        for n in sorted(range(len(ticks)), key=lambda n: ticks[n]):
            time, frame = track.at(ticks[n])
            self._check_end(time, frame, ticks[n])
            times[n] = (time - track.start) * track.tick
            if before[0] >= 0 and before[1] == time:
                pixels[n] = pixels[before[0]]
                continue
            turn = turn_of(frame)
            if pixels is None:
                shown = turn.swapped(frame.height, frame.width)
                shown = shown if size is None else size(*shown)
                if min(shown) < 1 or len(ticks) * shown[0] * shown[1] * 3 > MOST:
                    said = f"{len(ticks):,} frames of {shown[0]:,} x {shown[1]:,} pixels"
                    way = "decode fewer, or give a size"
                    raise NoVideo(f"{said} are more than {MOST >> 30} GiB: {way}")
                shape = turn.swapped(*shown)
                pixels = np.empty((len(ticks), *shown, 3), dtype=np.uint8)
            rgb = converter.reformat(
                frame, shape[1], shape[0], "rgb24", interpolation="BICUBIC", threads=1
            )
            pixels[n] = turn.turned(rgb.to_ndarray())
            before = n, time
        return Frames(pixels, times)

    def _check_end(self, time: int, frame: Any, tick: Fraction) -> None:
        """Raise if a video ends long before the wanted frames."""
        track = self.track
        end = time + (frame.duration or 0)
        if (tick - end) * track.tick <= LACKING or not track.is_last(time):
            return
        seconds = (end - track.start) * track.tick
        if not self.is_own_length:
            raise Shorter(seconds)
        header = f"and its header says {float(self.length or 0):.3g} s"
        raise NoVideo(f"it is cut off, or damaged: it ends after {float(seconds):.3g} s, {header}")


class Track:
    """The packets of a video in the order of the file, and their frames.

    Frames are asked for in the order of their times. Frames between are read or sought over; what no
    wanted frame needs is not decoded.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.container: Any = None
        self.rewind()

    def close(self) -> None:
        if self.container is not None:
            self.container.close()

    def rewind(self) -> None:
        """Begin anew. Formats differ in how they seek to their start, so that the file is opened again."""
        import av

        self.close()
        self._file.seek(0)
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
        self.container = container = av.open(
            self._file, "r", options=options, metadata_errors="ignore", buffer_size=BUFFER
        )
        cover = av.stream.Disposition.attached_pic
        streams = [stream for stream in container.streams.video if not stream.disposition & cover]
        if not streams:
            name = container.format.long_name or container.format.name
            raise NoVideo(f"it has no video ({name})")
        self.stream: Any = streams[0]
        for other in container.streams:
            if other is not self.stream:
                other.discard = av.stream.Discard.all
        context = self.stream.codec_context
        if context is None or not (context.width and context.height and self.stream.time_base):
            raise NoVideo("it does not say how its frames are coded")
        context.thread_type, context.thread_count = "NONE", 1
        self.tick, self.start = Fraction(self.stream.time_base), self.stream.start_time or 0
        self._near = int(NEAR / self.tick)
        # Without times of packets all frames are decoded, and counted at their rate.
        self._is_linear = "avi" in container.format.name and context.name in ("h264", "hevc")
        self._packets: Iterator[Any] = iter(container.demux(self.stream))
        self._read_to: int | None = None  # the time of decoding of the packets read
        self._pending: deque[Any] = deque()  # packets read, not decoded
        # Times of frames from the last given frame on, as packets say them.
        self._known = set[int]()
        # That of the key frame that decoding began at: frames before are bad.
        self._key: int | None = None
        self._shown: dict[int, Any] = {}  # frames that were decoded, by time
        self._is_fresh = self._is_read = self._is_done = False
        self._count = 0  # frames that were decoded

    def times(self, first: Fraction | None = None, stop: Fraction | None = None) -> list[int]:
        """The times of frames from ``first`` up to ``stop``, without decoding them."""
        times: list[int] = []
        if first is not None and not self._is_linear:
            self._go(first + 1)
        for packet in self._packets:
            if self._is_linear or not packet.size:
                continue
            if packet.pts is None:
                self._is_linear = True
            elif not packet.is_discard:
                times.append(packet.pts)
            if stop is not None and packet.dts is not None and packet.dts >= stop:
                break
        linear = self._is_linear
        self.rewind()
        if linear:
            self._is_linear = True
            while not self._is_done:
                self._decode(None)
                times += self._shown
                self._shown.clear()
            self.rewind()
            self._is_linear = True
        return sorted(
            t for t in {*times} if (first is None or t >= first) and (stop is None or t < stop)
        )

    def at(self, tick: Fraction) -> tuple[int, Any]:
        """The frame that was the last to come before ``tick``, and its time; else the first one."""
        if not self._is_linear:
            self._read_up_to(tick)
        wanted = max((t for t in self._known if t < tick), default=None)
        times = sorted(self._shown)
        while not (self._is_done or wanted in self._shown or (times and times[-1] >= tick)):
            self._decode(wanted)
            times = sorted(self._shown)
            for time in times[: max(0, bisect_left(times, tick) - 1)]:
                del self._shown[time]
        times = sorted(self._shown)
        if not times:
            raise NoVideo("no frame of it can be decoded")
        time = times[max(0, bisect_left(times, tick) - 1)]
        frame = self._shown[time]
        self._known = {t for t in self._known if t >= time}
        if frame.is_corrupt:
            seconds = float((time - self.start) * self.tick)
            raise NoVideo(f"its frame at {seconds:.3f} s is damaged")
        return time, frame

    def is_last(self, time: int) -> bool:
        return self._is_done or (
            self._is_read and not self._pending and time >= max([*self._shown, *self._known])
        )

    def _read_up_to(self, tick: Fraction) -> None:
        """Read packets until all are known whose frames come before ``tick``."""
        if self._is_far(tick):
            self._go(tick)
        while not self._is_read and (self._read_to is None or self._read_to < tick):
            self._read(tick)
            if self._is_linear:
                self.rewind()
                self._is_linear = True
                return

    def _is_far(self, tick: Fraction) -> bool:
        before = self.start if self._read_to is None else self._read_to
        if self._is_read or tick - before < self._near:
            return False
        index = self.stream.index_entries
        place = index.search_timestamp(int(tick))
        return bool(place < 0 or index[place].timestamp > before)

    def _go(self, tick: Fraction) -> None:
        """Go to a key frame before ``tick``, or to the start."""
        import av

        back = 1
        while tick - back > self.start + self._near:
            try:
                self.container.seek(int(tick) - back, stream=self.stream)
                packets = iter(self.container.demux(self.stream))
                first = next((p for p in packets if p.is_keyframe and p.size), None)
            except (av.FFmpegError, OverflowError):
                break
            if first is not None and (first.pts is None or first.pts < tick):
                self._packets = chain([first], packets)
                return
            back = max(2 * back, self._near)
        self.rewind()

    def _read(self, tick: Fraction | None) -> None:
        """Read a packet; from a key frame before ``tick`` on, decoding can begin anew."""
        packet = next(self._packets, None)
        if packet is None or not packet.size:
            self._is_read = self._is_read or packet is None
            return
        if packet.pts is None:
            self._is_linear = True
            return
        if packet.is_keyframe and tick is not None and packet.pts < tick:
            self._pending.clear()
            self._known.clear()
            self._is_fresh, self._key = True, packet.pts
        if packet.dts is not None:
            self._read_to = packet.dts
        self._pending.append(packet)
        if not packet.is_discard:
            self._known.add(packet.pts)

    def _decode(self, wanted: int | None) -> None:
        """Decode a packet, or the rest at the end."""
        context = self.stream.codec_context
        if self._is_linear:
            packet = next(self._packets, None)
        elif self._pending:
            packet = self._pending.popleft()
        elif self._is_read:
            packet = None
        else:
            return self._read(None)
        if self._is_fresh:
            context.flush_buffers()
            self._shown.clear()
            self._is_fresh = False
        if context.name in SKIPPABLE and not self._is_linear:
            skips = packet is not None and wanted is not None and packet.pts < wanted
            context.skip_frame = "NONREF" if skips else "DEFAULT"
        if packet is None:
            self._is_done = True
        elif not packet.size:
            return None
        for frame in context.decode(packet):
            time = frame.pts
            if self._is_linear or time is None:
                rate = self.stream.average_rate or self.stream.guessed_rate or 25
                time = self.start + round(self._count / (rate * self.tick))
            self._count += 1
            if self._key is None or time >= self._key:
                self._shown[time] = frame
        return None


class Turn(NamedTuple):
    """How a frame is to be turned to be shown: rows and columns swapped first, then mirrored."""

    swaps: bool = False
    down: bool = False
    across: bool = False

    def swapped(self, height: int, width: int) -> tuple[int, int]:
        return (width, height) if self.swaps else (height, width)

    def turned(self, image: Any) -> Any:
        if self.swaps:
            image = image.transpose(1, 0, 2)
        return image[:: -1 if self.down else 1, :: -1 if self.across else 1]


def turn_of(frame: Any) -> Turn:
    """What the display matrix of a frame says, to the nearest right angle."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return Turn()
    # Of [a b; c d], x becomes a x + c y, and y becomes b x + d y.
    a, b, _, c, d = np.frombuffer(bytes(matrix), dtype="<i4")[:5].tolist()
    if abs(b) > abs(a):
        return Turn(True, b < 0, c < 0)
    return Turn(False, d < 0, a < 0)
