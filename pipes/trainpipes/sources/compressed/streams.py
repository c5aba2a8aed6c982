"""Compressed files as streams of bytes that can be entered at several places.

A gzip file is one member or several, one after the other; so are a zstd file's frames, and the streams of
bzip2 and xz. Each can be decompressed by itself: where one starts, a reader can start. What a file is
compressed with is told by its first bytes. A stream is used by one thread at a time.
"""

from __future__ import annotations

import bz2
import lzma
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from trainpipes._internal.secrets import without_query
from trainpipes.sources.compressed.zstd_frames import Frames
from trainpipes.sources.files.each_file import BadFileError

if TYPE_CHECKING:
    from trainpipes.sources.files.file_bytes import FileBytes

#: First bytes of a compressed file, and ends of names, by what it is compressed with.
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


def kind_by_name(name: str) -> str:
    """What a file of this name is compressed with; "" for nothing.

    >>> kind_by_name("a.jsonl.gz"), kind_by_name("a.jsonl")
    ('gzip', '')
    """
    return next(
        (kind for kind, end in SUFFIXES.items() if without_query(name).lower().endswith(end)), ""
    )


def kind_by_content(head: bytes) -> str:
    """What a file with these first bytes is compressed with; "" for nothing."""
    kind = next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), "")
    if kind == "bzip2" and not (head[3:4].isdigit() and head[4:10] in BZIP2_BLOCKS):
        return ""  # text may start with these letters
    return kind


class Source(Protocol):
    """An open file."""

    def read(self, size: int) -> bytes: ...


class Stream(Protocol):
    """Decompressed bytes, from a place on.

    Attributes:
        entries: the members that have begun so far, the first one first; a caller may remove some.
    """

    entries: list[Entry]

    def read(self) -> bytes:
        """The next bytes, some; none at the end.

        Raises:
            BadFileError: they cannot be decompressed.
        """
        ...


def open_stream(source: Source, kind: str, entry: Entry = (0, 0)) -> Stream:
    """The bytes of a file, decompressed.

    Args:
        source: the file, at the compressed place of ``entry``.
        kind: what it is compressed with; "" for nothing.
        entry: where a member begins.
    """
    if kind == "zstd":
        return Frames(source, entry)
    if kind:
        return _Members(source, MAKERS[kind], entry)
    return _Plain(source, entry)


class _Plain:
    """Bytes that are not compressed."""

    def __init__(self, source: Source, entry: Entry) -> None:
        self.entries = [entry]
        self._source = source

    def read(self) -> bytes:
        return self._source.read(OUTPUT_BYTES)


class _Gzip:
    """zlib's decompressor of a gzip member, with the interface of those of ``bz2`` and ``lzma``."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self._full = False

    def decompress(self, data: bytes, most: int) -> bytes:
        found = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        self._full = len(found) == most
        return found

    @property
    def needs_input(self) -> bool:
        return not (self._full or self._zlib.unconsumed_tail)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


MAKERS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


class _Members:
    """Members that a decompressor of Python's library reads."""

    def __init__(self, source: Source, make: Callable[[], Any], entry: Entry) -> None:
        self.entries: list[Entry] = []
        self._source, self._make = source, make
        self._read, self._made = entry  # bytes taken from the file, and given
        self._input = b""
        self._member: Any = None

    def read(self) -> bytes:
        while True:
            if self._member is None and not self._next_member():
                return b""
            data = b""
            if self._member.needs_input:
                data = self._input or self._more()
                self._input = b""
                if not data:
                    raise BadFileError("cut off: it ends within its compressed bytes")
            try:
                found: bytes = self._member.decompress(data, OUTPUT_BYTES)
            except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
                raise BadFileError(f"damaged: {error}") from error
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = None
            if found:
                self._made += len(found)
                return found

    def _more(self) -> bytes:
        data = self._source.read(INPUT_BYTES)
        self._read += len(data)
        return data

    def _next_member(self) -> bool:
        """Begin with the next member; False at the file's end. Zeros between members are padding."""
        while not (data := self._input.lstrip(b"\0")):
            self._input = self._more()
            if not self._input:
                return False
        self._input = data
        self.entries.append((self._read - len(data), self._made))
        self._member = self._make()
        return True


class Decompressed:
    """The bytes of a compressed file, by their places when decompressed. Goes on where it has ended; for
    what is before that it starts anew.

    Args:
        data: the file.
        kind: what it is compressed with.
        again: counts what is decompressed only to reach later bytes.
    """

    def __init__(self, data: FileBytes, kind: str, again: ReadAgain) -> None:
        self._data, self._kind, self._again = data, kind, again
        self._source: Any = None
        self._stream: Stream | None = None
        self._rest = b""
        self._at = 0

    def read(self, start: int, stop: int, entry: Entry = (0, 0)) -> bytes:
        """Bytes ``start`` to ``stop``; fewer at the file's end.

        Args:
            start: the first one.
            stop: behind the last one.
            entry: a member that begins at ``start`` or before.

        Raises:
            BadFileError: they cannot be decompressed.
        """
        if self._stream is None or not entry[1] <= self._at <= start:
            self.close()
            self._source = self._data.stream(entry[0])
            self._stream, self._at = open_stream(self._source, self._kind, entry), entry[1]
        self._again.add(start - self._at)
        parts = []
        while self._at < stop:
            self._rest = self._rest or self._stream.read()
            if not self._rest:
                break
            skipped = max(0, min(len(self._rest), start - self._at))
            part = self._rest[skipped : skipped + stop - max(self._at, start)]
            self._rest = self._rest[skipped + len(part) :]
            self._at += skipped + len(part)
            parts.append(part)
        return b"".join(parts)

    def finish(self) -> None:
        """Read to the end of the file, where checksums are."""
        while self._stream is not None and self._stream.read():
            pass

    def close(self) -> None:
        """Let go of the file."""
        if self._source is not None:
            self._source.close()
        self._source = self._stream = None
        self._rest = b""


class ReadAgain:
    """Bytes that the readers of a process decompressed only to reach later ones. Pickled, it is at 0."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return ReadAgain, ()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
