"""Whether two pipelines are the same: equal, with the same fingerprint, batches and states."""

from __future__ import annotations

from itertools import islice
from typing import Any

import trainpipes as tp
from trainpipes.interfaces.options import same

__all__ = ["assert_same", "first_items"]


def first_items(pipe: tp.Pipeline, count: int) -> tuple[list[Any], list[Any]]:
    """The first items of a pipeline, and its state after each."""
    iterator = iter(pipe)
    items, states = [], []
    for item in islice(iterator, count):
        items.append(item)
        states.append(iterator.state_dict())
    return items, states


def assert_same(one: tp.Pipeline, other: tp.Pipeline, items: int = 5) -> None:
    """Raise unless they are.

    Args:
        one: a pipeline.
        other: another one.
        items: how many are compared, and where the other goes on after the first two of one.
    """
    assert other == one
    told, wanted = other.explain().to_dict(), one.explain().to_dict()
    assert told["fingerprint"] == wanted["fingerprint"]
    assert told["stages"] == wanted["stages"]
    given, states = first_items(tp.Pipeline(one.stages), items)
    found, _ = first_items(tp.Pipeline(other.stages), items)
    assert len(given) == len(found) > 0
    assert all(map(same, given, found))
    resumed = tp.Pipeline(other.stages)
    resumed.load_state_dict(states[min(1, len(states) - 1)])
    rest, _ = first_items(resumed, items - 2)
    assert all(map(same, given[2:], rest))
