"""The bytes of a tokenizer's file: read again in every process, and the same each time."""

from __future__ import annotations

import hashlib
import os

import fsspec

from trainpipes._internal.clean_errors import clean
from trainpipes.errors import DataChangedError, UnreachableError, UnreadableError
from trainpipes.sources.remote.retry import Requests


def digest(content: bytes) -> str:
    """A short name for a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()[:32]}"


class File:
    """A file that must stay what it is while a pipeline uses it.

    Args:
        path: local path, or any fsspec URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._digest: str | None = None
        self._carried: bytes | None = None
        self._beside: dict[str, bytes | None] = {}

    def carry(self, *beside: str) -> None:
        """Take the content along when this is pickled, and that of files beside it, for a machine that has
        nothing at the path."""
        self._carried = self.read()
        for name in beside:
            self.beside(name)

    def read(self) -> bytes:
        """The content.

        Raises:
            UnreadableError: the file cannot be read.
            UnreachableError: its server does not answer, or denies access.
            DataChangedError: it holds something else than when it was first read.
        """
        try:
            content = self._content()
        except UnreachableError:
            raise
        except Exception as error:
            raise UnreadableError(
                f"{self.path} cannot be read: {error}; tokenizers are read by every process that "
                "tokenizes, so it must be there for all of them",
                path=self.path,
            ) from clean(error)
        found = digest(content)
        if self._digest is not None and self._digest != found:
            raise DataChangedError(
                f"{self.path} is no longer what this pipeline first read, so that its processes "
                "would not tokenize alike; put it back, or build the pipeline anew",
                path=self.path,
            )
        self._digest = found
        return content

    def _content(self) -> bytes:
        if self._carried is not None:
            return self._carried
        if "://" in self.path:
            system, path = fsspec.url_to_fs(self.path)
            return bytes(Requests().call(system, "cat_file", path))
        with open(self.path, "rb") as file:
            return file.read()

    def beside(self, name: str) -> bytes | None:
        """The content of a file in the same local directory, as it was first read; None if there is none."""
        if name not in self._beside:
            self._beside[name] = self._read_beside(name)
        return self._beside[name]

    def _read_beside(self, name: str) -> bytes | None:
        if "://" in self.path:
            return None
        path = os.path.join(os.path.dirname(self.path), name)
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return file.read()
