from __future__ import annotations

import os
from typing import Any

from trainpipes.errors import DataChangedError, MissingFilesError, UnreadableError
from trainpipes.errors.text import hidden, without_query
from trainpipes.interfaces.source import Place

#: Where the system says of what kind its file systems are.
MOUNTS = "/proc/self/mountinfo"


def keeps_inodes(device: int) -> bool:
    """Whether a device keeps inodes: some network file systems make them up again."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(MOUNTS) as mounts:
            kinds = [line.split(" - ")[1] for line in mounts if line.split()[2] == number]
    except OSError:
        return True
    return not any(kind.startswith(("fuse", "9p", "cifs", "smb")) for kind in kinds)


def gone(place: Place) -> MissingFilesError:
    return MissingFilesError(
        f"{place}: the file was there when the files were listed, but no longer is; bring it back, "
        "or build the pipeline again without it",
        **vars(place),
    )


def changed(place: Place, how: str) -> DataChangedError:
    return DataChangedError(
        f"{place}: the file has changed since the files were listed: {how}; bring the old one back, "
        "or build the pipeline again",
        **vars(place),
    )


def located(place: Place, error: Any) -> Any:
    names = [name for name in ("attempts", "seconds") if hasattr(error, name)]
    reported = {name: getattr(error, name) for name in names}
    said = error.message.removeprefix(hidden(f"{place.path}: "))
    return type(error)(f"{place}: {said}", **reported, **vars(place))


def without(*paths: str) -> str:
    """The line of code that leaves out files by the names that they are listed by, and no others."""
    if any(hidden(path) != path for path in paths):  # by what is no secret
        ends = tuple(without_query(path).rpartition("://")[2] for path in paths)
        text = f"not p.split('?')[0].endswith({ends!r})"
    else:
        text = f"p != {paths[0]!r}" if len(paths) == 1 else f"p not in {[*paths]!r}"
    return f"tp.list_files(...).filter(lambda p: {text}) before the reader"


def unreadable(place: Place, what: str) -> UnreadableError:
    return UnreadableError(
        f"{place}: {what}; to go on from a checkpoint, restore the file; without it, start a new run, with "
        f"{without(place.path or '')}",
        **vars(place),
    )
