"""What holds for all tests of writers."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def nobody_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kills or interrupts a process loses nothing that it has written."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
