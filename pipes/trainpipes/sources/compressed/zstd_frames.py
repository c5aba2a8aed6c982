"""zstd files, frame by frame: Arrow decompresses; the headers of blocks tell where a frame ends.

See RFC 8878, 3.1.1. Called by ``streams``.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trainpipes.errors import MissingExtraError
from trainpipes.sources.files.each_file import BadFileError

#: Compressed bytes read at a time, and decompressed ones made at a time, at most.
INPUT_BYTES, OUTPUT_BYTES = 256 << 10, 1 << 20
#: First bytes of a frame; the rest of the first four of one that holds nothing.
FRAME, SKIPPABLE = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
#: Bits of a frame's descriptor.
SINGLE_SEGMENT, CHECKSUM = 0x20, 0x04


class Frames:
    """The decompressed bytes of a file of frames; see ``compress.Stream``.

    Args:
        source: the file, at the compressed place of ``entry``.
        entry: where a frame begins: in the file, and in the decompressed bytes.
    """

    def __init__(self, source: Any, entry: tuple[int, int]) -> None:
        if not pa.Codec.is_available("zstd"):
            raise MissingExtraError(
                "this build of pyarrow cannot read zstd: pip install --force-reinstall pyarrow"
            )
        self.entries: list[tuple[int, int]] = []
        self._source, self._made = _Exact(source, entry[0]), entry[1]
        self._frame: Any = None

    def read(self) -> bytes:
        while True:
            if self._frame is None:
                if not _skip_to_frame(self._source):
                    return b""
                place = self._source.at - len(FRAME)
                self.entries.append((place, self._made))
                frame = pa.PythonFile(_Frame(self._source), mode="r")
                self._frame = pa.CompressedInputStream(frame, "zstd")
            try:
                found: bytes = self._frame.read(OUTPUT_BYTES)
            except OSError as error:
                raise BadFileError(f"damaged: {error}") from error
            if found:
                self._made += len(found)
                return found
            self._frame = None


class _Exact:
    """Reads as many bytes of a file as are asked for.

    Attributes:
        at: the place in the file.
    """

    def __init__(self, source: Any, at: int) -> None:
        self._source, self.at = source, at
        self._data, self._used = b"", 0

    def some(self, size: int) -> bytes:
        """At most so many, and some unless the file ends."""
        if self._used == len(self._data):
            self._data, self._used = self._source.read(INPUT_BYTES), 0
        found = self._data[self._used : self._used + size]
        self._used += len(found)
        self.at += len(found)
        return found

    def take(self, size: int) -> bytes:
        """So many; fewer at the file's end."""
        found = self.some(size)
        while len(found) < size and (more := self.some(size - len(found))):
            found += more
        return found


def _skip_to_frame(source: _Exact) -> bool:
    """Go behind the first bytes of the next frame; False at the file's end."""
    while head := source.take(4):
        if head == FRAME:
            return True
        if head[1:] != SKIPPABLE or head[0] & 0xF0 != 0x50:
            raise BadFileError(
                f"damaged: no zstd frame starts with {head!r}, at byte {source.at - 4:,}"
            )
        left = int.from_bytes(_full(source, 4), "little")
        while left:
            left -= len(_full(source, min(left, INPUT_BYTES)))
    return False


def _full(source: _Exact, size: int) -> bytes:
    found = source.take(size)
    if len(found) < size:
        raise BadFileError(f"cut off: it ends within a zstd frame, at byte {source.at:,}")
    return found


class _Frame:
    """The bytes of one frame as a file: it ends where the frame does."""

    closed = False

    def __init__(self, source: _Exact) -> None:
        self._source = source
        descriptor = _full(source, 1)[0]
        single = bool(descriptor & SINGLE_SEGMENT)
        window, dictionary = int(not single), (0, 1, 2, 4)[descriptor & 3]
        size = (int(single), 2, 4, 8)[descriptor >> 6]
        rest = _full(source, window + dictionary + size)
        self._ready = FRAME + bytes([descriptor]) + rest
        self._checksum = 4 if descriptor & CHECKSUM else 0
        self._left, self._last = (
            0,
            False,
        )  # bytes left of the block at hand; whether it is the last one

    def read(self, size: int = -1) -> bytes:
        found = b""
        while len(found) < size:
            if self._ready:
                part = self._ready[: size - len(found)]
                self._ready = self._ready[len(part) :]
            elif self._left:
                part = self._source.some(min(self._left, size - len(found)))
                self._left -= len(part)
                if not part:
                    _full(self._source, 1)  # raises
            elif self._last:
                break
            else:
                self._next_block()
                continue
            found += part
        return found

    def _next_block(self) -> None:
        self._ready = _full(self._source, 3)
        header = int.from_bytes(self._ready, "little")
        self._last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        if kind == 3:
            raise BadFileError(
                f"damaged: a zstd block of no known kind, at byte {self._source.at:,}"
            )
        self._left = 1 if kind == 1 else size
        if self._last:
            self._left += self._checksum

    def close(self) -> None:
        pass
