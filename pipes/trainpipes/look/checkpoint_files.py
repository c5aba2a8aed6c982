"""What checkpoint files hold. Nothing that a file names is imported or run; tensors stay on disk."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainpipes.errors import MissingFilesError, StateError, TrainpipesError, UnreadableError
from trainpipes.errors.text import cut

#: The index of a folder of ``torch.distributed.checkpoint``, and bytes of one value in it, at most.
INDEX, MOST_VALUE = ".metadata", 1 << 26
#: What every file with a state holds, and how one of ``torch.save`` begins.
MARK, ZIP = b"trainpipes", b"PK\x03\x04"
#: Where the classes are that an index of ``torch.distributed.checkpoint`` may name; and others.
METADATA = "torch.distributed.checkpoint.metadata"
PATH_OF_3_13 = "pathlib._local.PosixPath"  # what Python 3.13 alone calls it
PLAIN = (
    "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)  # fmt: skip


def read_file(path: Path) -> Any:
    """What a file of ``torch.save`` or JSON holds; tensors stay on disk."""
    head = _head(path)
    if head.startswith(ZIP):
        return _load(path, path)
    if not _is_json(head):
        formats = "a file of torch.save, in JSON, or in a folder of torch.distributed.checkpoint"
        raise _refused(path, f"is of no known format: a state is in {formats}")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is no JSON, or is cut short ({cut(str(error))})") from None


def mentions_us(path: Path) -> bool:
    """Whether a file may hold a state of ours."""
    try:
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return any(MARK in archive.read(name) for name in names)
        head = _head(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
            return (head.startswith(ZIP) or _is_json(head)) and found.find(MARK) >= 0
    except (OSError, TrainpipesError, ValueError, RuntimeError, zipfile.BadZipFile):
        return False


def read_dcp(folder: Path) -> Any:
    """The parts of a ``torch.distributed.checkpoint`` that may be states."""
    index = _read_index(folder / INDEX)
    known = index.planner_data if isinstance(index.planner_data, Mapping) else {}
    paths = {
        name: known.get(name) or tuple(str(name).split("."))
        for name, value in index.state_dict_metadata.items()
        if type(value).__name__ == "BytesStorageMetadata"
    }
    places = {key.fqn: place for key, place in (index.storage_data or {}).items()}
    homes = {path[:-1] for path in paths.values() if path[-1] == "trainpipes"}
    found: dict[Any, Any] = {}
    for name, path in paths.items():
        if name in places and any(path[: len(home)] == home for home in homes):
            below = found
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = _value(folder, name, places[name])
    return found


def check_regular(path: Path) -> None:
    """Raise unless this is a file: a pipe would hang."""
    way_out = "give the file or folder of a checkpoint"
    if not os.path.exists(path):
        raise MissingFilesError(f"{path} is not there: {way_out}", path=str(path))
    if not os.path.isfile(path):
        raise UnreadableError(f"{path} is no regular file: {way_out}", path=str(path))


def _refused(path: Path, why: str) -> StateError:
    return StateError(f"{path} {why}", path=str(path))


def _damaged(path: Path, why: str) -> StateError:
    return _refused(path, f"{why}: use another checkpoint")


def _is_json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"{", b"[")


def _head(path: Path) -> bytes:
    check_regular(path)
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error


def _load(source: Any, path: Path, what: str = "") -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old tensors
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
            )
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", str(error))
        why = f"holds {cut(found[1])}, whose code could run" if found else "is not of torch.save"
        raise _refused(
            path,
            f"{what}{why}: nothing of it is read (torch.load, weights_only=True); save the state by itself, "
            "torch.save(loader.state_dict(), path), or as JSON",
        ) from None
    except Exception as error:  # of many kinds, where it is damaged
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        why = f"is damaged, cut short, or not of torch.save ({cut(why, 120)})"
        raise _damaged(path, what + why) from None


class _IndexReader(pickle.Unpickler):
    """Finds only classes that describe tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == PATH_OF_3_13:
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if f"{module}.{name}" in PLAIN or is_dtype or (module == METADATA and name.isidentifier()):
            found = super().find_class(module, name)
            if module != METADATA or getattr(found, "__module__", "") == METADATA:
                return found
        raise pickle.UnpicklingError(f"it names {cut(f'{module}.{name}')}, whose code could run")


def _read_index(path: Path) -> Any:
    check_regular(path)
    try:
        index = _IndexReader(io.BytesIO(path.read_bytes())).load()
        if isinstance(getattr(index, "state_dict_metadata", None), Mapping):
            return index
        problem = "it lists no values"
    except Exception as error:  # of many kinds, where it is damaged
        problem = cut(str(error) or type(error).__name__)
    why = f"is no index of torch.distributed.checkpoint, or is cut short ({problem})"
    raise _damaged(path, why)


def _value(folder: Path, name: str, place: Any) -> Any:
    path = folder / str(place.relative_path)
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside or place.offset < 0 or not 0 < place.length < MOST_VALUE:
        where = f"{name} is at {place.offset} in {place.relative_path!r}"
        raise _damaged(folder / INDEX, f"is damaged: it says that {where}")
    check_regular(path)
    with path.open("rb") as file:
        file.seek(place.offset)
        return _load(io.BytesIO(file.read(place.length)), path, f", {name}, ")
