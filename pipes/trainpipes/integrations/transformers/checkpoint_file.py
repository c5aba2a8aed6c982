"""The position in the data, as a file in a checkpoint's folder beside those of the Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from trainpipes.cursor import is_count
from trainpipes.errors import StateError

__all__ = ["FILE", "SavedPosition", "read", "trained", "write"]

#: Its name in a checkpoint's folder, and that of the file in which the Trainer says how far it is.
FILE = "trainpipes.json"
TRAINER_STATE = "trainer_state.json"


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
    except (ValueError, RecursionError, OSError) as error:
        raise StateError(
            f"{path} is no JSON ({error}): resume from another checkpoint", path=str(path)
        ) from error
    if not (isinstance(found, dict) and set(found) == set(SavedPosition._fields)) or not (
        is_count(found["step"])
        and is_count(found["first_epoch"])
        and isinstance(found["loader"], dict)
        and is_count(found["loader"].get("epoch"))
        and found["first_epoch"] <= found["loader"]["epoch"]
    ):
        raise StateError(
            f"{path} was not written by trainpipes' Trainer, or is damaged: resume from another checkpoint",
            path=str(path),
        )
    saved, (step, _) = SavedPosition(**found), trained(folder)
    if saved.step != step:
        raise StateError(
            f"{path} is of step {saved.step}, and the checkpoint of step {step}: the file belongs to another "
            "one; resume from a checkpoint as it was saved",
            path=str(path),
        )
    return saved


def trained(folder: Path) -> tuple[int, int]:
    """Optimizer steps and whole epochs that were trained before a checkpoint, as the Trainer says."""
    try:
        state = json.loads((folder / TRAINER_STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return 0, 0
    return int(state.get("global_step") or 0), int((state.get("epoch") or 0) + 1e-6)
