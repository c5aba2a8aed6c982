from __future__ import annotations

import hashlib
import os
import platform
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from trainpipes._internal.types import IntArray
from trainpipes.cache.kept_file import Store
from trainpipes.errors.text import kept_name, known_name
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files.ahead import PREFETCH_BYTES
from trainpipes.sources.files.folders import TAGS, Wanted

#: Digests in a fingerprint, at most.
MAX_DIGESTS = 16


@dataclass(frozen=True)
class Listed:
    """What one path, glob or folder of the user means: where it is, and which files."""

    url: str
    system: Any
    wanted: Wanted


@dataclass(eq=False)
class FileList:
    """Files in order, int64 ``[files]``: ``sizes`` (-1 unknown), ``stamps`` (time of change in ns, or etag),
    ``inodes`` (0 remote). Pickles hold credentials.
    """

    names: list[str] = field(repr=False)
    paths: list[str] = field(repr=False)
    sizes: IntArray
    system_of: IntArray
    systems: tuple[Any, ...]
    stamps: list[str]
    inodes: IntArray
    retry: Retry = NORMAL
    cache: Store | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    listed: tuple[Listed, ...] = ()
    #: The names below what was listed, which are the same wherever that stands.
    below: list[str] = field(default_factory=list, repr=False)
    _process: int = field(default_factory=os.getpid, repr=False)
    _machine: str = field(default_factory=platform.node, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def pick(self, index: IntArray) -> FileList:
        which = index.tolist()
        texts = ("names", "paths", "stamps", *(["below"] if self.below else []))
        chosen: dict[str, Any] = {name: [getattr(self, name)[i] for i in which] for name in texts}
        chosen |= {name: getattr(self, name)[index] for name in ("sizes", "system_of", "inodes")}
        return replace(self, **chosen)

    def local(self, which: Iterable[int]) -> list[int]:
        """Those that are on this machine."""
        here = [is_local(system) for system in self.systems]
        return [n for n in which if here[int(self.system_of[n])]]

    def inode(self, file: int) -> int:
        return int(self.inodes[file]) if self._machine == platform.node() else 0

    def system(self, file: int) -> Any:
        """A forked child makes its own file system: connections do not survive a fork."""
        if self._process != os.getpid():
            again = [
                type(system)(*system.storage_args, **system.storage_options)
                for system in self.systems
            ]
            self.systems = tuple(again)
            self._process = os.getpid()
        return self.systems[int(self.system_of[file])]

    def known_names(self) -> list[str]:
        """The names for a state: URLs without users and signatures."""
        names = list(map(known_name, self.names))
        if len(set(names)) == len(names):
            return names
        return self.kept_names()  # only what may be a secret tells them apart

    def kept_names(self) -> list[str]:
        """The names for files on this machine, without secrets of URLs."""
        return list(map(kept_name, self.names))

    def relative_names(self) -> list[str]:
        """Names below the lowest common folder, wherever that is."""
        parts = [name.split("://", 1)[-1].split("/") for name in self.known_names()]
        if not parts:
            return []
        alike = len(os.path.commonprefix(parts))  # noqa: RUF071  (of lists)
        shared = min(alike, *(len(p) - 1 for p in parts))
        return ["/".join(p[shared:]) for p in parts]

    def content(self, read: Sequence[str]) -> dict[str, Any]:
        """What a state knows of the files' content: what was ``read`` of it; where that is "", what the store
        calls it, which counts for the same URL only.
        """
        pairs = []
        for url, stamp, own in zip(self.known_names(), self.stamps, read, strict=True):
            tagged = stamp.partition("=")[0] in TAGS
            pairs.append(("read", own) if own else (url, stamp) if tagged else ("", ""))
        if not any(known for _, known in pairs):
            return {}
        by, known = zip(*pairs, strict=True)
        return {"content": {"by": digest(by), "of": digests(known)}}


def digest(lines: Sequence[str]) -> str:
    """36 bits of a SHA-256, as 6 characters: a state has up to 34 of them."""
    content = hashlib.sha256(os.fsencode("\n".join(lines))).digest()
    return urlsafe_b64encode(content).decode()[:6]


def digests(lines: Sequence[str]) -> list[str]:
    """Up to 16 digests, each of a contiguous group of lines."""
    edges = np.linspace(0, len(lines), min(MAX_DIGESTS, len(lines)) + 1).astype(int).tolist()
    return [digest(lines[a:b]) for a, b in pairwise(edges)]
