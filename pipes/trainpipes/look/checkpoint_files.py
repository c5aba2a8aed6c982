"""What checkpoint files hold: of ``torch.save``, of JSON, and folders of ``torch.distributed.checkpoint``.

Nothing that a file names is imported or run, and tensors stay on disk.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainpipes._internal.text import cut
from trainpipes.errors import MissingFilesError, StateError, UnreadableError

#: The index of a folder of ``torch.distributed.checkpoint``.
INDEX = ".metadata"
#: Bytes of a file that is read as a whole: JSON, an index, and one value of a state.
MOST_JSON, MOST_INDEX, MOST_VALUE = 1 << 28, 1 << 30, 1 << 26
#: What every file with a state holds.
MARK = b"trainpipes"
#: Keys under which a StatefulDataLoader keeps the states of its workers.
ABOVE = ("_snapshot", "fetcher_state")
#: The module, and the names elsewhere, that an index of ``torch.distributed.checkpoint`` may use.
METADATA = "torch.distributed.checkpoint.metadata"
PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
}
WAY_OUT = "save the state by itself, torch.save(loader.state_dict(), path), or as JSON"


def read_file(path: Path) -> Any:
    """What a file holds; tensors are mapped into memory and not read.

    Raises:
        StateError: it is neither of ``torch.save`` nor JSON, is damaged, or holds objects.
        UnreadableError: it cannot be read.
    """
    head = _head(path)
    if head.startswith(b"PK\x03\x04"):
        _check_archive(path)
        return _load(path, path)
    if head.startswith(b"\x80"):  # torch.save before 1.6
        with path.open("rb") as file:
            return _load(file, path)
    if head.lstrip()[:1] in (b"{", b"["):
        return _read_json(path)
    raise StateError(
        f"{path} is of no known format: a state is in a file of torch.save, in JSON, or in a folder of "
        "torch.distributed.checkpoint",
        path=str(path),
    )


def mentions_us(path: Path) -> bool:
    """Whether a file may hold a state: it is of a format that is read, and names us. Weights are not read."""
    try:
        if not path.is_file() or path.stat().st_size < len(MARK):
            return False
        head = _head(path)
        if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return any(MARK in archive.read(name) for name in names)
        if head[:1] == b"\x80" or head[:2] == b"PK" or head.lstrip()[:1] in (b"{", b"["):
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                return content.find(MARK) >= 0
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        pass
    return False


def read_dcp(folder: Path) -> Any:
    """The part of a ``torch.distributed.checkpoint`` that may be a state, as nested dicts; empty if there is
    none. Of the folder's files only the index and the values of a state are read.

    Raises:
        StateError: the index or a value is damaged, or a file is missing.
    """
    index = _read_index(folder / INDEX)
    known = index.planner_data if isinstance(index.planner_data, Mapping) else {}
    paths = {
        name: known.get(name) or tuple(str(name).split("."))
        for name, value in index.state_dict_metadata.items()
        if type(value).__name__ == "BytesStorageMetadata"
    }
    places = {key.fqn: place for key, place in (index.storage_data or {}).items()}
    homes = {_outermost(path[:-1]) for path in paths.values() if path[-1] == "trainpipes"}
    found: dict[Any, Any] = {}
    for name, path in paths.items():
        if name in places and any(path[: len(home)] == home for home in homes):
            below = found
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = _value(folder, name, places[name])
    return found


def check_regular(path: Path) -> None:
    """Raise unless this is a file with content: a pipe would hang, a device has no end.

    Raises:
        MissingFilesError: it is not there.
        UnreadableError: it is something else.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise MissingFilesError(
            f"{path} is not there: give the file or folder of a checkpoint", path=str(path)
        ) from None
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error
    if not stat.S_ISREG(mode):
        raise UnreadableError(
            f"{path} is no regular file: give the file or folder of a checkpoint", path=str(path)
        )


def _head(path: Path) -> bytes:
    check_regular(path)
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error


def _check_archive(path: Path) -> None:
    """Raise if an archive would take more memory than it has bytes: ``torch.save`` never compresses."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # of many kinds, where it is damaged
        raise StateError(
            f"{path} is damaged or cut short ({cut(str(error))}): use another checkpoint",
            path=str(path),
        ) from None
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise StateError(
            f"{path} is an archive that torch.save has not written: give a checkpoint as it was saved",
            path=str(path),
        )


def _load(source: Any, path: Path, what: str = "") -> Any:
    """What ``torch.save`` wrote.

    Args:
        source: a path, which is mapped into memory, or an open file.
        path: for errors.
        what: which part of it, for errors.
    """
    name = f"{path}{what}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old tensors
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
            )
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", str(error))
        why = (
            f"it holds {cut(found[1])}, whose code could run"
            if found
            else "it is not of torch.save"
        )
        raise StateError(
            f"{name}: nothing of it is read: {why} (torch.load, weights_only=True); {WAY_OUT}",
            path=str(path),
        ) from None
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of many kinds, where it is damaged
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise StateError(
            f"{name} is damaged, cut short, or not of torch.save ({cut(why, 120)}): use another checkpoint",
            path=str(path),
        ) from None


def _read_json(path: Path) -> Any:
    if path.stat().st_size > MOST_JSON:
        raise StateError(
            f"{path} is JSON of {path.stat().st_size:,} bytes, and no state is so large: give the file that "
            "the state was saved to",
            path=str(path),
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{path} is no JSON, or is cut short ({cut(str(error))}): use another checkpoint",
            path=str(path),
        ) from None


class _IndexReader(pickle.Unpickler):
    """Reads the index of a ``torch.distributed.checkpoint``. It finds only the plain classes that describe
    tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        if module == METADATA and name.isidentifier():
            found = super().find_class(module, name)
            if getattr(found, "__module__", "") == METADATA:
                return found
        raise pickle.UnpicklingError(f"it names {cut(f'{module}.{name}')}, whose code could run")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _read_index(path: Path) -> Any:
    check_regular(path)
    problem = "it is too large"
    if path.stat().st_size <= MOST_INDEX:
        try:
            index = _IndexReader(io.BytesIO(path.read_bytes())).load()
            if isinstance(getattr(index, "state_dict_metadata", None), Mapping):
                return index
            problem = "it lists no values"
        except Exception as error:  # of many kinds, where it is damaged
            problem = cut(str(error) or type(error).__name__)
    raise StateError(
        f"{path} is no index of torch.distributed.checkpoint, or is cut short ({problem}): use another "
        "checkpoint",
        path=str(path),
    )


def _outermost(home: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where the state of a loader starts that holds the state at ``home``."""
    starts = [place for place, key in enumerate(home) if key in ABOVE]
    return home[: starts[0]] if starts else home


def _value(folder: Path, name: str, place: Any) -> Any:
    """One value of a state, which the index says is at some place of a file."""
    path = folder / str(place.relative_path)
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside or place.offset < 0 or not 0 < place.length < MOST_VALUE:
        raise StateError(
            f"{folder / INDEX} is damaged: it says that {name} is at {place.offset} in "
            f"{place.relative_path!r}; use another checkpoint",
            path=str(folder),
        )
    check_regular(path)
    with path.open("rb") as file:
        file.seek(place.offset)
        return _load(io.BytesIO(file.read(place.length)), path, f", {name}")
