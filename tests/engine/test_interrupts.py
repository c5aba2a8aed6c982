"""Ctrl-C at any call of ours within ``next``: the state says where the loop is, and the loop can go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes._internal.pool import Pool
from trainpipes.testing import digest

OURS = str(Path(tp.__file__).parent)


def rows() -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(160)})).sharding_filter(4).shuffle(20, seed=1)


PIPES: dict[str, Callable[[], tp.Pipeline]] = {
    "counted": lambda: rows().batch(4).collate(),
    "not counted": lambda: rows().filter(lambda row: row["x"] >= 0).batch(4),
}


def digests(items: Any) -> list[str]:
    return [digest(item) for item in items]


def is_interrupted(items: Iterator[Any], call: int) -> bool | None:
    """Ask for an item, and interrupt the call-th call of ours; None if there are not so many. Python only
    reports what is raised as a generator closes.
    """
    made = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal made
        code = frame.f_code
        if code.co_qualname == "_SharedLock.__exit__":  # once this process was forked: not mended
            return
        if event == "call" and code.co_filename.startswith(OURS):
            made += 1
            if made == call:
                raise KeyboardInterrupt

    sys.settrace(look)
    try:
        next(items)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False if made >= call else None


# One that is raised in a generator's close is only reported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", PIPES)
def test_no_batch_is_lost_and_none_comes_twice(name: str, loaded: bool, threads: int) -> None:
    make, done = PIPES[name], 13 if loaded else 0
    expected = digests(tp.Loader(make(), threads=0))[done:]
    before = tp.Loader(make(), threads=0)
    for _, _ in zip(range(done), before, strict=False):
        pass
    for given in (0, 7):  # in the first one an epoch begins, and in later ones windows do
        for call in count(1, 1 if given else 3):
            loader = tp.Loader(make(), threads=threads)
            loader.load_state_dict(before.state_dict())
            batches = iter(loader)
            assert [digest(next(batches)) for _ in range(given)] == expected[:given]
            if (interrupted := is_interrupted(batches, call)) is None:
                break
            left = expected[given + (not interrupted) :]
            again = tp.Loader(make(), threads=0)
            again.load_state_dict(loader.state_dict())
            assert (call, digests(again)) == (call, left)
            assert (call, digests(batches)) == (call, left)
        assert call > (4 if given else 40)


def test_a_run_of_items_that_has_begun_in_a_thread_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, begin, left = digests(PIPES["counted"]()), Pool.begin, 0

    def interrupted(self: Pool, *what: Any) -> None:
        nonlocal left
        begin(self, *what)
        left -= 1
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(Pool, "begin", interrupted)
    for first in range(1, 12):
        left = first
        batches, found = iter(tp.Loader(PIPES["counted"](), threads=2)), list[str]()
        while True:
            try:
                found.append(digest(next(batches)))
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        assert found == expected
