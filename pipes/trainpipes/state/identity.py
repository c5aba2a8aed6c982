"""What a state says of its pipeline, compared with the one that loads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from trainpipes._internal.checks import pip_install
from trainpipes.errors import StateError
from trainpipes.errors.text import cut, shown

_CURES = {
    "data": "load the state with the files it was saved with, or start a new run",
    "order": "; as names and row counts are the same, load_state_dict(state, allow_changes=['data']) goes on",
    "stages": "build the pipeline as it was when the state was saved, or start a new run",
}
#: Options that may change, by their paths, and what ``allow_changes`` calls them.
_MAY_CHANGE = {
    "stages/batch/batch_size": "batch_size",
    "stages/pack/max_length": "pack_length",
    "data/version": "version",
}
#: Characters of each of two values that differ.
MOST = 200


#: The name of a file by its number, of the source below which others it is found by these keys.
FileName = Callable[[int, Sequence[str]], str]


def check_identity(saved: str, present: str, file_name: FileName = lambda *_: "") -> None:
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
    difference = named_difference(before, now)
    if difference is None:  # the same in another spelling
        return
    path, old, new = difference
    which, same_order = other_file(before, now, path, file_name)
    cure = _CURES.get(path.split("/")[0], _CURES["stages"]) + same_order * _CURES["order"]
    if path.endswith("/engine") and old == "gigatoken":
        install = pip_install("gigatoken")
        cure = f'leave engine="tokenizers" out, with gigatoken installed: {install}'
    elif path.endswith("/engine") and new == "gigatoken":
        cure = 'write tokenize(..., engine="tokenizers")'
    if path in _MAY_CHANGE and old is not None is not new:
        cure = f"load_state_dict(state, allow_changes=['{_MAY_CHANGE[path]}']) goes on with {said(new)}"
    if stages[1][:1] == ["mix"] and path.startswith(("data/sources", "stages/mix/")):
        cure += "; what is mixed, and how, may change with load_state_dict(state, allow_changes=['mix'])"
    raise StateError(f"{cut(path)}: saved {said(old)}, now {said(new)}{which}; {cure}")


def other_file(before: Any, now: Any, path: str, file_name: FileName) -> tuple[str, bool]:
    """Which file differs, or which few of many that share a digest, where there are as many files; and
    whether all have the names and rows that they had.
    """
    keys = path.split("/")
    try:
        while "digests" not in before:
            key, *keys = keys
            at: Any = int(key) if isinstance(before, list) else key
            before, now = before[at], now[at]
        parts = [
            part["content"]["of"] if "of" in keys else part["digests"] for part in (before, now)
        ]
        count, pairs = before["files"], list(zip(*parts, strict=True))
        group = next(n for n, (old, new) in enumerate(pairs) if old != new)
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        return "", False
    first, last = count * group // len(pairs), count * (group + 1) // len(pairs) - 1
    which = f"file {first + 1}" if first == last else f"one of the files {first + 1} to {last + 1}"
    sources = path.split("/")[1 : -len(keys)]
    names = dict.fromkeys(file_name(n, sources[1::2]) for n in (first, last))
    named = f": {' to '.join(names)}" if all(names) else ""
    same_order = before.get("order") == now.get("order")
    return f" ({which} of {count} is not the saved one{named})", same_order


def named_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """``first_difference`` of two identities, with the stage's name in the path."""
    difference = first_difference(before, now)
    if difference is None:
        return None
    parts = difference[0].split("/")
    if parts[0] == "stages" and len(parts) > 1 and int(parts[1]) < len(before["stages"]):
        parts[1] = before["stages"][int(parts[1])]["stage"]
    return "/".join(parts), difference[1], difference[2]


def first_difference(saved: Any, present: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Path of the first leaf in which two values of JSON types differ, and both.

    >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
    ('a/1', 2, 3)
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in [*saved, *(k for k in present if k not in saved)]:
            below = f"{path}/{key}" if path else str(key)
            old, new = saved.get(key), present.get(key)
            difference = None if _known_otherwise(old, new) else first_difference(old, new, below)
            if difference:
                return difference
        return None
    if isinstance(saved, list) and isinstance(present, list):
        for number in range(max(len(saved), len(present))):
            old, new = (v[number] if number < len(v) else None for v in (saved, present))
            difference = first_difference(old, new, f"{path}/{number}")
            if difference:
                return difference
        return None
    return None if saved == present and type(saved) is type(present) else (path, saved, present)


def _known_otherwise(saved: Any, present: Any) -> bool:
    """Whether these are digests of files' content by other means, as of another URL: none to compare."""
    by = [
        side["by"]
        for side in (saved, present)
        if isinstance(side, dict) and {*side} == {"by", "of"}
    ]
    return len({*by}) == 2 or (len(by) == 1 and None in (saved, present))


def take_over(saved: Any, present: Any) -> None:
    """Put what files hold now into a saved identity, where their names and rows are the same."""
    if isinstance(saved, dict) and isinstance(present, dict):
        if "order" in saved and saved["order"] == present.get("order"):
            saved.update({key: present.get(key) for key in ("bytes", "digests", "content")})
        for key in saved.keys() & present.keys():
            take_over(saved[key], present[key])
    elif isinstance(saved, list) and isinstance(present, list):
        for old, new in zip(saved, present, strict=False):
            take_over(old, new)


def said(value: Any) -> str:
    try:
        return cut(json.dumps(cut(value, MOST) if isinstance(value, str) else value), MOST)
    except (RecursionError, ValueError):
        return shown(value)
