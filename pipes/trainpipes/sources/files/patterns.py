from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from trainpipes.errors import ConfigError

log = logging.getLogger("trainpipes")

#: Of a folder that is written: what appears last, the folder of what is not finished, and names of its files.
MANIFEST, WORK = "_manifest.json", "_unfinished"
OURS = re.compile(r"part-\d{5,}\.[\w.]+")
#: Where a name is that is below a folder that is meant as a whole.
BELOW = -1


def hidden(name: str) -> bool:
    """Whether a name says that it is no data: ``.cache``, ``_SUCCESS``, ``_delta_log``; not the partition
    ``_lang=en``.
    """
    return (
        name.startswith(".") or (name.startswith("_") and "=" not in name) or name == "lost+found"
    )


def check_outputs(folder: str, files: Iterable[str], marks: Collection[str]) -> None:
    placed = [file.rpartition("/") for file in files]
    counts = {place for place, _, _ in placed}
    written = Counter(place for place, _, name in placed if OURS.fullmatch(name))
    unfinished = {place for place in written if f"{place}/{WORK}" in marks}
    outputs = unfinished | {place for place in written if f"{place}/{MANIFEST}" in marks}
    inner = sorted(outputs - {folder.rstrip("/")})
    if inner and outputs < counts and folder.rstrip("/") not in outputs:
        raise ConfigError(
            f"list_files: below the folder {folder} are files, and output of trainpipes in {inner[0]}: list "
            "the one that is meant, such as the files by a glob, or both in a list",
            path=folder,
        )
    for place in sorted(unfinished):
        log.warning(
            "%s is not finished: %d files are there so far; its writer is at work, or was killed and makes "
            "the rest when it is called again",
            place,
            written[place],
        )


def wild(path: str) -> str:
    return "*" if path.startswith(("http://", "https://")) else "*?["


@lru_cache
def has_magic(path: str) -> bool:
    return any(c in path for c in wild(path))


def names_in(path: str) -> list[str]:
    path = path.strip("/")
    return path.split("/") if path else []


@dataclass(frozen=True)
class Wanted:
    """The files of a folder (without ``parts``) or a pattern, by the parts matched so far.

    >>> pattern = Wanted("d", ("*.txt",), (".txt",))
    >>> [pattern.stands_for(path) for path in ("d/a.txt", "d/out/a.txt", "d/out.txt/a.txt")]
    [True, False, True]
    """

    root: str
    parts: tuple[str, ...]
    suffixes: tuple[str, ...]

    def start(self) -> frozenset[int]:
        return self._without_folders({0})

    def after(self, reached: frozenset[int], name: str) -> frozenset[int]:
        found: set[int] = set()
        for n in reached:
            part = self.parts[n] if 0 <= n < len(self.parts) else None
            if part is not None and part != "**":
                found |= {n + 1} if _fits(name, part) else set()
            elif not hidden(name):
                found |= {BELOW} if part is None else {n, n + 1}
        return self._without_folders(found)

    def _without_folders(self, reached: set[int]) -> frozenset[int]:
        """Also what follows a ``**``, which may stand for no folder."""
        for n, part in enumerate(self.parts[:-1]):
            if n in reached and part == "**":
                reached.add(n + 1)
        return frozenset(reached)

    def is_whole(self, reached: frozenset[int]) -> bool:
        return len(self.parts) in reached and self.parts[-1:] != ("**",)

    def all_below(self, reached: frozenset[int]) -> bool:
        return any(n in (BELOW, len(self.parts)) or self.parts[n] == "**" for n in reached)

    def holds(self, reached: frozenset[int], path: str) -> bool:
        return len(self.parts) in reached or (
            BELOW in reached and path.lower().endswith(self.suffixes)
        )

    def stands_for(self, path: str) -> bool:
        names, root = names_in(path), names_in(self.root)
        if names[: len(root)] != root or len(names) == len(root):
            return False
        reached = self.start()
        for name in names[len(root) :]:
            reached = self.after(reached, name)
        return self.holds(reached, path)


def _fits(name: str, part: str) -> bool:
    if not has_magic(part):
        return name == part
    return fnmatchcase(name, part) and (part[0] in "._" or not hidden(name))
