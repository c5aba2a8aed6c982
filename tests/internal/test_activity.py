"""What threads are doing: a process that is forked meanwhile begins with nothing of it."""

from __future__ import annotations

import pytest

from forked import in_child
from trainpipes._internal import activity


def test_a_fork_knows_nothing_of_the_threads_that_stayed_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activity, "is_on", True)
    monkeypatch.setattr(activity, "slots", [activity.Slot()])
    monkeypatch.setattr(activity, "from_workers", [{"requests": 1}])
    found = in_child(lambda: (activity.is_on, len(activity.slots), len(activity.from_workers)))
    assert found == (False, 1, 0)  # that of its own thread
