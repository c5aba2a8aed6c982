"""Hypothesis profiles, and which tests run when.

``pytest`` runs what takes seconds. ``pytest -m slow`` runs what takes minutes, and
``pytest -m nightly`` every Hypothesis property again, on a hundred times as many examples that are
different each time, and what ``check_resume`` resumes at few places, at all of them. ``make test-all`` runs
them all.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from torch.utils.data.dataloader import _BaseDataLoaderIter

import interpreters
from forked import in_child
from resuming import EVERYWHERE
from torch_settings import torch_as_before
from trainpipes._internal import messages, pool

NEVER_BY_ITSELF = ("slow", "nightly")
_folders = count()
GOLDEN = Path(__file__).parent / "golden"

unhurried = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
}
settings.register_profile("default", max_examples=8, derandomize=True, **unhurried)
settings.register_profile("nightly", max_examples=2000, derandomize=False, **unhurried)


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell starts what is in the background
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # and tests start processes to stop them
    if config.getoption("--hypothesis-profile", default=None) is None:
        nightly = "nightly" in config.getoption("markexpr", default="")
        settings.load_profile("nightly" if nightly else "default")
    if any(marker in config.getoption("markexpr", default="") for marker in NEVER_BY_ITSELF):
        EVERYWHERE.append(True)
    for name in ("COLUMNS", "LINES"):  # which processes of xdist have, and users mostly not
        os.environ.pop(name, None)
    if hasattr(config, "workerinput"):  # one process of xdist
        interpreters.SHARED[:] = config.workerinput["testrunuid"], os.getppid()
    # What processes that are not forked from here have, once for all of them.
    multiprocessing.set_forkserver_preload(
        [
            "torchdata.stateful_dataloader",
            "trainpipes.loader",
            "trainpipes.testing",
            "pyarrow.parquet",
        ]
    )
    # No test reads or leaves anything in the user's own cache.
    kept = TemporaryDirectory(prefix="trainpipes-cache-")
    config.add_cleanup(kept.cleanup)
    os.environ["TRAINPIPES_CACHE"] = kept.name
    gc.disable()  # until all tests are collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("markexpr", default="")
    _mark_beyond_samples(items)
    kept, skipped = [], []
    for item in items:
        if "nightly" in chosen and _is_drawn(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.nightly)
        out = any(item.get_closest_marker(m) and m not in chosen for m in NEVER_BY_ITSELF)
        (skipped if out else kept).append(item)
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        items[:] = kept


def _is_drawn(test: Any) -> bool:
    """Whether an ordinary run tries only some of its examples, or of its places."""
    code = getattr(test, "__code__", None)
    return is_hypothesis_test(test) or (code is not None and "check_resume" in code.co_names)


def _mark_beyond_samples(items: list[pytest.Item]) -> None:
    """Of tests with many parameters, alike in what they ask, all but some are slow ones."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in variants.values():
        marker = of_test[0].get_closest_marker("sample")
        assert marker is not None
        count, most = len(of_test), marker.args[0]
        kept = {round((n + 0.5) * count / most - 0.5) for n in range(min(most, count))}
        for number, item in enumerate(of_test):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What modules and tests hold stays to the end: half a million objects that no later collection looks
    at, which takes 0.2 s, and many tests ask for one."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that raise errors from a trace function in a process of their own, so that nothing they leave
    in the interpreter reaches another test.
    """
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    in_child(partial(pyfuncitem.obj, **given))
    return True


@pytest.fixture(autouse=True, scope="session")
def nobody_waits_for_the_disk() -> Iterator[None]:
    """What kills or interrupts a process loses nothing that it has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def golden() -> Callable[..., None]:
    """Asserts that what was found is what a file of ``golden`` holds, which must never change by accident: a
    saved run goes on with it. With ``TRAINPIPES_WRITE_GOLDEN=1`` it is written."""

    def same(name: str, found: dict[str, Any], *, whole: bool = True) -> None:
        path = GOLDEN / name
        kept = json.loads(path.read_text()) if path.exists() else {}
        if os.environ.get("TRAINPIPES_WRITE_GOLDEN"):
            kept = found | {key: kept[key] for key in kept if key == "about" or not whole}
            lines = [f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)]
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        assert {*found} == {*kept} - {"about"} or not whole
        for key, value in found.items():
            assert json.dumps(value) == json.dumps(kept[key]), key

    return same


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which looks at the folders of all tests before: there are thousands."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    found = tmp_path_factory.getbasetemp() / f"{name}{next(_folders)}"
    found.mkdir(mode=0o700)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests of a file."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(name="torch_as_before")
def kept_torch_settings() -> Iterator[None]:
    """For tests that train in this process."""
    with torch_as_before():
        yield


@pytest.fixture(autouse=True)
def workers_that_are_garbage_end() -> Iterator[None]:
    """An error that a test caught holds the loader that raised it in a circle, and that its workers, until
    the garbage collector comes by: minutes, in which other tests would count them."""
    before = set(multiprocessing.active_children())
    yield
    if set(multiprocessing.active_children()) - before:
        gc.collect()


@pytest.fixture
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has warnings come that this process has given, once the threads of earlier tests have done their
    tasks: one of these may be about to warn."""
    deadline = time.monotonic() + 10
    while any(running._running for running in list(pool._pools)) and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(messages, "_warned", set())


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Fails a test that leaves worker processes behind."""
    before = set(_workers())
    yield
    alive = [process for process in _workers() if process not in before]
    deadline = time.monotonic() + 60
    while alive and time.monotonic() < deadline:
        _, alive = psutil.wait_procs(alive, timeout=0.2)
        if alive:  # exceptions keep what raised them, for as long as a thread has them
            gc.collect()
    assert not alive


def _workers() -> list[psutil.Process]:
    """All processes below this one but those that multiprocessing keeps to its end."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            # What a fork server forks has its command line.
            keeps = "forkserver" in command and process.ppid() == os.getpid()
            if "resource_tracker" not in command and not keeps:
                found.append(process)
    return found


@pytest.fixture
def failed_workers_let_go(no_processes_left: None) -> Iterator[None]:
    """torch takes 5 seconds a worker to end an iterator that raised, where the garbage collector
    comes upon it: its queues are gone by then."""
    gc.disable()
    yield
    for found in gc.get_objects():
        if issubclass(type(found), _BaseDataLoaderIter) and hasattr(found, "_shutdown_workers"):
            found._shutdown_workers()
    gc.enable()
