"""What torchdata's loader asks of a node: to save and load at any place, for as many epochs as one likes.

The places are those of ``pytorch/data``'s own shared test (the middle and the end of an epoch, the epoch
after, both kinds of restart, one node used all along), and those that it leaves out: before and after
every item of three epochs, two epochs on, a fresh node, the same state twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from torchdata.nodes import BaseNode, Loader

from trainpipes.testing import digest

__all__ = ["Make", "Recorded", "check_contract", "record"]

#: Makes a fresh node, the same each time.
Make: TypeAlias = Callable[[], BaseNode[Any]]

#: Epochs whose states are loaded, and those that follow.
SAVED, FOLLOWING = 2, 2


class Recorded:
    """A run that nothing interrupts.

    Attributes:
        items: of each epoch, as digests.
        states: of each epoch, before every item and after the last.
    """

    def __init__(self) -> None:
        self.items: list[list[str]] = []
        self.states: list[list[Any]] = []


def given(loader: Loader[Any]) -> list[str]:
    return [digest(item) for item in loader]


def record(make: Make) -> Recorded:
    """Three epochs with states, and one more."""
    found = Recorded()
    loader = Loader(make())
    for _ in range(SAVED):
        epoch = iter(loader)
        items: list[str] = []
        states = [copy.deepcopy(loader.state_dict())]
        for item in epoch:
            items.append(digest(item))
            states.append(copy.deepcopy(loader.state_dict()))
        states[-1] = copy.deepcopy(loader.state_dict())  # now it is known to be the last
        found.items.append(items)
        found.states.append(states)
    found.items += [given(loader) for _ in range(FOLLOWING)]
    return found


def wanted(run: Recorded, epoch: int, taken: int, restart: bool) -> list[list[str]]:
    """What is left after so many items of an epoch, and the two epochs that follow."""
    rest = run.items[epoch][taken:]
    if not rest and restart:  # a loader that restarts goes on with the next epoch
        return run.items[epoch + 1 : epoch + 3]
    return [rest, *run.items[epoch + 1 : epoch + 3]]


def check_contract(make: Make, every: int = 1) -> None:
    """Save and load a chain at all places, in fresh nodes and in one that lives on.

    Args:
        make: makes the chain.
        every: load the states before every n-th item only, in turn with a loader that restarts and with one
            that does not, and that at the end of an epoch with both.
    """
    whole = Loader(make())
    run = record(make)
    assert run.items == [given(whole) for _ in run.items], "to take a state changes nothing"
    assert all(run.items)

    start = Loader(make())
    before = copy.deepcopy(start.state_dict())
    assert given(start) == run.items[0], "a state before the first item uses up nothing"
    living = make()
    for restart in (True, False):
        for epoch, states in enumerate(run.states):
            for taken, state in enumerate(states):
                turn = every == 1 or (taken // every + restart) % 2 == 0
                if (taken % every or not turn) and taken < len(states) - 1:
                    continue
                check_place(make, living, run, (epoch, taken), state, restart)
        loader = Loader(living, restart_on_stop_iteration=restart)
        loader.load_state_dict(copy.deepcopy(before))
        assert given(loader) == run.items[0], "the state before the first item, loaded at the end"


def check_place(
    make: Make,
    living: BaseNode[Any],
    run: Recorded,
    place: tuple[int, int],
    state: Any,
    restart: bool,
) -> None:
    """Load one state: in a fresh node, in turn once only and once more, and in the one that lives on."""
    right = wanted(run, *place, restart)
    label = f"epoch {place[0]}, item {place[1]}, restart {restart}"
    nodes = {"a node used before": living}
    if (place[0] + restart) % 2:
        nodes["a fresh node"] = make()
    else:
        loader = Loader(make(), restart_on_stop_iteration=restart)
        loader.load_state_dict(copy.deepcopy(state))
        for _ in zip(range(2), loader, strict=False):
            pass
        loader.load_state_dict(copy.deepcopy(state))
        assert [given(loader) for _ in right] == right, f"{label}, the second time"
    for name, node in nodes.items():
        loader = Loader(node, restart_on_stop_iteration=restart)
        loader.load_state_dict(copy.deepcopy(state))
        assert [given(loader) for _ in right] == right, f"{label}, {name}"
