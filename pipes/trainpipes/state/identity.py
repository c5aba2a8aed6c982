"""What a state says of its pipeline, compared with the one that loads it."""

from __future__ import annotations

import json
from typing import Any

from trainpipes._internal.checks import pip_install
from trainpipes._internal.text import cut, shown
from trainpipes.errors import StateError

_CURES = {
    "data": "load the state with the files it was saved with, or start a new run",
    "stages": "build the pipeline as it was when the state was saved, or start a new run",
}
#: Characters of each of two values that differ.
MOST = 200


def check_identity(saved: str, present: str) -> None:
    """Raise StateError with the first difference of two pipelines."""
    if saved == present:
        return
    before, now = json.loads(saved), json.loads(present)
    stages = [s["stage"] for s in before["stages"]], [s["stage"] for s in now["stages"]]
    if stages[0] != stages[1]:
        chains = [cut(" -> ".join(names), 300) for names in stages]
        raise StateError(
            f"stages: saved {chains[0]}, now {chains[1]}; a state belongs to the pipeline that "
            f"saved it: {_CURES['stages']}"
        )
    found = named_difference(before, now)
    if found is None:  # the same in another spelling
        return
    path, old, new = found
    which = other_file(before, now, path)
    cure = _CURES.get(path.split("/")[0], _CURES["stages"])
    if path.endswith("/engine") and old == "gigatoken":
        install = pip_install("gigatoken")
        cure = f'leave engine="tokenizers" out, with gigatoken installed: {install}'
    elif path.endswith("/engine") and new == "gigatoken":
        cure = 'write tokenize(..., engine="tokenizers")'
    if stages[1][:1] == ["mix"] and path.startswith(("data/sources", "stages/mix/")):
        cure += "; what is mixed, and how, may change with load_state_dict(state, allow_changes=['mix'])"
    raise StateError(f"{cut(path)}: saved {said(old)}, now {said(new)}{which}; {cure}")


def other_file(before: Any, now: Any, path: str) -> str:
    """Which file differs, where there are as many files, each with a digest of its own."""
    for key in path.split("/")[:-1]:
        if isinstance(before, dict) and "digests" in before:
            break
        before, now = (one.get(key) if isinstance(one, dict) else None for one in (before, now))
    try:
        pairs = list(zip(before["digests"], now["digests"], strict=True))
        if len(pairs) != before["files"]:
            return ""
    except (KeyError, TypeError, ValueError):
        return ""
    number = next((n for n, (old, new) in enumerate(pairs, 1) if old != new), 0)
    return f" (file {number} of {len(pairs)} is not the saved one)" if number else ""


def named_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """``first_difference`` of two identities, with the stage's name in the path."""
    found = first_difference(before, now)
    if found is None:
        return None
    parts = found[0].split("/")
    if parts[0] == "stages" and len(parts) > 1 and int(parts[1]) < len(before["stages"]):
        parts[1] = before["stages"][int(parts[1])]["stage"]
    return "/".join(parts), found[1], found[2]


def first_difference(saved: Any, present: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Path of the first leaf in which two values of JSON types differ, and both.

    >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
    ('a/1', 2, 3)
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in [*saved, *(k for k in present if k not in saved)]:
            below = f"{path}/{key}" if path else str(key)
            found = first_difference(saved.get(key), present.get(key), below)
            if found:
                return found
        return None
    if isinstance(saved, list) and isinstance(present, list):
        for number in range(max(len(saved), len(present))):
            old, new = (v[number] if number < len(v) else None for v in (saved, present))
            found = first_difference(old, new, f"{path}/{number}")
            if found:
                return found
        return None
    return None if saved == present and type(saved) is type(present) else (path, saved, present)


def said(value: Any) -> str:
    try:
        return cut(json.dumps(cut(value, MOST) if isinstance(value, str) else value), MOST)
    except (RecursionError, ValueError):
        return shown(value)
