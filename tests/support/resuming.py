"""``check_resume`` from some places in an ordinary run, and from up to 200 in a slow or nightly one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import trainpipes as tp
from trainpipes import testing
from trainpipes.testing import digest

__all__ = ["EVERYWHERE", "check_resume", "goes_on_exactly"]

#: Whether this run has the time; conftest.py says so.
EVERYWHERE: list[bool] = []


def check_resume(
    subject: tp.Pipeline | Callable[[], Any], *, points: int = 5, **options: Any
) -> testing.ResumeReport:
    """``trainpipes.testing.check_resume`` from so many ``points`` in an ordinary run: the first, the last,
    and others that are always the same."""
    return testing.check_resume(subject, points=200 if EVERYWHERE else points, **options)


def goes_on_exactly(make: Callable[[], Any], *, epochs: int = 2) -> int:
    """Assert that a run that goes on in a fresh pipeline or loader, from within and from the end of each
    epoch, gives what one gives that is left alone: in half the time of ``check_resume``, which also tries
    the same state twice. Gives how many items an epoch has.
    """
    alone = make()
    whole = [[digest(item) for item in alone] for _ in range(epochs)]
    state: Any = None

    def part(most: int | None) -> list[str]:
        nonlocal state
        pipe = make()
        if state is not None:
            pipe.load_state_dict(state)
        items = [digest(item) for item in islice(pipe, most)]
        state = json.loads(json.dumps(pipe.state_dict()))
        return items

    for number, items in enumerate(whole):
        assert items, "nothing to go on with"
        within = len(items) * (3 + 2 * number) // 8  # no half, where windows may end
        within = min(max(1, within), len(items) - 1)  # an epoch of one item has no place within
        found = (part(within) if within else []) + part(None)
        assert found == items, f"epoch {number}"
    return len(whole[0])
