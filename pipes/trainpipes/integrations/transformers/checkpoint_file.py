"""The position in the data, as a file in a checkpoint's folder beside those of the Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from trainpipes.errors import StateError

__all__ = ["FILE", "SavedPosition", "read", "write"]

#: Its name in a checkpoint's folder.
FILE = "trainpipes.json"


class SavedPosition(NamedTuple):
    """Where a run stood.

    Attributes:
        step: optimizer steps that were done.
        first_epoch: the epoch of the data that the Trainer calls 0.
        loader: the state of all ranks.
    """

    step: int
    first_epoch: int
    loader: dict[str, Any]


def write(folder: Path, position: SavedPosition) -> None:
    """Put a position into a folder, which is made if it is not there. The file is whole, or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{FILE}.new"
    with beside.open("w") as file:
        json.dump(position._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / FILE)


def read(folder: Path) -> SavedPosition | None:
    """The position in a folder; None where there is none.

    Raises:
        StateError: the file is damaged, or is something else.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StateError(
            f"{path} is no JSON ({error}): resume from another checkpoint", path=str(path)
        ) from error
    if not isinstance(found, dict) or set(found) != set(SavedPosition._fields):
        raise StateError(
            f"{path} was not written by trainpipes' Trainer: resume from a checkpoint that was",
            path=str(path),
        )
    return SavedPosition(**found)
