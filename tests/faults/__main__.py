"""Faults in the library's code, and whether the tests notice them.

python -m tests.faults draw COUNT [SEED]        so many more faults of each room into the list
python -m tests.faults record FOLDER [PYTEST…]  the tests that run the code of each: of all tests, or of some
python -m tests.faults run FOLDER [MINUTES]     each fault, and the tests that run its code till one fails
python -m tests.faults table                    what was noticed, by room, and what was not

The list is ``drawn.jsonl``, with the test that noticed each, which is tried first the next time: to run a
list that was run before, no ``record`` is needed. A fault that no test notices is either none (the code does
the same: say so in its ``why``), or asks for a test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/faults"))

from schemata import draw, instrument, judged, load, save  # noqa: E402

LIST = ROOT / "tests/faults/drawn.jsonl"
LIBRARY = ROOT / "pipes/trainpipes"
PYTEST = ["-q", "-p", "no:cacheprovider", "--timeout", "120"]
#: Of one process, and of several (``-n 3``).
PASSED = re.compile(r"^(tests/.*) PASSED|^\[gw\d+\] .*PASSED (tests/.*?) *$", re.M)
#: Seconds of tests for one fault, as they took in the record, and how many are run together.
SECONDS, AT_ONCE = 60, 8


def main() -> None:
    what, *more = sys.argv[1:]
    if what == "draw":
        faults = load(LIST) if LIST.exists() else []
        known = {fault.code for fault in faults}
        drawn = draw(LIBRARY, int(more[0]), more[1] if more[1:] else str(len(faults)))
        save(LIST, faults + [fault for fault in drawn if fault.code not in known])
    elif what == "record":
        folder = copied(Path(more[0]).resolve())
        with (folder / "record.txt").open("w") as out:
            call = [sys.executable, "-m", "pytest", *PYTEST, "-vv", "--durations=0", *more[1:]]
            environment = paths(folder) | {"FAULT_RECORD": str(folder / "hits")}
            subprocess.run(call, cwd=ROOT, env=environment, stdout=out, check=False)
    elif what == "run":
        # In a process that imports the copy, once for all faults.
        folder, minutes = copied(Path(more[0]).resolve()), more[1] if more[1:] else "600"
        call = [sys.executable, "-W", "ignore", __file__, "forks", str(folder), minutes]
        subprocess.run(call, cwd=ROOT, env=paths(folder), check=True)
    elif what == "forks":
        forks(Path(more[0]), time.monotonic() + 60 * float(more[1]))
    table()


def paths(folder: Path) -> dict[str, str]:
    """The environment in which the library is the copy."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "pipes"), str(ROOT / "recipes")])
    }


def copied(folder: Path) -> Path:
    """Make the copy, with all faults of the list in it."""
    found = instrument(LIBRARY, folder / "pipes/trainpipes", load(LIST))
    (folder / "within.json").write_text(json.dumps(sorted(found)))
    return folder


def plan(folder: Path) -> dict[int, list[str]]:
    """The tests of each fault: the one that noticed it before, then the shortest first, one of each file
    before a second one of any.
    """
    record, seconds = folder / "record.txt", dict[str, float]()
    if record.exists():
        passed = {test for pair in PASSED.findall(record.read_text()) for test in pair if test}
        seconds = dict.fromkeys(passed, 0.5)
        for took, test in re.findall(r"^([\d.]+)s \w+ +(tests/.*)$", record.read_text(), re.M):
            seconds[test] = seconds.get(test, 0) + float(took)
    chosen: dict[int, list[str]] = {}
    for number, fault in enumerate(load(LIST)):
        by_file = defaultdict(list)
        for hit in (folder / f"hits/{number}").glob("*"):
            if (test := hit.read_text().rsplit(" (", 1)[0]) in seconds:
                by_file[test.split("::")[0]].append(test)
        turns = []
        for tests in by_file.values():
            tests.sort(key=seconds.__getitem__)
            turns += [(turn, seconds[test], test) for turn, test in enumerate(tests)]
        known = fault.noticed.startswith("tests/")
        chosen[number], left = [fault.noticed] if known else [], float(SECONDS)
        for _, took, test in sorted(set(turns)):
            left -= took
            if left > 0 and test not in chosen[number]:
                chosen[number].append(test)
    return chosen


class First:
    """Of a run of pytest: the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")


def forks(folder: Path, until: float) -> None:
    """Each fault in a fork of this process, until the time is over."""
    for name in ("torch.distributed", "torchdata.stateful_dataloader", "trainpipes.testing"):
        import_module(name)
    os.chdir(ROOT)
    chosen = plan(folder)
    for number in json.loads((folder / "within.json").read_text()):
        done = folder / f"results/{number}.txt"
        if not chosen[number] or done.exists() or time.monotonic() > until:
            continue
        noticed = in_fork(number, chosen[number], folder)
        if noticed.startswith("tests/") and in_fork(-1, [noticed], folder):
            noticed = ""  # it fails without a fault, too
        done.parent.mkdir(exist_ok=True)
        done.write_text(noticed)
        faults = load(LIST)
        faults[number] = judged(faults[number], noticed)
        save(LIST, faults)
        print(number, noticed or "UNNOTICED", flush=True)


def in_fork(number: int, tests: list[str], folder: Path) -> str:
    """The first of the tests that fails in a fork of this process, with a fault on, or how that ends."""
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        switch: Any = import_module("trainpipes._faults")
        switch.ACTIVE, first, code = number, First(), 0
        os.environ["FAULT"] = str(number)  # for processes that it starts
        for start in range(0, len(tests), AT_ONCE):  # a file takes time to import, too
            some = tests[start : start + AT_ONCE]
            code = code or int(pytest.main([*PYTEST, "-x", "--tb=short", *some], [first]))
        said.write_text(first.failed or (f"ends with {code}" if code else ""))
        sys.stdout.flush()
        os._exit(0)
    ends, gone = time.monotonic() + 4 * SECONDS, (0, 0)
    while not gone[0] and time.monotonic() < ends:
        time.sleep(0.05)
        gone = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it has left
    if not gone[0]:
        os.waitpid(child, 0)
    if said.exists():
        return said.read_text()
    return "the process of the tests ended" if gone[0] else ""  # a test's own limit ends what hangs


def table() -> None:
    of, noticed, asked = Counter[str](), Counter[str](), 0
    for number, fault in enumerate(load(LIST)):
        of[fault.room] += 1
        noticed[fault.room] += bool(fault.noticed)
        if not fault.noticed:
            asked += not fault.why
            print(f"{number}: {fault.file}: {fault.function}: {fault.old}  ->  {fault.new}")
            print(f"    {fault.why or 'asks for a test, or was not run'}")
    for room in sorted(of):
        print(f"{room:16} {noticed[room]:4} of {of[room]}")
    print(f"{'all':16} {noticed.total():4} of {of.total()}; {asked} without a word")


main()
