"""``read_states``: the states in a file or folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainpipes.checkpoint.dcp import INDEX, read_dcp
from trainpipes.checkpoint.file import check_regular, mentions_us, read_file
from trainpipes.checkpoint.within import FoundState, states_in
from trainpipes.errors import MissingFilesError, StateError, TrainpipesError, UnreadableError
from trainpipes.foreign_state import refusal
from trainpipes.shown import shown

__all__ = ["read_states"]

#: Files of a folder that are looked at, and how far down.
MOST_FILES = 20_000
MOST_DEEP = 4
#: Ends of names of files that hold no state: weights, data, code.
OTHERS = (
    ".safetensors",
    ".distcp",
    ".parquet",
    ".arrow",
    ".py",
    ".txt",
    ".md",
    ".log",
    ".lock",
    ".new",
)


def read_states(path: str | os.PathLike[str]) -> list[FoundState]:
    """The trainpipes states in a checkpoint, in the order in which they are stored.

    It reads files of ``torch.save`` (with ``weights_only=True``) and of JSON, with a state on top or under
    any keys; folders of ``torch.distributed.checkpoint``; and folders with such files, as the Trainers of
    transformers and TRL, Accelerate and Lightning write them. No code that a file names is run, and
    weights are not read.

    Args:
        path: a file or a folder.

    Returns:
        At least one. One that is damaged says so in ``problem``.

    Raises:
        StateError: there is none, or the file is damaged or would run something to be read.
        MissingFilesError: the path is not there.
        UnreadableError: it is neither file nor folder, or may not be read.
    """
    place = Path(path)
    if not os.fspath(path):
        raise MissingFilesError("the path is empty: give the file or folder of a checkpoint")
    if "://" in str(path):
        raise StateError(
            f"{path}: a checkpoint is read from this machine; copy it here first, and give the path",
            path=str(path),
        )
    if place.is_dir():
        return _in_folder(place)
    check_regular(place)
    value = read_file(place)
    return list(states_in(value, str(path))) or _nothing(value, place)


def _in_folder(folder: Path) -> list[FoundState]:
    try:
        os.listdir(folder)
    except OSError as error:
        raise UnreadableError(f"{folder}: {error.strerror}", path=str(folder)) from error
    found: list[FoundState] = []
    looked = 0
    for path in _files(folder):
        looked += 1
        dcp = path.name == INDEX
        if not dcp and not mentions_us(path):
            continue
        try:
            value = read_dcp(path.parent) if dcp else read_file(path)
        except TrainpipesError as error:
            found.append(FoundState(str(path.parent if dcp else path), problem=str(error)))
            continue
        found += states_in(value, str(path.parent if dcp else path))
    if not found:
        what = f"none of its {looked:,} files holds one" if looked else "it has no files"
        raise StateError(
            f"{folder} holds no state of trainpipes: {what}; give the folder of one checkpoint, or a file",
            path=str(folder),
        )
    return found


def _files(folder: Path) -> Iterator[Path]:
    """The files to look at, by name; of a folder of ``torch.distributed.checkpoint`` its index."""
    count = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = (
            sorted(f for f in folders if not f.startswith(".")) if depth < MOST_DEEP else []
        )
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise StateError(
                    f"{folder} has more than {MOST_FILES:,} files: give the folder of one checkpoint",
                    path=str(folder),
                )
            path = Path(place, name)
            if (name == INDEX or not name.startswith(".")) and not name.endswith(OTHERS):
                yield path


def _nothing(value: Any, path: Path) -> list[FoundState]:
    """Raise what a file is that holds no state of ours."""
    if isinstance(value, dict):
        raise StateError(f"{path}: {refusal(value)}", path=str(path))
    raise StateError(
        f"{path} holds no state of trainpipes, but {shown(value, 60)}: save what loader.state_dict() gives",
        path=str(path),
    )
