"""The states in a checkpoint. Nothing that a file names is run; tensors stay on disk."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainpipes.errors import MissingFilesError, StateError, UnreadableError, cut
from trainpipes.state.format import read, unrecognized_state_error

#: Ends of names of files that are looked into in a folder; and the index of torch.distributed.checkpoint.
ENDS, INDEX = (".json", ".pt", ".pth", ".bin", ".ckpt", ".pkl"), ".metadata"
#: How many times its bytes an archive may unpack to, and bytes that it may in any case.
PACKED, LEAST_BYTES = 4, 64 << 20
#: Characters of the keys that lead to a state, at most.
MOST_KEYS = 2000
#: Where the classes are that an index of torch.distributed.checkpoint may name; and others.
METADATA = "torch.distributed.checkpoint.metadata"
PLAIN = (
    "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)  # fmt: skip


def read_states(path: str | os.PathLike[str]) -> dict[str, Mapping[str, Any]]:
    """The trainpipes states in a checkpoint, in the order in which they are stored.

    Reads files of ``torch.save`` and of JSON, with states under any keys; folders of
    ``torch.distributed.checkpoint``; and such files in a folder, as trainers write them.

    Args:
        path: a file or a folder of this machine.

    Returns:
        At least one state, for ``Loader.load_state_dict``, by the file that it is in and the keys that
        lead to it, as in Python: ``checkpoint.pt ["loader"]``.

    Raises:
        StateError: there is none, or the file is damaged or would run code.
        MissingFilesError: the path is not there.
        UnreadableError: it may not be read, or is neither file nor folder.
    """
    place, problem = Path(path), None
    try:
        there = bool(os.fspath(path)) and place.exists()
    except OSError as error:  # a folder above may not be entered
        raise _unreadable(error, place) from error
    if not there:
        missing = f"{cut(os.fspath(path)) or repr(path)} is not there"
        raise MissingFilesError(
            f"{missing}: give the file or folder of a checkpoint of this machine"
        )
    if not place.is_dir():
        return _states_of(place)
    denied: list[OSError] = []
    files = [place / INDEX]
    if not os.path.exists(files[0]):
        walked = os.walk(place, onerror=denied.append)
        files = sorted(Path(folder, name) for folder, _, names in walked for name in names)
    states: dict[str, Mapping[str, Any]] = {}
    for file in files:
        try:
            if (file.name == INDEX or file.suffix in ENDS) and file.is_file():
                states |= _states_of(file)
        except (StateError, UnreadableError) as error:
            problem = problem or error
        except OSError as error:
            denied.append(error)
    if not states:
        said = f"{path} holds no state of trainpipes: give the folder of one checkpoint, or a file"
        closed = _unreadable(denied[0], place) if denied else None
        raise problem or closed or StateError(said, path=str(path))
    return states


def _unreadable(error: OSError, path: Path) -> UnreadableError:
    name = str(error.filename or path)
    return UnreadableError(f"{name}: {error.strerror}", path=name)


def summarize(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state says about where a run stands.

    Returns:
        ``format``: its version. ``epoch``: from 0. ``batches``: delivered in that epoch, over all ranks.
        ``shards``: of the pipeline whose positions it has; 0 if batches are counted, which fits all ranks.
        ``num_shards``: of the pipeline. ``stages``: of the pipeline, by name.

    Raises:
        StateError: it is damaged, or of another format.
    """
    saved = read(state)
    stages = [cut(str(stage["stage"]), 60) for stage in json.loads(saved.pipeline)["stages"]]
    position = saved.position
    return {
        "format": int(state["trainpipes"]), "epoch": position.pass_number, "batches": position.m,
        "shards": len(position.cursors), "num_shards": position.num_shards, "stages": stages,
    }  # fmt: skip


def _states_of(path: Path) -> dict[str, Mapping[str, Any]]:
    value = _dcp(path) if path.name == INDEX else _value(path)
    where = path.parent if path.name == INDEX else path
    if states := dict(_states_in(value, where)):
        return states
    raise _refused(path, f"has no state of trainpipes in it: {unrecognized_state_error(value)}")


def _states_in(value: Any, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The states in a value, the outermost first."""
    seen: set[int] = set()
    coming = deque([("", value)])
    while coming:
        keys, part = coming.popleft()
        names = part.keys() if isinstance(part, Mapping) else set()
        if {"trainpipes", "epoch", "num_shards"} <= names:  # in all formats
            yield f"{path} {keys}".rstrip(), part
        elif names & {"_snapshot", "fetcher_state"}:
            raise _refused(path, f"{keys}: {unrecognized_state_error(part)}")
        elif id(part) not in seen and len(keys) < MOST_KEYS:
            seen.add(id(part))
            for key, below in part.items() if names else enumerate(part):
                if isinstance(below, Mapping | list | tuple):
                    name = json.dumps(key) if isinstance(key, str) else repr(key)[:80]
                    coming.append((f"{keys}[{name}]", below))


def _value(path: Path) -> Any:
    if not path.is_file():  # a pipe would hang
        raise UnreadableError(f"{path} is no regular file", path=str(path))
    try:
        with path.open("rb") as file:
            head = file.read(64).lstrip()[:1]
        if not zipfile.is_zipfile(path):
            return json.loads(path.read_bytes() if head in (b"{", b"[") else b"")
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error
    except (ValueError, RecursionError):
        raise _refused(path, "is neither JSON nor of torch.save, or is cut short") from None
    return _loaded(path, path)


def _loaded(source: Any, path: Path) -> Any:
    _check_size(source, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old tensors
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
            )
    except Exception as error:  # of many kinds, where it is damaged
        named = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", str(error))
        why = f"{cut(named[1])}, whose code could run" if named else "what it cannot read"
        way = "save the state by itself, torch.save(loader.state_dict(), path), or as JSON"
        raise _refused(path, f"holds {why} (torch.load, weights_only=True): {way}") from None


def _check_size(source: Any, path: Path) -> None:
    """Refuse an archive that unpacks to far more than it has: torch packs nothing."""
    size = path.stat().st_size if source is path else len(source.getbuffer())
    try:
        with zipfile.ZipFile(source) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # torch says what is wrong with it
    finally:
        if source is not path:
            source.seek(0)
    if unpacked > PACKED * size + LEAST_BYTES:
        why = f"unpacks to {unpacked:,} bytes, of {size:,}: torch.save() packs nothing"
        raise _refused(path, f"{why}: it is damaged, or made to fill memory")


def _dcp(index: Path) -> dict[Any, Any]:
    """The parts of a ``torch.distributed.checkpoint`` that may be states."""
    try:
        content = _IndexReader(io.BytesIO(index.read_bytes())).load()
        known = content.planner_data if isinstance(content.planner_data, Mapping) else {}
        paths = {
            name: known.get(name) or tuple(str(name).split("."))
            for name, value in content.state_dict_metadata.items()
            if type(value).__name__ == "BytesStorageMetadata"
        }
        places = {key.fqn: place for key, place in content.storage_data.items()}
    except Exception as error:  # of many kinds, where it is damaged
        why = cut(str(error) or type(error).__name__)
        raise _refused(index, f"is no index of torch.distributed.checkpoint: {why}") from None
    homes = {path[:-1] for path in paths.values() if path[-1] == "trainpipes"}
    nested: dict[Any, Any] = {}
    for name, path in paths.items():
        if name in places and any(path[: len(home)] == home for home in homes):
            below = nested
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = _part(index.parent, places[name])
    return nested


class _IndexReader(pickle.Unpickler):
    """Finds only classes that describe tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if f"{module}.{name}" in PLAIN or is_dtype or (module == METADATA and name.isidentifier()):
            named = super().find_class(module.removesuffix("._local"), name)
            if module != METADATA or getattr(named, "__module__", "") == METADATA:
                return named
        raise pickle.UnpicklingError(f"it names {cut(f'{module}.{name}')}, whose code could run")


def _part(folder: Path, place: Any) -> Any:
    path = folder / Path(str(place.relative_path)).name
    if not path.is_file():
        raise _refused(path, "is not there")
    with path.open("rb") as file:
        file.seek(place.offset)
        return _loaded(io.BytesIO(file.read(place.length)), path)


def _refused(path: Path, why: str) -> StateError:
    return StateError(f"{path} {why}", path=str(path))
