"""The bytes of files on servers, kept on a local disk in chunks if the user says so."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO

from trainpipes._internal.activity import count
from trainpipes._internal.locks import InterruptibleLock
from trainpipes.cache.kept_file import add_checksum, read_content
from trainpipes.errors import DataChangedError, known_name
from trainpipes.filesystems.request import Ranges, is_checked
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.interfaces.source import Place
from trainpipes.sources.files import file_bytes
from trainpipes.sources.files.file_bytes import KeptFiles
from trainpipes.sources.files.folders import reported
from trainpipes.sources.files.list_files import FileList

#: Bytes of a request at most, so that several connections share the work; ranges closer to each other than
#: the gap are fetched together: about the bytes that arrive in the time of a request.
PART_BYTES, GAP = 4 << 20, 64 << 10
#: Small files that are fetched by a single call.
AT_ONCE = 512
#: Bytes of a chunk on a local disk; how many of them threads may fetch at the same time, about.
CHUNK, LOCKS = 4 << 20, 256
_locks: dict[tuple[int, int], InterruptibleLock] = {}  # by process and chunk


def open_bytes(
    files: FileList, file: int, requests: Requests | None = None, in_memory: KeptFiles | None = None
) -> file_bytes.FileBytes:
    in_memory = in_memory or KeptFiles()
    if is_local(files.system(file)):
        listed = files.inode(file), files.stamps[file], int(files.sizes[file])
        return file_bytes.LocalBytes(files.paths[file], listed, file, in_memory)
    in_chunks = files.cache is not None and files.stamps[file]
    kind = CachedBytes if in_chunks else RemoteBytes
    return kind(files, file, requests or Requests(files.retry), in_memory)


class RemoteBytes(file_bytes.FileBytes):
    """The bytes of a file on a server, by requests of ranges."""

    def __init__(
        self, files: FileList, file: int, requests: Requests, in_memory: KeptFiles
    ) -> None:
        super().__init__(file, in_memory)
        self._system, self._path, self._requests = files.system(file), files.paths[file], requests
        self.name, self.version = files.names[file], files.stamps[file]
        size = int(files.sizes[file])
        if size < 0:
            size = requests.call(self._system, "size", self._path)
            if size is None:
                raise file_bytes.unreadable(
                    Place(self.name), "the server does not say how large it is"
                )
        self.size = size
        self.checked = is_checked(self._system, self.version)

    def read(self, ranges: Ranges) -> list[memoryview]:
        whole = self._kept.whole.get(self._file)
        if whole is not None:
            return [whole[start:stop] for start, stop in ranges]
        spans = file_bytes.merged([span for span in ranges if span[0] < span[1]], GAP)
        asked = [
            (start, min(start + PART_BYTES, stop))
            for first, stop in spans
            for start in range(first, stop, PART_BYTES)
        ]
        if not asked:
            return [memoryview(b"")] * len(ranges)
        try:
            about = self._system, self._path, asked, self.size, self.version
            parts, tries = self._requests.ranges(*about)
        except DataChangedError as error:
            how = self._change() or "it changed as it was read"
            raise file_bytes.changed(Place(self.name), how) from error
        if tries > 1:
            self._confirm()
        if asked == [(0, self.size)]:
            self._kept.keep(self._file, parts[0])
        starts = [start for start, _ in asked]
        return [file_bytes.cut(parts, starts, start, stop) for start, stop in ranges]

    def _confirm(self) -> None:
        """Raise if the file has been replaced, where replies do not tell."""
        if not self.checked and (how := self._change()):
            raise file_bytes.changed(Place(self.name), how)

    def _change(self) -> str:
        self._system.invalidate_cache()
        now = reported(self._requests.call(self._system, "info", self._path))
        if now.size is not None and now.size != self.size:
            return f"it had {self.size:,} bytes, and has {now.size:,}"
        if self.version and now.stamp != self.version:
            return "it has as many bytes as before, and others"
        return ""


class CachedBytes(RemoteBytes):
    """Chunks by URL, size and version, in a folder that processes share."""

    def __init__(
        self, files: FileList, file: int, requests: Requests, in_memory: KeptFiles
    ) -> None:
        super().__init__(files, file, requests, in_memory)
        assert files.cache is not None
        self._cache = files.cache
        about = f"{known_name(self.name)}\0{self.version}\0{self.size}"
        self._digest = hashlib.sha256(os.fsencode(about)).hexdigest()
        self._last: dict[int, memoryview] = {}  # the chunk that was read last

    def read(self, ranges: Ranges) -> list[memoryview]:
        numbers = {n for a, b in ranges if a < b for n in range(a // CHUNK, (b - 1) // CHUNK + 1)}
        chunks = dict(sorted(self._chunks(sorted(numbers)).items()))
        self._last = {n: chunks[n] for n in list(chunks)[-1:]}
        parts, starts = list(chunks.values()), [n * CHUNK for n in chunks]
        return [file_bytes.cut(parts, starts, start, stop) for start, stop in ranges]

    def _chunks(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        chunks = {n: self._last[n] for n in numbers if n in self._last}
        paths = {n: self._cache.path(f"{self._digest}-{n}") for n in numbers if n not in chunks}
        with ExitStack() as stack:
            for at in sorted({(os.getpid(), hash(path) % LOCKS) for path in paths.values()}):
                stack.enter_context(_locks.setdefault(at, InterruptibleLock()))
            for n, path in paths.items():
                if (data := read_content(path, partial(_belonging, self._mark(n)))) is not None:
                    chunks[n] = data
            missing = [n for n in paths if n not in chunks]
            count("chunks", len(paths))
            count("chunk hits", len(paths) - len(missing))
            if missing:
                spans = [(n * CHUNK, min((n + 1) * CHUNK, self.size)) for n in missing]
                chunks |= zip(missing, super().read(spans), strict=True)
                self._confirm()
                for n in missing:
                    if not self._cache.is_off(paths[n]):
                        self._cache.make(paths[n], partial(_fill, chunks[n], self._mark(n)))
        return chunks

    def _mark(self, number: int) -> bytes:
        return hashlib.sha256(f"{self._digest}-{number}".encode()).digest()


def _belonging(mark: bytes, content: Any) -> memoryview | None:
    """A chunk's bytes; None if the file holds another chunk."""
    view = memoryview(content)
    return view[: -len(mark)] if bytes(view[-len(mark) :]) == mark else None


def _fill(data: memoryview, mark: bytes, file: BinaryIO) -> None:
    """The bytes, and where they are from: their file and range."""
    file.write(data)
    file.write(mark)
    add_checksum(file)


def fetch_small(
    files: FileList, numbers: Sequence[int], in_memory: KeptFiles, requests: Requests, most: int
) -> None:
    """Have small remote files in memory, many by a single call, which takes half the time."""
    by_system: dict[int, list[int]] = {}
    for n in numbers if not all(map(is_local, files.systems)) else ():
        if 0 < files.sizes[n] <= in_memory.most and is_checked(files.system(n), files.stamps[n]):
            by_system.setdefault(int(files.system_of[n]), []).append(n)
    for some in by_system.values():
        for at in range(0, len(some), AT_ONCE):
            which = some[at : at + AT_ONCE]
            sizes = files.sizes[which].tolist()
            if sum(sizes) <= in_memory.left:
                wanted = [
                    (files.paths[n], (0, size), files.stamps[n], size)
                    for n, size in zip(which, sizes, strict=True)
                ]
                contents = requests.small_files(files.system(which[0]), wanted, most)
                for n, size, content in zip(which, sizes, contents, strict=True):
                    if isinstance(content, bytes) and len(content) == size:
                        in_memory.keep(n, content)
