"""Where in the dicts and lists of a checkpoint states of ours are."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainpipes.errors import StateError
from trainpipes.foreign_state import is_stateful_data_loaders
from trainpipes.merge import states_within

__all__ = ["FoundState", "states_in"]

#: Dicts and lists that are looked into, entries of one of them, and how far down.
MOST_LOOKED_INTO = 200_000
MOST_ENTRIES = 100_000
MOST_DEEP = 40
#: Places at which an object is told that is at several.
MOST_PLACES = 8


@dataclass(frozen=True)
class FoundState:
    """A state of ours in a checkpoint.

    Args:
        path: the file, or the folder of ``torch.distributed.checkpoint``.
        keys: where in it, as it is written in Python: ``["loader"]``; "" for the whole file.
        states: one, or one of each worker of a ``StatefulDataLoader``.
        kept_by: what keeps them: "", "StatefulDataLoader", or "datasets" for ``pipe.to_hf()``.
        problem: why it cannot be read.
    """

    path: str
    keys: str = ""
    states: tuple[Mapping[str, Any], ...] = ()
    kept_by: str = ""
    problem: str = ""

    @property
    def where(self) -> str:
        """File and keys in one text."""
        return f"{self.path} {self.keys}" if self.keys else self.path


def states_in(value: Any, path: str) -> Iterator[FoundState]:
    """The states in a value, the outermost first; of a ``StatefulDataLoader`` those of its workers as one.

    Args:
        value: what a file holds.
        path: the file.
    """
    waiting: deque[tuple[str, tuple[int, ...], Any]] = deque([("", (), value)])
    seen: Counter[int] = Counter()
    looked = 0
    while waiting and looked < MOST_LOOKED_INTO:
        keys, above, one = waiting.popleft()
        if id(one) in above or seen[id(one)] == MOST_PLACES:
            continue
        seen[id(one)] += 1
        looked += 1
        found = _found(one, path, keys)
        if found is not None:
            yield found
            continue
        if len(above) < MOST_DEEP:
            waiting += [
                (f"{keys}[{_key(key)}]", (*above, id(one)), below)
                for key, below in _entries(one)
                if isinstance(below, Mapping | list | tuple)
            ]


def _found(value: Any, path: str, keys: str) -> FoundState | None:
    """A state that starts here."""
    if not isinstance(value, Mapping):
        return None
    if "trainpipes" in value and "m" in value:
        return FoundState(path, keys, (value,))
    text = _text_of_rows(value)
    if text is not None:
        return FoundState(path, keys, (text,), "datasets")
    if is_stateful_data_loaders(value):
        below = [one for _, inner in _entries(value) for one in states_in(inner, path)]
        states = tuple(state for one in below for state in one.states)
        if not states:
            return None
        problem, kept_by = "", "StatefulDataLoader"
        if below[0].kept_by == "datasets":
            kept_by = "datasets"
        else:
            try:
                states = tuple(states_within(value))
            except StateError as error:
                problem = str(error)
        return FoundState(path, keys, states, kept_by, problem)
    return None


def _text_of_rows(value: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """The state in that of a dataset of ``pipe.to_hf()``, where it is a text."""
    text = value.get("trainpipes")
    if not isinstance(text, str) or value.keys() != {"trainpipes", "type"}:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "trainpipes" in found else None


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return islice(value.items(), MOST_ENTRIES)
    if isinstance(value, list | tuple):
        return enumerate(islice(value, MOST_ENTRIES))
    return iter(())


def _key(key: Any) -> str:
    return json.dumps(key) if isinstance(key, str) else repr(key)[:80]
