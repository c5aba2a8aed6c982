"""Opens a file for bytes, with its name, on this machine or on another; in any thread."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.file import RemoteFile
from trainpipes.sources.remote.retry import Requests

#: Bytes that are fetched at a time of a file on another machine.
BUFFER_BYTES = 256 << 10


def opened_file(files: FileList, file: int, size: int, requests: Requests) -> BinaryIO:
    """A file that can be read and sought in; ``name`` is its path or URL."""
    system, path = files.system(file), files.paths[file]
    if is_local(system):
        return open(path, "rb")
    remote: Any = RemoteFile(system, path, size, requests)
    remote.name = files.names[file]
    return io.BufferedReader(remote, BUFFER_BYTES)
