"""``check_resume`` from some places in an ordinary run, and from up to 200 in a slow or nightly one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trainpipes as tp
from trainpipes import testing

__all__ = ["EVERYWHERE", "check_resume"]

#: Whether this run has the time; conftest.py says so.
EVERYWHERE: list[bool] = []


def check_resume(
    subject: tp.Pipeline | Callable[[], Any], *, points: int = 5, **options: Any
) -> testing.ResumeReport:
    """``trainpipes.testing.check_resume`` from so many ``points`` in an ordinary run: the first, the last,
    and others that are always the same."""
    return testing.check_resume(subject, points=200 if EVERYWHERE else points, **options)
