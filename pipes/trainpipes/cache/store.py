"""Entries of a cache: made by one, read by all, of a number of bytes together over all processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trainpipes._internal.messages import warn_once
from trainpipes.cache.entries import LOCK, USED, make_room, path_of
from trainpipes.cache.kept_file import locked, make_file, open_file

#: What is left of the limit when entries were removed.
LEFT = 0.95
#: Seconds that a process waits for others to have kept an entry, before it goes on without keeping its own.
PATIENCE, TICK = 2.0, 0.002
#: After a failure to write, so many entries at most are not tried before the next one is.
MOST_UNTRIED = 256


class _NoRoomError(Exception):
    """An entry that is not kept."""


@dataclass(eq=False)
class Store:
    """A folder of entries of one kind.

    Args:
        most: bytes of them, or None; ``limit`` is the option's name.
        caller: whose they are, and ``cure`` how to keep them elsewhere.
    """

    root: Path
    kind: str
    most: int | None
    limit: str
    caller: str
    cure: str
    _failures: int = 0  # in a row
    _untried: int = 0
    _too_large: set[Path] = field(default_factory=set)

    def path(self, digest: str) -> Path:
        return path_of(self.root, self.kind, digest)

    def is_off(self, path: Path) -> bool:
        """Whether an entry is not worth another try: what fails, such as a full disk, may pass."""
        self._untried -= self._untried > 0
        return self._untried > 0 or path in self._too_large

    def make(self, path: Path, fill: Callable[[BinaryIO], None]) -> None:
        """Keep an entry, if there is room."""
        try:
            make_file(path, fill, room=partial(self._room, path))
            self._failures = 0
        except _NoRoomError:
            pass
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """Keep nothing for a while."""
        self._failures += 1
        self._untried = min(2**self._failures, MOST_UNTRIED)
        said = error.strerror or error
        warn_once(
            f"{self.caller}: {self.kind} cannot be kept in {self.root} ({said}); it goes on without the "
            f"cache until they can be kept. Make room there, or {self.cure}",
            ("off", self.kind, str(self.root)),
        )

    @contextmanager
    def _room(self, path: Path, size: int) -> Iterator[None]:
        """Have room for an entry. The bytes that are kept, at most, are noted beside them."""
        if self.most is None:
            yield
            return
        if size > self.most:
            self._too_large.add(path)
            warn_once(
                f"{self.caller}: {self.limit} must be at least the size of an entry, got {self.most:,}, and "
                f"one takes {size:,}: such entries are not kept; raise {self.limit}",
                ("too large", self.kind, str(self.root), self.most),
            )
            raise _NoRoomError
        below, used = self.root / self.kind, -1
        with locked(below / f"room{LOCK}", PATIENCE, TICK) as mine:
            if not mine:
                raise _NoRoomError
            with suppress(OSError, ValueError):
                used = int((below / f"room{USED}").read_text())
            if not 0 <= used <= self.most - size:
                used = make_room(self.root, int(LEFT * self.most) - size, self.kind)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_file(below / f"room{USED}", flags=flags), "w") as counter:
                counter.write(str(used + size))
            yield
