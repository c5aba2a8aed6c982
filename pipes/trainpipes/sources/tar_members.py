"""A tar archive's members, by their headers. Consecutive members with the same name up to the first dot are a
sample (https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trainpipes.errors import UnreachableError, UnreadableError
from trainpipes.sources.compressed import Forward
from trainpipes.sources.files.formats import BadFileError, one_line
from trainpipes.sources.files.index_store import Scan
from trainpipes.sources.files.list_files import FileList

#: Bytes of a header, to which all else is rounded up.
BLOCK = 512
#: Bytes of a name and other metadata of a member, at most.
MOST_NAME = 1 << 20
#: Bytes of a name that has room in a header.
LONG_NAME = 100
#: Zeros that end an archive, at most; of more, members may lie between.
MOST_PADDING = 1 << 20
KEY = re.compile(r"^((?:.*/|)[^./][^./]*)\.([^/]*)$")


class Archive(Forward):
    """A tar archive as ``tarfile`` reads it; ``content`` is a checksum of both ends of each member."""

    last, content = b"", 0

    def tell(self) -> int:
        return self.at

    def read(self, size: int) -> bytes:
        if size > MOST_NAME:
            raise BadFileError(f"damaged: a name of {size:,} bytes at byte {self.at:,}")
        self.last = self.take(size)
        return self.last

    def seek(self, at: int) -> None:
        if at < self.at:
            raise BadFileError(f"damaged: a member of less than no bytes at byte {self.at:,}")
        first = self.take(min(at - self.at, BLOCK))
        self.skip(max(0, at - self.at - BLOCK))
        self.content = zlib.crc32(self.take(at - self.at), zlib.crc32(first, self.content))


def samples_of(members: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Samples of members (name, place, size): ``keys``, ``counts``; ``kinds``, extensions; of members
    ``kind_of``, ``starts``, ``sizes``.
    """
    keys: list[str] = []
    counts: list[int] = []
    kinds: dict[str, int] = {}
    last: dict[str, str] = {}  # names of the sample at hand by their extensions
    placed: list[tuple[int, int, int]] = []
    for name, start, size in members:
        match = KEY.match(name)
        base = name.rpartition("/")[2]
        if match is None or (base.startswith("__") and match[1].endswith("__")):
            continue  # without a name or an extension, or about the archive itself
        key, kind = match[1], match[2].lower()
        if not keys or keys[-1] != key:
            keys.append(key)
            counts.append(0)
            last = {}
        if kind == "__key__":
            raise BadFileError(
                f"the member {name!r} has the extension '__key__', which is the column of samples' names: "
                "give it another"
            )
        if kind in last:
            raise BadFileError(
                f"sample {key!r} has two members with the extension {kind!r}, {last[kind]!r} and {name!r}: "
                "give each a name of its own"
            )
        last[kind] = name
        counts[-1] += 1
        placed.append((kinds.setdefault(kind, len(kinds)), start, size))
    columns = np.array(placed, dtype=np.int64).reshape(-1, 3).T
    numbers = zip(("kind_of", "starts", "sizes"), np.ascontiguousarray(columns), strict=True)
    return {
        "keys": keys,
        "kinds": list(kinds),
        "counts": np.array(counts, np.int64),
        **dict(numbers),
    }


def members_of(file: Archive) -> Iterator[tuple[str, int, int]]:
    """Regular files of an archive: name, first byte and size."""
    stream: Any = file
    archive: Any  # whose members are no public name
    try:
        # Names of users need not be UTF-8.
        archive = tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="surrogateescape")
        while (member := archive.next()) is not None:
            archive.members = []  # else it keeps them all
            if member.sparse is not None:
                raise BadFileError(
                    f"a sparse member at byte {member.offset:,}: write the archive without --sparse"
                )
            if member.islnk():
                way = "write the archive with --hard-dereference"
                raise BadFileError(
                    f"a hard link in place of a file at byte {member.offset:,}: {way}"
                )
            if member.size < 0:
                raise BadFileError(f"damaged: no header of a member at byte {member.offset:,}")
            if member.isreg():
                try:
                    member.name.encode()
                except UnicodeEncodeError as error:
                    said = f"the name of a member is not UTF-8: {member.name[:40]!r}"
                    raise BadFileError(said) from error
                yield member.name, member.offset_data, member.size
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        said = "cut short" if "end of data" in str(error) else "damaged"
        said += f" at byte {file.at:,}: {one_line(error)}"
        if file.at <= BLOCK:
            begins = f"not a tar archive (starts with {file.last[:16]!r})"
            said = begins if file.last else "empty: 0 bytes"
        raise BadFileError(said) from error
    # What was read last is the mark of an archive's end, and only zeros follow.
    if len(file.last) < BLOCK:
        raise BadFileError(f"cut short after {file.at:,} bytes: the mark of its end is missing")
    if file.last.strip(b"\0"):
        begin = file.at - len(file.last)
        raise BadFileError(f"damaged: no header of a member at byte {begin:,}")
    while rest := file.take(1 << 16):
        if rest.strip(b"\0"):
            raise BadFileError(
                f"it goes on behind its end, at byte {file.at - len(rest):,}, as archives do that were put "
                "together by cat: list them one by one, or join them by tar --concatenate"
            )


def members_of_index(text: str, size: int) -> list[tuple[str, int, int]] | None:
    """The members by an index of ``wds2idx`` (DALI); None if it cannot be relied on."""
    head, *lines = text.splitlines() or [""]
    if head.split() != ["v1.2", str(len(lines))]:
        return None
    words = " ".join(lines).split(" ")
    try:
        rows = zip(*[iter(words)] * 4, strict=True)
        members = [(kind, name, int(start), int(length)) for kind, start, length, name in rows]
    except ValueError:  # a name has spaces
        return None
    for kind, name, start, length in members:
        inside = start >= BLOCK and 0 <= length <= size - start
        # A longer name has a header of its own, which some programs take for the member's.
        if not inside or not name.endswith(f".{kind}") or len(name.encode()) > LONG_NAME:
            return None
    return [(name, start, length) for _, name, start, length in members]


def is_header(header: bytes, size: int) -> bool:
    """Whether a block is the header of a member of that size, by its checksum: old ones have no mark."""
    checksum = header[148:156].strip(b"\0 ")
    others = np.frombuffer(header[:148] + b" " * 8 + header[156:], np.uint8)
    sums = int(others.sum()), int(others.view(np.int8).sum())  # some programs added signed bytes
    if len(header) < BLOCK or not checksum.isdigit() or int(checksum, 8) not in sums:
        return False
    reported = header[124:136].strip(b"\0 ")
    if not reported.isdigit() or size >= 8**11:
        return True
    return int(reported, 8) in (size, 0)  # 0 where a header before it says the size


def beside(files: FileList, job: Scan) -> dict[str, Any] | None:
    file, path, data = job.file, files.paths[job.file], job.data
    if not path.endswith(".tar") or not data.size:
        return None
    try:
        beside = f"{path.removesuffix('.tar')}.idx"
        content: bytes = job.requests.call(files.system(file), "cat_file", beside)
        members = members_of_index(content.decode(), data.size)
    except (OSError, UnreachableError, UnreadableError, UnicodeDecodeError):
        return None
    if not members:
        return None
    _, first, first_size = members[0]
    _, last, last_size = max(members, key=lambda member: member[1])
    end = last + -(-last_size // BLOCK) * BLOCK
    if data.size - end > MOST_PADDING:
        return None
    parts = [(first - BLOCK, first), (last - BLOCK, last), (min(end, data.size), data.size)]
    header, next_header, rest = map(bytes, data.read(parts))
    fits = (
        is_header(header, first_size)
        and is_header(next_header, last_size)
        and not rest.strip(b"\0")
    )
    return samples_of(members) if fits else None
