"""A folder of whole files, and of a manifest that says what they hold; on this machine, or at a URL.

A file is made apart and put in its place when it is whole (``storage``), and then noted; at the end
``_manifest.json`` appears (``manifest``). So a process that is killed at any moment leaves whole files, and
the next one goes on after them.

On this machine a note is a line at the end of a journal, flushed to the disk. At a URL, where stores of
objects cannot append, all of ``_unfinished.json`` is sent anew, so seldom that it takes a twentieth of the
time at most: files that became whole since the last time are made again after a kill. Either way the cost
grows with the number of files, and not with its square.

One process at a time writes to a folder; on this machine, a lock sees to that. A store of objects has none.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import flag
from trainpipes.errors import (
    ConfigError,
    DataChangedError,
    StateError,
    TrainpipesError,
    UnreachableError,
)
from trainpipes.state.identity import check_identity, first_difference, said
from trainpipes.storage.output_file import OutputFile, writing
from trainpipes.storage.writers.manifest import (
    FORM,
    JOURNAL,
    MANIFEST,
    UNFINISHED,
    Opened,
    Written,
    check_there,
    opened_of,
    read_manifest,
)
from trainpipes.storage.writers.storage import PART, LocalStorage, Storage

#: Seconds between two notes at a URL, and how many times longer than a note takes they are at least.
EVERY = 1.0
PATIENCE = 20
#: Names that writers give to files.
OURS = re.compile(r"part-\d{5,}\.(parquet|arrow|bin|jsonl(\.\w+)?)")


class OutputFolder:
    """A folder that one process writes to.

    Args:
        storage: the folder; on this machine it is made if it is not there.
        asker: who writes.
        about: what is written, of JSON types: its entry "pipeline" as states have it, "options", and
            "inputs" as ``about_inputs`` has them, where there are files.
        overwrite: whether what was written there before, of whatever pipeline, is removed.

    Raises:
        ConfigError: the folder holds something else, another process writes to it, or it cannot be written.
    """

    def __init__(
        self, storage: Storage, asker: str, about: dict[str, Any], overwrite: bool
    ) -> None:
        self.storage = storage
        self.name = storage.root.rpartition("/")[2]
        self._asker = asker
        self._about = about
        self._overwrite = flag(overwrite, f"{asker}(overwrite)")
        self._local = isinstance(storage, LocalStorage)
        self._handle: int | None = None
        self._new: list[Path] = []  # folders that were made
        self._state = Opened()
        self._begun = False  # whether ``_unfinished.json`` is there
        self._journal: str | None = None
        self._pending: list[dict[str, Any]] = []  # lines of files that are not noted yet
        self._noted, self._wait = time.monotonic(), EVERY

    def __enter__(self) -> OutputFolder:
        if not self._local:
            return self
        path = Path(self._root)
        with writing(path, self._asker):
            missing = (place for place in (path, *path.parents) if not place.exists())
            self._new = list(missing)
            path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDONLY)
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._begun and not _is_gone(error):
            with suppress(OSError, TrainpipesError):
                if self._pending:
                    self._flush()
                if not self._holds_work and self.storage.names() == [UNFINISHED]:
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
        about = read_manifest(self.storage, found)
        self._state = opened_of(self.storage, about, names)
        if self._overwrite or (found == UNFINISHED and not self._holds_work):
            self._remove(about, names)
            return self._started()
        self._check_same(about)
        check_there(self.storage, self._state.files)
        opened = self._state
        if found == UNFINISHED:
            self.save(opened)
            self.sweep()
            return opened
        for name in names:
            if name.startswith(PART):
                self.storage.remove(name)
        self._remove_notes(names)
        return replace(opened, written=self._written(opened.files, about["rows"]))

    @property
    def _root(self) -> str:
        return self.storage.root

    @property
    def _holds_work(self) -> bool:
        """Whether there is something to go on with."""
        return bool(self._state.files or self._state.notes)

    def _written(self, files: Sequence[Mapping[str, Any]], rows: int) -> Written:
        paths = tuple(self.storage.at(entry["file"]) for entry in files)
        return Written(self._root, paths, rows, _storage=self.storage)

    def _started(self) -> Opened:
        self.save(Opened())
        self.sweep()
        return Opened()

    def sweep(self) -> None:
        """Remove what killed processes left behind: parts of files, and files that nobody has noted."""
        noted = {entry["file"] for entry in self._state.files}
        for name in self.storage.names():
            if name.startswith(PART) or (OURS.fullmatch(name) and name not in noted):
                self.storage.remove(name)

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """Sweep once the work has ended, however that was: which makes room on a disk that is full. A server
        that does not answer is not asked again."""
        try:
            yield
        except BaseException as error:
            if not _is_gone(error):
                with suppress(OSError, TrainpipesError):
                    self.sweep()
            raise
        self.sweep()

    def _remove(self, about: dict[str, Any], names: Sequence[str]) -> None:
        """Remove all that was written: the manifest first, which says that the files are there."""
        if MANIFEST in names:
            with self.file(UNFINISHED) as file:  # what was written, and not what is to be
                file.write(_bytes(about))
            self.storage.remove(MANIFEST)
        for entry in self._state.files:
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

    def note(
        self,
        entry: dict[str, Any],
        next: tuple[int, dict[str, Any]] | None = None,
        notes: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
    ) -> None:
        """Record that a file is whole.

        Args:
            entry: what the manifest says of it.
            next: a row, and the cursor where it begins; None to keep what was noted before.
            notes: kept beside the cursor; None to keep them.
            columns: of all files; None to keep them.
        """
        line: dict[str, Any] = {"file": entry}
        if next is not None:
            line |= {"row": next[0], "next": next[1]}
        if notes is not None and notes != self._state.notes:
            line["notes"] = notes
        if columns is not None and columns != self._state.columns:
            line["columns"] = columns
        self._state = self._state.after(line)
        self._pending.append(line)
        if self._local or time.monotonic() - self._noted > self._wait:
            self._flush()

    def _flush(self) -> None:
        """Record what was noted."""
        began = time.monotonic()
        if self._journal is not None and isinstance(self.storage, LocalStorage):
            self.storage.append(self._journal, b"".join(_bytes(line) for line in self._pending))
        else:
            self._put(UNFINISHED, self._state)
        self._pending = []
        self._noted = time.monotonic()
        self._wait = max(EVERY, PATIENCE * (self._noted - began))

    def save(self, state: Opened) -> None:
        """Record what has been written so far, in place of all that was noted."""
        before, self._journal = self._journal, None
        if self._local:
            # The notes of another one count no longer, once this has its place.
            self._journal = f"{JOURNAL}{secrets.token_hex(4)}.jsonl"
        try:
            self._put(UNFINISHED, state)
        except BaseException:
            self._journal = before
            raise
        self._state = replace(state, files=[*state.files])  # to which ``note`` adds
        self._begun, self._pending = True, []
        if self._local:
            self._remove_journals(self.storage.names())

    def finish(
        self,
        files: list[dict[str, Any]],
        columns: dict[str, str],
        notes: dict[str, Any] | None = None,
    ) -> Written:
        """Record that everything has been written, and what is to be known of it."""
        rows = self._put(MANIFEST, Opened(None, files, None, notes or {}, columns))
        self._journal, self._begun = None, False
        self._remove_notes(self.storage.names())
        return self._written(files, rows)

    def _remove_notes(self, names: Sequence[str]) -> None:
        self._remove_journals(names)
        self.storage.remove(UNFINISHED)

    def _remove_journals(self, names: Sequence[str]) -> None:
        for name in names:
            if name.startswith(JOURNAL) and name != self._journal:
                self.storage.remove(name)

    def _put(self, name: str, state: Opened) -> int:
        rows = sum(int(entry["rows"]) for entry in state.files)
        content: dict[str, Any] = {"trainpipes_files": FORM, "rows": rows, "columns": state.columns}
        content |= {"files": state.files, **self._about}
        if name == UNFINISHED:
            content |= {"next": state.next, "row": state.row, "journal": self._journal}
        if name == UNFINISHED or state.notes:
            content["notes"] = state.notes
        with self.file(name) as file:
            file.write(_bytes(content, indent=1).rstrip())
        return rows


def _is_gone(error: BaseException | None) -> bool:
    """Whether an error says that a server did not answer, however often it was asked."""
    return isinstance(error, UnreachableError) and (error.attempts or 0) > 1


def _bytes(content: Any, indent: int | None = None) -> bytes:
    """As JSON, in a line."""
    return f"{json.dumps(content, indent=indent, ensure_ascii=False)}\n".encode()
