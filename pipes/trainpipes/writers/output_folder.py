"""A folder of whole files, and of a manifest that says what they hold; on this machine, or at a URL.

A file is made apart and put in its place when it is whole (``storage``). After each one, ``_unfinished.json``
says which there are and where the rows go on; at the end ``_manifest.json`` takes its place. So a process
that is killed at any moment leaves whole files, and the next one goes on after them. One process at a time
writes to a folder; on this machine, a lock sees to that.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from trainpipes.checks import flag
from trainpipes.errors import (
    ConfigError,
    DataChangedError,
    StateError,
    UnreachableError,
    UnreadableError,
)
from trainpipes.identity import check_identity, first_difference, said
from trainpipes.writers.output_file import OutputFile, writing
from trainpipes.writers.storage import PART, LocalStorage, Storage, storage_at

__all__ = ["MANIFEST", "PART", "UNFINISHED", "Opened", "OutputFolder", "Written", "check_bytes"]

MANIFEST, UNFINISHED = "_manifest.json", "_unfinished.json"
#: The number of the manifest's form.
FORM = 1


@dataclass(frozen=True)
class Written:
    """The files that a pipeline was written to.

    Attributes:
        folder: where.
        files: paths of the files, in the order of the rows.
        rows: how many there are in all.
    """

    folder: str
    files: tuple[str, ...]
    rows: int

    def verify(self) -> None:
        """Compare all files with the manifest's checksums: 1 to 3 GB/s.

        Raises:
            DataChangedError: one has changed since it was written.
        """
        storage = self._at()
        check_bytes(storage, _read(storage, MANIFEST)["files"])

    def _at(self) -> Storage:
        return storage_at(self.folder, "verify")


@dataclass(frozen=True)
class Opened:
    """What of a folder has been written.

    Attributes:
        written: what is in it, if it is finished.
        files: files that are whole, as the manifest has them.
        next: cursor of the rows after them; None at the start.
        notes: kept beside the cursor.
        columns: names and types of the columns; None before the first file.
    """

    written: Written | None
    files: list[dict[str, Any]]
    next: dict[str, Any] | None
    notes: dict[str, Any]
    columns: dict[str, str] | None


class OutputFolder:
    """A folder that one process writes to.

    Args:
        path: of this machine, made if it is not there; or a URL.
        asker: who writes.
        about: what is written, of JSON types: its entry "pipeline" as states have it, "options", and
            "inputs" as ``about_inputs`` has them, where there are files.
        overwrite: whether what was written there before, of whatever pipeline, is removed.
        storage: of the folder, where the asker writes to URLs, too.

    Raises:
        ConfigError: the folder holds something else, another process writes to it, or it cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        asker: str,
        about: dict[str, Any],
        overwrite: bool,
        storage: Storage | None = None,
    ) -> None:
        flag(overwrite, f"{asker}(overwrite)")
        self.storage = storage or storage_at(path, asker, urls=False)
        self.path = Path(self.storage.root)  # where it is local
        self._asker = asker
        self._about = about
        self._overwrite = overwrite
        self._handle: int | None = None
        self._new: list[Path] = []  # folders that were made
        self._nothing = False  # whether nothing is there but the note that it was begun

    def __enter__(self) -> OutputFolder:
        if not isinstance(self.storage, LocalStorage):
            return self
        with writing(self.path, self._asker):
            missing = (place for place in (self.path, *self.path.parents) if not place.exists())
            self._new = list(missing)
            self.path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDONLY)
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._handle)
            raise ConfigError(
                f"{self._asker}(): another process writes to {self._root}: let one process write, one rank "
                "of several, or give each a folder of its own",
                path=self._root,
            ) from error
        except (ImportError, OSError):
            pass  # a file system without locks
        return self

    def __exit__(self, *_: object) -> None:
        if self._nothing:
            with suppress(OSError, ConfigError):
                if self.storage.names() == [UNFINISHED]:
                    self.storage.remove(UNFINISHED)
        with suppress(OSError):  # they hold something
            for folder in self._new:
                folder.rmdir()
        if self._handle is not None:
            os.close(self._handle)

    def open(self) -> Opened:
        """What has been written so far; nothing if the folder is empty, or if its files may be replaced."""
        names = self.storage.names()
        found = next((name for name in (MANIFEST, UNFINISHED) if name in names), None)
        if found is None:
            if any(not name.startswith(PART) for name in names):
                raise ConfigError(
                    f"{self._asker}(): {self._root} holds files that no writer has written: give a folder "
                    "that is empty, or not there yet",
                    path=self._root,
                )
            return self._started()
        state = _read(self.storage, found)
        nothing = found == UNFINISHED and not state["files"] and not state.get("notes")
        if self._overwrite or nothing:
            self._remove(state, names)
            return self._started()
        self._check_same(state)
        sizes = self.storage.sizes()
        for entry in state["files"]:
            self._check_there(entry, sizes)
        self.sweep()
        if found == MANIFEST:
            self._remove_unfinished()
        files = tuple(self.storage.at(entry["file"]) for entry in state["files"])
        written = Written(self._root, files, state["rows"]) if found == MANIFEST else None
        return Opened(
            written,
            state["files"],
            state.get("next"),
            state.get("notes", {}),
            state.get("columns"),
        )

    @property
    def _root(self) -> str:
        return self.storage.root

    def _started(self) -> Opened:
        self.sweep()
        self.save(Opened(None, [], None, {}, None))
        return Opened(None, [], None, {}, None)

    def sweep(self) -> None:
        """Remove the parts of files that killed processes left behind."""
        for name in self.storage.names():
            if name.startswith(PART):
                self.storage.remove(name)

    def _remove(self, state: dict[str, Any], names: Sequence[str]) -> None:
        """Remove all that was written: the manifest first, which says that the files are there."""
        if MANIFEST in names:
            with self.file(UNFINISHED) as file:  # what was written, and not what is to be
                file.write(json.dumps(state).encode())
            self.storage.remove(MANIFEST)
        for entry in state["files"]:
            self.storage.remove(Path(entry["file"]).name)

    def _check_same(self, state: dict[str, Any]) -> None:
        way_out = (
            "write the same pipeline with the same options, give another folder, or overwrite=True"
        )
        mine = json.loads(json.dumps(self._about))
        found = first_difference(state.get("options"), mine["options"])
        if found is not None:
            raise ConfigError(
                f"{self._root} holds files that {self._asker}() wrote with {found[0]}: {said(found[1])}, now "
                f"{said(found[2])}; {way_out}",
                path=self._root,
            )
        try:
            check_identity(json.dumps(state.get("pipeline")), json.dumps(mine["pipeline"]))
        except StateError as error:
            raise ConfigError(
                f"{self._root} holds the rows of another pipeline, {str(error).split('; ')[0]}; {way_out}",
                path=self._root,
            ) from error
        before, now = state.get("inputs"), mine.get("inputs")
        if before is not None and now is not None and before != now:  # earlier versions kept none
            raise DataChangedError(
                f"{self._asker}(): the input was changed, as its files' times or etags say, since "
                f"{self._root} was begun (a copy counts as changed, too): begin anew with overwrite=True",
                path=self._root,
            )

    def _check_there(self, entry: dict[str, Any], sizes: Mapping[str, int]) -> None:
        path, size = self.storage.at(entry["file"]), sizes.get(entry["file"])
        if size is None:
            raise _changed(path, os.strerror(errno.ENOENT))
        if size != entry["bytes"]:
            raise _changed(path, f"it has {size:,} bytes, and {entry['bytes']:,} were written")

    @contextmanager
    def file(self, name: str) -> Iterator[OutputFile]:
        """A file to be written; it gets its name when it is whole, and is gone if something fails."""
        with self.storage.making(name) as made:
            file = OutputFile(made, self._asker)
            try:
                yield file
                file.sync()
            finally:
                file.close()
            self.storage.put(made, name)

    def save(self, state: Opened) -> None:
        """Record what has been written so far."""
        self._put(UNFINISHED, state)
        self._nothing = not state.files and not state.notes

    def finish(
        self,
        files: list[dict[str, Any]],
        columns: dict[str, str],
        notes: dict[str, Any] | None = None,
    ) -> Written:
        """Record that everything has been written, and what is to be known of it."""
        rows = self._put(MANIFEST, Opened(None, files, None, notes or {}, columns))
        self._nothing = False
        self._remove_unfinished()
        return Written(self._root, tuple(self.storage.at(e["file"]) for e in files), rows)

    def _remove_unfinished(self) -> None:
        self.storage.remove(UNFINISHED)

    def _put(self, name: str, state: Opened) -> int:
        rows = sum(int(entry["rows"]) for entry in state.files)
        content: dict[str, Any] = {"trainpipes_files": FORM, "rows": rows, "columns": state.columns}
        content |= {"files": state.files, **self._about}
        if name == UNFINISHED:
            content["next"] = state.next
        if name == UNFINISHED or state.notes:
            content["notes"] = state.notes
        with self.file(name) as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())
        return rows


def check_bytes(folder: Path | Storage, files: Sequence[Mapping[str, Any]]) -> None:
    """Compare files with their checksums.

    Args:
        folder: that they are in.
        files: as the manifest has them.

    Raises:
        DataChangedError: one has changed since it was written.
    """
    storage = LocalStorage(str(folder), "verify") if isinstance(folder, Path) else folder
    for entry in files:
        path, check = storage.at(entry["file"]), 0
        with _reading(path):
            for block in storage.read(entry["file"]):
                check = crc32(block, check)
        if f"{check:08x}" != entry["crc32"]:
            raise _changed(path, "its bytes are not those that were written")


def _read(storage: Storage, name: str) -> dict[str, Any]:
    path = storage.at(name)
    try:
        found = json.loads(b"".join(storage.read(name)))
        good = found["trainpipes_files"] == FORM and all(
            {"file", "rows", "bytes", "crc32"} <= entry.keys() for entry in found["files"]
        )
    except UnreachableError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_manifest(path) from error
    if not good:
        raise _no_manifest(path)
    return dict(found)


def _no_manifest(path: str) -> UnreadableError:
    return UnreadableError(
        f"{path} is damaged, or of a newer version: remove the folder and write it anew",
        path=path,
    )


def _changed(path: str, how: str) -> DataChangedError:
    return DataChangedError(
        f"{path} is not as it was written: {how}; write it anew with overwrite=True", path=path
    )


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except UnreachableError:
        raise
    except OSError as error:
        raise _changed(path, str(error.strerror or error)) from error
