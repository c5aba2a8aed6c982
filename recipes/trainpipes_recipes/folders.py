"""Videos in folders, a folder for each class.

>>> in_folders("mine", ["a.parquet"], None) is None
True
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trainpipes import MissingFilesError, Pipeline, from_arrow
from trainpipes.filesystems.systems import open_system

__all__ = ["in_folders"]

#: How names of videos end.
ENDS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".gif")


def in_folders(
    recipe: str, files: Any, storage_options: Mapping[str, Any] | None
) -> tuple[Pipeline, str, list[str]] | None:
    """The videos in a folder's folders, with the names of these, their folder, and the classes; None of
    anything else.
    """
    files = files[0] if isinstance(files, list | tuple) and len(files) == 1 else files
    if not isinstance(files, str | os.PathLike):
        return None
    system, root = open_system(os.fspath(files), storage_options or {})
    if not system.isdir(root):
        return None
    found = [name[len(root) :].lstrip("/") for name in sorted(system.find(root))]
    names = [name for name in found if "/" in name and name.lower().endswith(ENDS)]
    if not names:
        if found and not any(name.lower().endswith(ENDS) for name in found):
            return None
        way = "put each class into a folder of its own"
        raise MissingFilesError(f"{recipe}: {os.fspath(files)} has no videos in folders: {way}")
    kinds = [name.partition("/")[0] for name in names]
    table = pa.table({"video": pa.array(names, pa.string()), "label": pa.array(kinds, pa.string())})
    return from_arrow(table), os.fspath(files), sorted({*kinds})
