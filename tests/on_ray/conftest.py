"""Ray clusters for the tests: real ones, of several processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before ray is imported: nothing is told to anybody, and no tokens are kept in the user's home.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster on this machine that this process has joined, with room for four tasks at a time."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
