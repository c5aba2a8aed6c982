from __future__ import annotations

import json
import posixpath
from typing import Any

import numpy as np

from trainpipes._internal.checks import refuse_special
from trainpipes.errors import ConfigError, MissingFilesError, UnreadableError
from trainpipes.errors.text import cut
from trainpipes.filesystems.retry import Requests
from trainpipes.filesystems.systems import is_local
from trainpipes.sources.files.file_list import FileList


def saved_files(files: FileList, caller: str) -> FileList:
    """The files that ``save_to_disk`` names; all of other folders."""
    requests = Requests(files.retry)
    folders: dict[tuple[int, str], list[int]] = {}  # by file system and path
    for file, path in enumerate(files.paths):
        folder = posixpath.dirname(path.partition("?")[0] if _has_query(path) else path)
        folders.setdefault((int(files.system_of[file]), folder), []).append(file)
    kept: list[int] = []
    splits: dict[tuple[int, str], list[str]] = {}  # by the folder above
    for (system, folder), own in folders.items():
        state = _json(files, own[0], f"{folder}/state.json", requests)
        if state is None:
            kept += own
            continue
        above, name = posixpath.split(folder)
        names = splits.setdefault((system, above), [])
        names.append(name)
        if len(names) == 2 and _json(files, own[0], f"{above}/dataset_dict.json", requests):
            raise ConfigError(
                f"{caller}: {above} has several splits, such as {names[0]!r} and {name!r}: read one of them, "
                f"such as {above}/{names[0]}",
                path=above,
            )
        kept += _named(files, own, folder, state)
    return files.pick(np.array(kept, dtype=np.int64))


def _named(files: FileList, members: list[int], folder: str, state: Any) -> list[int]:
    path = f"{folder}/state.json"
    try:
        names = [str(each["filename"]) for each in state["_data_files"]]
        apart = bool(state.get("_indices_data_files"))
        if not (names or apart) or any(name != posixpath.basename(name) for name in names):
            raise ValueError(f"{names!r:.100} are no names of files beside it")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(
            path, "does not say which files there are in the way of save_to_disk"
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
                f"{path} names {cut(name, 99)}, which is not there; bring it back, or save the dataset again",
                path=f"{folder}/{name}",
            )
    return [place[name] for name in names if name in place]


def _has_query(path: str) -> bool:
    return "://" in path and "?" in path


def _json(files: FileList, file: int, path: str, requests: Requests) -> Any:
    if _has_query(files.paths[file]):
        return None  # who may read a signed URL may not read what is beside it
    if is_local(files.system(file)):
        refuse_special(path)
    try:
        return json.loads(requests.call(files.system(file), "cat_file", path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"is not JSON that can be read ({error})") from error


def _unreadable(path: str, what: str) -> UnreadableError:
    way = "fix it, or remove it to read all .arrow files beside it"
    return UnreadableError(f"{path} {what}; {way}", path=path)
