"""Compressed files as streams, entered where a gzip member, a zstd frame, or a bzip2 or xz stream starts."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from trainpipes.errors import MissingExtraError, without_query
from trainpipes.filesystems.request import Ranges
from trainpipes.sources.files.file_bytes import FileBytes
from trainpipes.sources.files.formats import BadFileError, OtherBytesError

#: First bytes of a compressed file, and ends of names, by its compression.
MAGIC = {
    "gzip": b"\x1f\x8b\x08",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
}
SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}
#: What follows the fourth byte of a bzip2 file: its first block, or its end.
BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
#: Compressed bytes read at a time, and decompressed ones made at a time, at most.
INPUT_BYTES, OUTPUT_BYTES = 256 << 10, 1 << 20
#: Where a member begins: in the file, and in the decompressed bytes.
Entry = tuple[int, int]
#: Gives at most so many bytes of a file; none at its end.
Read = Callable[[int], bytes]


def kind_by_name(name: str) -> str:
    """What a file of this name is compressed with; "" for nothing.

    >>> kind_by_name("a.jsonl.gz"), kind_by_name("a.jsonl")
    ('gzip', '')
    """
    plain = without_query(name).lower()
    return next((kind for kind, end in SUFFIXES.items() if plain.endswith(end)), "")


def kind_by_content(head: bytes) -> str:
    if _is_skippable(head):  # as pzstd writes before each frame
        return "zstd"
    kind = next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), "")
    if kind == "bzip2" and not (head[3:4].isdigit() and head[4:10] in BZIP2_BLOCKS):
        return ""  # text may start with these letters
    return kind


class Stream:
    """Decompressed bytes from a member on; ``entries`` are the members so far, which a caller may remove."""

    def __init__(self, read: Read, kind: str, entry: Entry = (0, 0)) -> None:
        self.entries: list[Entry] = []
        if kind == "zstd":
            self._parts = _frames(read, entry, self.entries)
        elif kind:
            self._parts = _members(read, MAKERS[kind], entry, self.entries)
        else:
            self._parts = iter(lambda: read(OUTPUT_BYTES), b"")

    def read(self) -> bytes:
        return next(self._parts, b"")


class _Gzip:
    """zlib's decompressor with the methods of those of bzip2 and xz."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self._full = False

    def decompress(self, data: bytes, most: int) -> bytes:
        content = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        self._full = len(content) == most
        return content

    @property
    def needs_input(self) -> bool:
        return not (self._full or self._zlib.unconsumed_tail)

    def __getattr__(self, name: str) -> Any:  # eof and unused_data
        return getattr(self._zlib, name)


MAKERS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


def _members(
    read: Read, make: Callable[[], Any], entry: Entry, entries: list[Entry]
) -> Iterator[bytes]:
    """Members by Python's library; zeros between them are padding."""
    taken, written = entry  # bytes read of the file, and given
    data = b""
    while True:
        while not (data := data.lstrip(b"\0")):
            data = read(INPUT_BYTES)
            taken += len(data)
            if not data:
                return
        entries.append((taken - len(data), written))
        member = make()
        while not member.eof:
            if member.needs_input and not data:
                data = read(INPUT_BYTES)
                taken += len(data)
                if not data:
                    raise BadFileError("cut off: it ends within its compressed bytes")
            fed, data = (data, b"") if member.needs_input else (b"", data)
            try:
                content: bytes = member.decompress(fed, OUTPUT_BYTES)
            except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
                raise BadFileError(f"damaged: {error}") from error
            written += len(content)
            if content:
                yield content
        data = member.unused_data


# zstd: Arrow decompresses, and the headers of blocks tell where a frame ends; see RFC 8878, 3.1.1.

#: The rest of the first four bytes of a frame that holds nothing, and bits of a frame's descriptor.
SKIPPABLE, SINGLE_SEGMENT, CHECKSUM = b"\x2a\x4d\x18", 0x20, 0x04


def _is_skippable(head: bytes) -> bool:
    return head[1:4] == SKIPPABLE and head[0] & 0xF0 == 0x50


def _frames(read: Read, entry: Entry, entries: list[Entry]) -> Iterator[bytes]:
    if not pa.Codec.is_available("zstd"):
        raise MissingExtraError(
            "this build of pyarrow cannot read zstd: pip install --force-reinstall pyarrow"
        )
    source, written = Forward(lambda: read(INPUT_BYTES), entry[0]), entry[1]
    while head := source.take(4):
        if head == MAGIC["zstd"]:
            entries.append((source.at - 4, written))
            frame = Forward(partial(next, _frame(source), b""))
            opened = pa.CompressedInputStream(pa.PythonFile(frame, mode="r"), "zstd")
            try:
                while content := opened.read(OUTPUT_BYTES):
                    written += len(content)
                    yield content
            except OSError as error:
                raise BadFileError(f"damaged: {error}") from error
        elif _is_skippable(head):
            size = int.from_bytes(_full(source, 4), "little")
            if not source.skip(size):
                _full(source, 1)  # raises
        else:
            raise BadFileError(
                f"damaged: no zstd frame starts with {head!r}, at byte {source.at - 4:,}"
            )


def _frame(source: Forward) -> Iterator[bytes]:
    descriptor = _full(source, 1)
    bits = descriptor[0]
    single = bool(bits & SINGLE_SEGMENT)
    window, dictionary = int(not single), (0, 1, 2, 4)[bits & 3]
    size = (int(single), 2, 4, 8)[bits >> 6]
    yield MAGIC["zstd"] + descriptor + _full(source, window + dictionary + size)
    last = False
    while not last:
        head = _full(source, 3)
        header = int.from_bytes(head, "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == 3:
            raise BadFileError(f"damaged: a zstd block of no known kind, at byte {source.at:,}")
        yield head
        if content := _full(source, 1 if kind == 1 else size):
            yield content
    if bits & CHECKSUM:
        yield _full(source, 4)


def _full(source: Forward, size: int) -> bytes:
    data = source.take(size)
    if len(data) < size:
        raise BadFileError(f"cut off: it ends within a zstd frame, at byte {source.at:,}")
    return data


class Forward:
    """A file that can only be read forward, from pieces as they come."""

    closed = False

    def __init__(self, more: Callable[[], bytes | memoryview], at: int = 0) -> None:
        self._more, self.at = more, at
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytes:
        parts = []
        while size and self._fill():
            parts.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(parts[-1])
            self.at += len(parts[-1])
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    read = take  # as Arrow calls it

    def skip(self, size: int) -> bool:
        end = self.at + size
        while self.at < end and self._fill():
            step = min(end - self.at, len(self._rest))
            self._rest = self._rest[step:]
            self.at += step
        return self.at == end

    def _fill(self) -> bool:
        if not self._rest:
            self._rest = memoryview(self._more())
        return bool(self._rest)

    def close(self) -> None:
        """Nothing is open."""


class Decompressed:
    """The bytes of a compressed file, by their decompressed places; for earlier bytes it starts anew."""

    def __init__(self, data: FileBytes, kind: str, again: ReadAgain) -> None:
        self.name, self._data, self._kind, self._again = data.name, data, kind, again
        self._source: Any = None
        self._stream: Stream | None = None
        self._rest = b""
        self._at = 0

    def mapped(self) -> None:
        """None: the file has no such bytes as are read of it."""

    def read(self, ranges: Ranges, entry: Entry = (0, 0)) -> list[memoryview]:
        """Bytes of ranges, and those between them, from a member that begins before them."""
        start, stop = min(ranges, default=(0, 0))[0], max((end for _, end in ranges), default=0)
        if self._stream is None or not entry[1] <= self._at <= start:
            self.close()
            self._source = self._data.stream(entry[0])
            self._stream, self._at = Stream(self._source.read, self._kind, entry), entry[1]
        self._again.bytes += start - self._at
        parts = []
        while self._at < stop:
            self._rest = self._rest or self._stream.read()
            if not self._rest:
                raise OtherBytesError("it has become shorter")
            skipped = max(0, min(len(self._rest), start - self._at))
            part = self._rest[skipped : skipped + stop - max(self._at, start)]
            self._rest = self._rest[skipped + len(part) :]
            self._at += skipped + len(part)
            parts.append(part)
        whole = memoryview(b"".join(parts))
        return [whole[first - start : last - start] for first, last in ranges]

    def finish(self) -> None:
        """Read to the end of the file, where checksums are."""
        while self._stream is not None and self._stream.read():
            pass

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = self._stream = None
        self._rest = b""


@dataclass
class ReadAgain:
    """Bytes that were decompressed only to reach later ones."""

    bytes: int = 0


def opened(data: FileBytes, compression: str, again: ReadAgain) -> FileBytes | Decompressed:
    """The bytes of a file, decompressed if it is compressed."""
    return Decompressed(data, compression, again) if compression else data
