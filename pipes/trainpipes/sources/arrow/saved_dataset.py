from __future__ import annotations

import json
import posixpath
from typing import Any

import numpy as np

from trainpipes._internal.checks import refuse_special
from trainpipes._internal.messages import nearest
from trainpipes.errors import ConfigError, MissingFilesError, UnreadableError
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.remote.retry import Requests

#: A file system of those that were listed, and a folder on it.
Folder = tuple[int, str]


def saved_files(files: FileList, split: str | None, caller: str) -> FileList:
    requests = Requests(files.retry_seconds)
    folders: dict[Folder, list[int]] = {}
    for file, path in enumerate(files.paths):
        folders.setdefault((int(files.system_of[file]), _folder(path)), []).append(file)
    states: dict[Folder, Any] = {
        key: _json(files, members[0], f"{key[1]}/state.json", requests)
        for key, members in folders.items()
    }
    saved: dict[Folder, list[Folder]] = {}  # by the folder above
    for key in folders:
        if states[key] is not None:
            saved.setdefault((key[0], posixpath.dirname(key[1])), []).append(key)
    known = False
    for (_, path), splits in saved.items():
        first = folders[splits[0]][0]
        if _json(files, first, f"{path}/dataset_dict.json", requests) is not None:
            known = True
            chosen = _chosen(path, [posixpath.basename(key[1]) for key in splits], split, caller)
            for key in splits:
                if posixpath.basename(key[1]) != chosen:
                    del folders[key]
    if split is not None and not known:
        raise ConfigError(
            f"{caller}: split= chooses one of a DatasetDict that save_to_disk wrote, and there is none "
            f"above {files.names[0]}: leave it out, or list the folder with dataset_dict.json in it"
        )
    kept: list[int] = []
    for key, members in folders.items():
        state = states[key]
        kept += members if state is None else _named(files, members, key[1], state)
    return files.pick(np.array(kept, dtype=np.int64))


def _chosen(path: str, names: list[str], split: str | None, caller: str) -> str:
    if split in names or (split is None and len(names) == 1):
        return split or names[0]
    has = f"has several splits, {', '.join(map(repr, names))}"
    if split is not None:
        has += f", and no split {split!r}{nearest(split, names)}"
    way = f"choose one by read_arrow(split={names[0]!r})"
    raise ConfigError(f"{caller}: {path} {has}: {way}", path=path)


def _named(files: FileList, members: list[int], folder: str, state: Any) -> list[int]:
    path = f"{folder}/state.json"
    try:
        names = [str(each["filename"]) for each in state["_data_files"]]
        apart = bool(state.get("_indices_data_files"))
        if not (names or apart) or any(name != posixpath.basename(name) for name in names):
            raise ValueError(f"{names!r:.100} are no names of files beside it")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnreadableError(
            f"{path} does not say which files there are in the way of save_to_disk; fix it, or remove it to "
            "read all .arrow files beside it",
            path=path,
        ) from error
    if apart:
        raise UnreadableError(
            f"{path} names files of indices, as datasets before 2.0 wrote them, and rows would come without "
            "them: load_from_disk(...).flatten_indices().save_to_disk(...) writes them in one",
            path=path,
        )
    place = {posixpath.basename(files.paths[file]): file for file in members}
    for name in names:
        if name not in place and not files.system(members[0]).exists(f"{folder}/{name}"):
            raise MissingFilesError(
                f"{path} names {name}, which is not there; bring it back, or save the dataset again",
                path=f"{folder}/{name}",
            )
    return [place[name] for name in names if name in place]


def _has_query(path: str) -> bool:
    return "://" in path and "?" in path


def _folder(path: str) -> str:
    return posixpath.dirname(path.partition("?")[0] if _has_query(path) else path)


def _json(files: FileList, file: int, path: str, requests: Requests) -> Any:
    if _has_query(files.paths[file]):
        return None  # who may read a signed URL may not read what is beside it
    if is_local(files.system(file)):
        refuse_special(path)
    try:
        content = requests.call(files.system(file), "cat_file", path)
    except FileNotFoundError:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{path} is not JSON that can be read ({error}); fix it, or remove it to read all .arrow files "
            "beside it",
            path=path,
        ) from error
