"""For pytest: run, for each fault, the tests that come by it, to the first that fails.

All is collected once, without a fault; each fault gets a process forked from there. And where the tests
that come by each fault are to be found out: their seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NUMBERS = os.environ.get("FAULT_NUMBERS")
RESULTS = Path(os.environ.get("FAULT_RESULTS", "."))
#: Seconds for the tests of one fault, and of them for one test.
LIMIT = float(os.environ.get("FAULT_SECONDS", 240))


def _seconds() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began, used = time.monotonic(), _seconds()
    found: Any = yield
    if NUMBERS is None and os.environ.get("FAULT_RECORD"):
        file = Path(os.environ["FAULT_RECORD"]) / f"seconds-{os.getpid()}.txt"
        with file.open("a") as out:
            out.write(json.dumps([item.nodeid, _seconds() - used, time.monotonic() - began]) + "\n")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if NUMBERS is None:
        return None
    plan = json.loads(Path(NUMBERS).read_text())
    items = {item.nodeid: item for item in session.items}
    for number, tests in plan.items():
        result = RESULTS / f"{number}.json"
        if result.exists():
            continue
        chosen = [items[test] for test in tests if test in items]
        began = time.monotonic()
        child = os.fork()
        if not child:
            os.setsid()
            _run(session, int(number), chosen, result)
            os._exit(0)
        status = None
        while time.monotonic() - began < LIMIT + 30:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not result.exists():  # it hung, or its process died: both are noticed
            why = "it never ends" if status is None else "its process died"
            result.write_text(json.dumps({"noticed": why, "tests": len(chosen)}))
        said = json.loads(result.read_text())
        print(f"\nfault {number}: {said['noticed'] or 'UNNOTICED'}", file=sys.stderr, flush=True)
    return True


def _run(session: pytest.Session, number: int, chosen: list[pytest.Item], result: Path) -> None:
    os.environ["FAULT"] = str(number)
    from trainpipes import _faults

    _faults.ACTIVE = number
    failed: list[str] = []
    hook = session.config.hook

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(f"{report.nodeid} ({report.when})")

    session.config.pluginmanager.register(Watch())
    began = time.monotonic()
    run = 0
    for place, item in enumerate(chosen):
        after = chosen[place + 1] if place + 1 < len(chosen) else None
        hook.pytest_runtest_protocol(item=item, nextitem=after)
        run += 1
        if failed or time.monotonic() - began > LIMIT:
            break
    told = {"noticed": failed[0] if failed else "", "tests": run, "of": len(chosen)}
    result.write_text(json.dumps(told | {"seconds": round(time.monotonic() - began, 1)}))
