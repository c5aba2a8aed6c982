"""What a folder that was written says of its files: the manifest, and what it looks like until it is whole.

``_manifest.json`` has all there is to say, and appears last. Until then ``_unfinished.json`` does, and a
journal beside it: one line of JSON for each file that has become whole since. A line that is damaged, as a
kill leaves it, ends the journal: the files of the lines after it are made again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from trainpipes.errors import DataChangedError, UnreachableError, UnreadableError
from trainpipes.storage.writers.storage import Storage, storage_at

MANIFEST, UNFINISHED = "_manifest.json", "_unfinished.json"
#: What the names of journals begin with.
JOURNAL = "_unfinished-"
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
    _storage: Storage | None = field(default=None, kw_only=True, repr=False, compare=False)

    def verify(self) -> None:
        """Compare all files with the manifest's checksums: 1 to 3 GB/s.

        Raises:
            DataChangedError: one has changed since it was written.
        """
        storage = self._storage or storage_at(self.folder, "verify")
        check_bytes(storage, read_manifest(storage, MANIFEST)["files"])


@dataclass(frozen=True)
class Opened:
    """What of a folder has been written.

    Attributes:
        written: what is in it, if it is finished.
        files: files that are whole, as the manifest has them, in the order in which they became so.
        next: cursor of the row ``row``; None where no rows are read in turn.
        notes: kept beside the cursor.
        columns: names and types of the columns; None before the first file.
        row: number of the row where the cursor stands; None for the one after all files up to the first that
            is missing, as earlier versions meant it.
    """

    written: Written | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    next: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] | None = None
    row: int | None = None

    def after(self, line: Mapping[str, Any]) -> Opened:
        """What it is after a line of the journal: "file", and whatever else has changed."""
        changes = dict(line)
        entry = changes.pop("file")
        changed = replace(self, **changes)
        self.files.append(entry)
        return changed


def read_manifest(storage: Storage, name: str) -> dict[str, Any]:
    """What a manifest says, or ``_unfinished.json``.

    Raises:
        UnreadableError: it is damaged.
    """
    path = storage.at(name)
    try:
        found = json.loads(b"".join(storage.read(name)))
        good = found["trainpipes_files"] == FORM and all(map(_is_entry, found["files"]))
    except UnreachableError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_manifest(path) from error
    if not good:
        raise _no_manifest(path)
    return dict(found)


def opened_of(storage: Storage, state: Mapping[str, Any], names: Sequence[str]) -> Opened:
    """What has been written, by a manifest and its journal.

    Args:
        storage: of the folder.
        state: what ``read_manifest`` gave.
        names: of the files that are there.
    """
    opened = Opened(
        None, list(state["files"]), state.get("next"), dict(state.get("notes") or {}),
        state.get("columns"), state.get("row"),
    )  # fmt: skip
    if state.get("journal") in names:
        try:
            lines = b"".join(storage.read(state["journal"])).split(b"\n")
        except OSError as error:
            raise _no_manifest(storage.at(state["journal"])) from error
        for line in lines:
            try:
                found = json.loads(line)
                if not _is_entry(found["file"]):
                    break
                opened = opened.after(found)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                break
    return opened


def _is_entry(entry: Any) -> bool:
    return bool({"file", "rows", "bytes", "crc32"} <= entry.keys())


def check_there(storage: Storage, files: Sequence[Mapping[str, Any]]) -> None:
    """Compare files with the sizes that they were written with.

    Raises:
        DataChangedError: one is gone, or has another.
    """
    sizes = storage.sizes() if files else {}
    for entry in files:
        path, size = storage.at(entry["file"]), sizes.get(entry["file"])
        if size is None:
            raise _changed(path, os.strerror(errno.ENOENT))
        if size != entry["bytes"]:
            raise _changed(path, f"it has {size:,} bytes, and {entry['bytes']:,} were written")


def check_bytes(storage: Storage, files: Sequence[Mapping[str, Any]]) -> None:
    """Compare files with their checksums.

    Args:
        storage: that they are in.
        files: as the manifest has them.

    Raises:
        DataChangedError: one has changed since it was written.
    """
    for entry in files:
        path, check = storage.at(entry["file"]), 0
        with _reading(path):
            for block in storage.read(entry["file"]):
                check = crc32(block, check)
        if f"{check:08x}" != entry["crc32"]:
            raise _changed(path, "its bytes are not those that were written")


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
