"""Folders of ``torch.distributed.checkpoint``, read without a process group; what they pickle is not run.

The index, ``.metadata``, says in which file and where each value of a flattened dict is. The numbers and
texts of a state are values of their own, each as ``torch.save`` wrote it. Those of a state of ours are read,
and nothing else is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainpipes.checkpoint.file import check_regular, load_torch
from trainpipes.checkpoint.inert import Inert, read_inert
from trainpipes.errors import StateError

__all__ = ["INDEX", "read_dcp"]

INDEX = ".metadata"
#: Bytes of an index, and of one value of a state.
MOST_INDEX = 1 << 30
MOST_VALUE = 1 << 26
#: Keys under which a StatefulDataLoader keeps the states of its workers.
ABOVE = ("_snapshot", "fetcher_state")


def read_dcp(folder: Path) -> Any:
    """The part of a checkpoint that may be a state of ours, as nested dicts; empty if there is none.

    Raises:
        StateError: the index or a value is damaged, or a file is missing.
    """
    index = folder / INDEX
    check_regular(index)
    if index.stat().st_size > MOST_INDEX:
        raise StateError(
            f"{index} is too large for an index: use another checkpoint", path=str(index)
        )
    try:
        paths, places = _index(read_inert(index.read_bytes()))
    except ValueError as error:
        raise StateError(
            f"{index} is no index of torch.distributed.checkpoint, or is cut short ({error}): the checkpoint "
            "was not finished; use another one",
            path=str(index),
        ) from None
    homes = {path[:-1] for path in paths.values() if path[-1] == "trainpipes"}
    homes = {_outermost(home) for home in homes}
    found: dict[Any, Any] = {}
    for name, path in paths.items():
        if name in places and any(path[: len(home)] == home for home in homes):
            _put(found, path, _value(folder, name, *places[name]))
    return found


def _index(index: Any) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[str, int, int]]]:
    """The path of each value in the dict, and where in which file it is.

    Raises:
        ValueError: this is something else.
    """
    held = index.held if isinstance(index, Inert) else {}
    values, planner, storage = (
        held.get(key) for key in ("state_dict_metadata", "planner_data", "storage_data")
    )
    if not isinstance(values, Mapping) or not isinstance(storage, Mapping):
        raise ValueError("it lists no values")
    paths: dict[str, tuple[Any, ...]] = {}
    for name, value in values.items():
        if isinstance(value, Inert) and value.name.endswith("BytesStorageMetadata"):
            path = planner.get(name) if isinstance(planner, Mapping) else None
            paths[str(name)] = (
                path if isinstance(path, tuple) and path else tuple(str(name).split("."))
            )
    places = {}
    for key, place in storage.items():
        told = (
            (key.held, place.held)
            if isinstance(key, Inert) and isinstance(place, Inert)
            else ({}, {})
        )
        where = tuple(told[1].get(part) for part in ("relative_path", "offset", "length"))
        if [type(part) for part in where] == [str, int, int]:
            places[str(told[0].get("fqn"))] = where
    return paths, places  # type: ignore[return-value]


def _outermost(home: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where the state of a loader starts that has the state at ``home`` in it."""
    starts = [place for place, key in enumerate(home) if key in ABOVE]
    return home[: starts[0]] if starts else home


def _put(found: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        below = found.setdefault(key, {})
        if not isinstance(below, dict):
            return
        found = below
    found[path[-1]] = value


def _value(folder: Path, name: str, relative: str, offset: int, length: int) -> Any:
    path = folder / relative
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside or not 0 < length < MOST_VALUE or offset < 0:
        raise StateError(
            f"{folder / INDEX} is damaged: it says that {name} is at {offset} in {relative!r}; use another "
            "checkpoint",
            path=str(folder),
        )
    check_regular(path)
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    try:
        return load_torch(io.BytesIO(content))
    except StateError as error:
        raise StateError(f"{path}, {name}: {error}", path=str(path)) from None
