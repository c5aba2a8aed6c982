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


def test_counts_of_processes_add_up() -> None:
    total = activity.Counts(threads={"pool": 2}, totals={"bytes": 1})
    total.add(activity.Counts(1.5, {"pool": {"map": [1.0, 0.5]}}, {"pool": 1}, totals={"hits": 2}))
    total.add(activity.Counts(1.0, {"pool": {"map": [2.0, 0.5]}}, totals={"bytes": 3}))
    assert total == activity.Counts(
        2.5, {"pool": {"map": [3.0, 1.0]}}, {"pool": 2}, totals={"bytes": 4, "hits": 2}
    )
