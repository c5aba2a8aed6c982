"""The members of a tar archive, and the samples that they make: told by their headers, in one pass.

See POSIX pax for the format, and https://github.com/webdataset/webdataset for what a sample is: members that
follow each other and have one name up to the first dot. Called by any thread.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from trainpipes.sources.files.each_file import BadFileError

#: Bytes of a header, to which all else is rounded up.
BLOCK = 512
#: Bytes of a long name, at most.
MOST_NAME = 1 << 20
KEY = re.compile(r"^((?:.*/|)[^./][^./]*)\.([^/]*)$")


class Chunks(Protocol):
    """Bytes, some at a time."""

    def read(self) -> bytes: ...


@dataclass
class Samples:
    """The samples of an archive.

    Attributes:
        keys: of each sample.
        kinds: extensions of members, without the dot.
        counts: members of each sample.
        kind_of: which extension each member has.
        starts: where its content begins, decompressed.
        sizes: bytes of its content.
    """

    keys: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    kind_of: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Forward:
    """Bytes that are read from front to back.

    Args:
        chunks: gives the next ones; none at the end.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self.at = 0

    def take(self, size: int) -> bytes:
        """The next bytes; fewer at the end."""
        if len(self._rest) >= size:
            found, self._rest = bytes(self._rest[:size]), self._rest[size:]
            self.at += size
            return found
        parts = []
        while size:
            if not len(self._rest):
                self._rest = memoryview(self._chunks.read())
                if not len(self._rest):
                    break
            parts.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(parts[-1])
            self.at += len(parts[-1])
        return b"".join(parts)

    def skip(self, size: int) -> bool:
        """Pass over bytes; whether there are so many."""
        end = self.at + size
        while self.at < end:
            if not len(self._rest):
                self._rest = memoryview(self._chunks.read())
                if not len(self._rest):
                    return False
            step = min(end - self.at, len(self._rest))
            self._rest = self._rest[step:]
            self.at += step
        return True


class chunks_of:
    """Bytes that are in memory, or mapped, as those that are read; all at once.

    Args:
        content: the bytes.
    """

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read(self) -> bytes:
        found, self._content = self._content, memoryview(b"")
        return found  # type: ignore[return-value]


def read_samples(file: Forward) -> Samples:
    """The samples of an archive, in one pass.

    Raises:
        BadFileError: it is none, is cut short, or holds what it should not; says what.
    """
    found = Samples()
    kinds: dict[str, int] = {}
    last: dict[int, str] = {}  # extensions of the sample at hand
    for name, start, size in _members(file):
        match = KEY.match(name)
        base = name.rpartition("/")[2]
        if match is None or (base.startswith("__") and match[1].endswith("__")):
            continue  # without a name or an extension, or about the archive itself
        key, kind = match[1], match[2].lower()
        number = kinds.setdefault(kind, len(kinds))
        if not found.keys or found.keys[-1] != key:
            found.keys.append(key)
            found.counts.append(0)
            last = {}
        if number in last:
            raise BadFileError(
                f"sample {key!r} has two members with the extension {kind!r}, {last[number]!r} and {name!r}: "
                "give each a name of its own"
            )
        last[number] = name
        found.counts[-1] += 1
        found.kind_of.append(number)
        found.starts.append(start)
        found.sizes.append(size)
    found.kinds = list(kinds)
    return found


def _members(file: Forward) -> Iterator[tuple[str, int, int]]:
    """Regular files: name, where the content begins, and its size."""
    longer: dict[str, str] = {}  # what extended headers say of the next member
    while True:
        begin = file.at
        header = file.take(BLOCK)
        if len(header) < BLOCK:
            if not begin and not header:
                raise BadFileError("empty: 0 bytes")
            if not begin:
                raise BadFileError(f"not a tar archive (starts with {header[:16]!r})")
            raise BadFileError(f"cut short after {file.at:,} bytes: the mark of its end is missing")
        if not header.strip(b"\0"):
            if longer:
                raise BadFileError(f"damaged: at byte {begin:,} it ends where a member should be")
            _check_end(file)
            return
        size = _number(header[124:136])
        if not _has_checksum(header) or size < 0:
            if not begin:
                raise BadFileError(f"not a tar archive (starts with {header[:16]!r})")
            raise BadFileError(f"damaged: no header of a member at byte {begin:,}")
        kind = header[156:157]
        if kind in b"LKxg":
            content = _content(file, size)
            if kind == b"L":
                longer["path"] = _text(content.rstrip(b"\0"))
            elif kind == b"x":
                longer |= _pax(content)
            continue
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in longer):
            raise BadFileError(
                f"a sparse member at byte {begin:,}: write the archive without --sparse"
            )
        size = int(longer["size"]) if longer.get("size", "").isdigit() else size
        name = longer.get("path") or _name(header)
        longer = {}
        start = file.at
        regular = kind in (b"0", b"\0", b"7") and not name.endswith("/")
        if regular and _escapes(name):
            raise BadFileError(
                f"the member {name!r} would lie outside of the folder that the archive is unpacked in: "
                "write the archive with relative names"
            )
        stored = size if kind not in b"123456" else 0
        if not file.skip(-(-stored // BLOCK) * BLOCK):
            raise BadFileError(
                f"cut short: the member {name!r} at byte {begin:,} has {size:,} bytes, and there are "
                f"{file.at - start:,}"
            )
        if regular:
            yield name, start, size


def _check_end(file: Forward) -> None:
    """Raise unless only zeros follow."""
    while rest := file.take(1 << 16):
        if rest.strip(b"\0"):
            raise BadFileError(
                f"it goes on behind its end, at byte {file.at - len(rest):,}, as archives do that were put "
                "together by cat: list them one by one, or join them by tar --concatenate"
            )


def _content(file: Forward, size: int) -> bytes:
    if size > MOST_NAME:
        raise BadFileError(f"damaged: a name of {size:,} bytes at byte {file.at:,}")
    content = file.take(-(-size // BLOCK) * BLOCK)
    if len(content) < size:
        raise BadFileError(f"cut short after {file.at:,} bytes")
    return content[:size]


def _pax(content: bytes) -> dict[str, str]:
    """What an extended header says: records of "length key=value"."""
    found = {}
    while content:
        length_text = content.partition(b" ")[0]
        if not length_text.isdigit() or not 0 < int(length_text) <= len(content):
            raise BadFileError("damaged: an extended header cannot be understood")
        record = content[len(length_text) + 1 : int(length_text) - 1]
        key, _, value = record.partition(b"=")
        found[_text(key)] = _text(value)
        content = content[int(length_text) :]
    return found


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadFileError(f"the name of a member is not UTF-8: {content[:40]!r}") from error


def _number(content: bytes) -> int:
    if content[0] & 0x80:  # GNU's form for large ones
        return int.from_bytes(content[1:], "big") | (content[0] & 0x7F) << (8 * len(content) - 8)
    digits = content.split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return -1


def _has_checksum(header: bytes) -> bool:
    """Whether a header's checksum holds: the sum of all bytes, with spaces in the checksum's own place."""
    told = _number(header[148:156])
    # Adler-32 has that sum in its lower half, in a tenth of the time of sum().
    found = zlib.adler32(header[:148] + b" " * 8 + header[156:]) & 0xFFFF
    return told >= 0 and (told + 1) % 65521 == found


def _escapes(name: str) -> bool:
    """Whether a name leads out of the folder that an archive is unpacked in."""
    return name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or name[1:3] == ":\\"
