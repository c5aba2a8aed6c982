"""Remote bytes on a local disk, in chunks of 4 MiB by URL, size and version. Processes share the folder."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from trainpipes._internal.messages import warn_once
from trainpipes._internal.secrets import known_name
from trainpipes.engine.interrupts import InterruptibleLock
from trainpipes.sources.files.file_bytes import FileBytes, PartlyHere, RemoteBytes, cut
from trainpipes.sources.remote.request import Ranges
from trainpipes.storage.cache import CHUNK as SUFFIX
from trainpipes.storage.cache import make_room
from trainpipes.storage.caching.private_file import locked, make_file, open_file

log = logging.getLogger("trainpipes")

#: Where chunks are in the folder, among what else is kept there.
KIND = "bytes"
#: Bytes of a chunk; of its checksum.
CHUNK, CHECK = 4 << 20, 4
#: What is left of the limit when chunks were removed.
LEFT = 0.95
#: Seconds that a process waits for others to have kept a chunk, before it goes on without keeping its own.
PATIENCE, TICK = 2.0, 0.002

#: Chunks that threads may fetch at the same time, about.
LOCKS = 256
_locks: dict[tuple[int, int], InterruptibleLock] = {}  # by process and chunk
_full: set[str] = set()  # folders that could not be written


@dataclass(frozen=True)
class DiskCache:
    """A folder of chunks of ``most`` bytes together."""

    folder: str
    most: int

    def keeping(self, source: RemoteBytes) -> FileBytes:
        return CachedBytes(source, self) if source.version else source

    def path(self, digest: str, chunk: int) -> Path:
        return Path(self.folder, KIND, digest[:2], f"{digest[2:]}-{chunk}{SUFFIX}")

    def get(self, path: Path, size: int) -> memoryview | None:
        """A chunk of so many bytes; None if it is not here, or damaged."""
        try:
            with open(open_file(path), "rb", buffering=0) as file:
                content = memoryview(file.readall())
            os.utime(path)  # it was used now
        except OSError:
            return None
        data, check = content[:-CHECK], content[-CHECK:]
        if len(data) == size and zlib.crc32(data).to_bytes(CHECK, "little") == check:
            return data
        log.warning("%s is damaged, and is fetched again", path)
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, path: Path, data: memoryview) -> None:
        size = len(data) + CHECK
        if size > self.most or self.folder in _full:
            return

        def fill(handle: int) -> None:
            with os.fdopen(handle, "wb", closefd=False) as file:
                file.writelines([data, zlib.crc32(data).to_bytes(CHECK, "little")])

        try:
            with locked(Path(self.folder, KIND, "lock"), PATIENCE, TICK) as mine:
                if mine:
                    used = self._used()
                    if not 0 <= used <= self.most - size:
                        used = make_room(Path(self.folder), int(LEFT * self.most) - size, KIND)
                    self._counter.write_text(str(used + size))
                    make_file(path, fill)
        except OSError as error:
            _full.add(self.folder)
            warn_once(
                f"list_files(cache_dir={self.folder!r}): nothing more can be kept there ({error}); bytes are "
                "fetched each time they are needed",
                ("bytes", self.folder),
            )

    @property
    def _counter(self) -> Path:
        return Path(self.folder, KIND, "used")

    def _used(self) -> int:
        """Bytes that are kept, at most; -1 if that is not known."""
        try:
            return int(self._counter.read_text())
        except (OSError, ValueError):
            return -1


class CachedBytes(PartlyHere):
    _source: RemoteBytes

    def __init__(self, source: RemoteBytes, cache: DiskCache) -> None:
        super().__init__(source)
        self._cache = cache
        about = f"{known_name(source.name)}\0{source.version}\0{source.size}"
        self._digest = hashlib.sha256(os.fsencode(about)).hexdigest()
        self._last: dict[int, memoryview] = {}  # the chunk that was read last

    def read(self, ranges: Ranges) -> list[memoryview]:
        numbers = {n for a, b in ranges if a < b for n in range(a // CHUNK, (b - 1) // CHUNK + 1)}
        chunks = dict(sorted(self._chunks(sorted(numbers)).items()))
        self._last = {n: chunks[n] for n in list(chunks)[-1:]}
        parts, starts = list(chunks.values()), [n * CHUNK for n in chunks]
        return [cut(parts, starts, start, stop) for start, stop in ranges]

    def _chunks(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        found = {n: self._last[n] for n in numbers if n in self._last}
        paths = {n: self._cache.path(self._digest, n) for n in numbers if n not in found}
        size = {n: min(CHUNK, self.size - n * CHUNK) for n in paths}
        with ExitStack() as stack:
            for at in sorted({(os.getpid(), hash(path) % LOCKS) for path in paths.values()}):
                stack.enter_context(_locks.setdefault(at, InterruptibleLock()))
            for n, path in paths.items():
                if (data := self._cache.get(path, size[n])) is not None:
                    found[n] = data
            missing = [n for n in paths if n not in found]
            if missing:
                spans = [(n * CHUNK, n * CHUNK + size[n]) for n in missing]
                fetched = self._source.read(spans)
                self._source.confirm()
                for n, data in zip(missing, fetched, strict=True):
                    self._cache.put(paths[n], data)
                    found[n] = data
        return found
