"""Local files that are mapped into memory, shared by all readers of a process; any thread may ask."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa

from trainpipes.kinds.source import Place
from trainpipes.sources.files.file_errors import check_unchanged
from trainpipes.sources.files.list_files import FileList

#: Files that stay mapped, at most.
MAPPED = 256


def mapped(path: str) -> pa.Buffer:
    """A local file's bytes, which stay mapped for as long as something refers to them."""
    with pa.memory_map(path) as opened:
        return opened.read_buffer()


class MappedFiles:
    """Local files that are mapped. Pickled, it is empty."""

    def __init__(self) -> None:
        self._buffers: dict[int, pa.Buffer] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), ()

    def buffer(self, files: FileList, file: int, place: Place) -> pa.Buffer:
        """A file's bytes, which are those that were listed: one that was written since is not touched."""
        check_unchanged(files, file, place)
        with self._lock:
            found = self._buffers.get(file)
            if found is None:
                found = self._buffers[file] = mapped(files.paths[file])
                while len(self._buffers) > MAPPED:
                    del self._buffers[next(iter(self._buffers))]
            return found
