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
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/faults"))

from schemata import draw, instrument, judged, load, save  # noqa: E402

LIST = ROOT / "tests/faults/drawn.jsonl"
LIBRARY = ROOT / "pipes/trainpipes"
PYTEST = ["-q", "-p", "no:cacheprovider", "--timeout", "40"]
#: Of one process, and of several (``-n 3``).
PASSED = re.compile(r"^(tests/.*) PASSED|^\[gw\d+\] .*PASSED (tests/.*?) *$", re.M)
#: Seconds of short and of long tests for one fault, as they took in the record; seconds from which a test
#: is a long one; and seconds for the tests of one fault at most.
SECONDS, LONG, MOST = {False: 10.0, True: 10.0}, 0.7, 240
#: Faults tried at the same time; what is said of one whose tests took too long.
AT_A_TIME, OVER = 2, "over"


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
        # In processes that import the copy, once for all faults.
        folder, minutes = copied(Path(more[0]).resolve()), more[1] if more[1:] else "600"
        (folder / "results").mkdir(exist_ok=True)
        call = [sys.executable, "-W", "ignore", __file__, "forks", str(folder), minutes]
        runs = [
            subprocess.Popen([*call, str(turn)], cwd=ROOT, env=paths(folder))
            for turn in range(AT_A_TIME)
        ]
        for run in runs:
            run.wait()
        faults = load(LIST)
        for file in (folder / "results").glob("*.txt"):
            faults[int(file.stem)] = judged(faults[int(file.stem)], file.read_text())
        save(LIST, faults)
    elif what == "forks":
        forks(Path(more[0]), time.monotonic() + 60 * float(more[1]), int(more[2]))
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
    """The tests of each fault: the one that noticed it before, then short ones, of the fault's own room
    first, one of each file before a second one of any; then long ones.
    """
    record, seconds = folder / "record.txt", dict[str, float]()
    if record.exists():
        passed = {test for pair in PASSED.findall(record.read_text()) for test in pair if test}
        seconds = dict.fromkeys(passed, 0.1)
        for took, test in re.findall(r"^([\d.]+)s \w+ +(tests/.*)$", record.read_text(), re.M):
            seconds[test] = seconds.get(test, 0) + float(took)
    by = defaultdict[int, set[str]](set)
    for file in (folder / "hits").glob("*"):
        test = ""
        for line in file.read_text().splitlines():
            if line.startswith("tests/"):
                test = line
            elif test in seconds:
                for number in line.split():
                    by[int(number)].add(test)
    chosen: dict[int, list[str]] = {}
    for number, fault in enumerate(load(LIST)):
        by_file = defaultdict(list)
        for test in by[number]:
            by_file[test.split("::")[0]].append(test)
        turns = []
        for file, tests in by_file.items():
            tests.sort(key=seconds.__getitem__)
            away = f"/{fault.room}/" not in file
            turns += [
                ((seconds[test] > LONG, away, turn, seconds[test]), test)
                for turn, test in enumerate(tests)
            ]
        known = fault.noticed.startswith("tests/")
        chosen[number], left = [fault.noticed] if known else [], dict(SECONDS)
        for (is_long, *_), test in sorted(turns):
            left[is_long] -= seconds[test]
            if left[is_long] > 0 and test not in chosen[number]:
                chosen[number].append(test)
    return chosen


class Forks:
    """In place of a run of the collected tests: each fault, in a fork of the process that collected them."""

    def __init__(self, folder: Path, until: float, turn: int) -> None:
        self.folder, self.until, self.turn = folder, until, turn
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        chosen = plan(self.folder)
        numbers = json.loads((self.folder / "within.json").read_text())
        random.Random(0).shuffle(numbers)  # of all rooms, if the time is over before the end
        for number in numbers[self.turn :: AT_A_TIME]:
            done = self.folder / f"results/{number}.txt"
            tests = [items[test] for test in chosen[number] if test in items]
            if not tests or done.exists() or time.monotonic() > self.until:
                continue
            noticed = self.in_fork(number, tests)
            while noticed in items and self.in_fork(
                -1, [items[noticed]]
            ):  # it fails without it, too
                tests = tests[tests.index(items[noticed]) + 1 :]
                noticed = self.in_fork(number, tests)
            if noticed == OVER:
                continue
            done.write_text(noticed)
            print(number, noticed or "UNNOTICED", file=sys.__stderr__, flush=True)
        return True

    def in_fork(self, number: int, tests: list[pytest.Item]) -> str:
        """The first of the tests that fails with a fault on, or how that ends."""
        said = self.folder / f"said{self.turn}.txt"
        said.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os.setsid()
            out = os.open(os.devnull, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            torch.set_num_threads(1)  # the others stayed behind
            os.environ["FAULT"] = str(number)  # also for processes that it starts
            for test, after in zip(tests, [*tests[1:], None], strict=True):
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
                if self.failed:
                    break
            said.write_text(self.failed)
            os._exit(0)
        ends, gone = time.monotonic() + MOST, (0, 0)
        while not gone[0] and time.monotonic() < ends:
            time.sleep(0.02)
            gone = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it has left
        if not gone[0]:
            os.waitpid(child, 0)
        if said.exists():
            return said.read_text()
        return "the process of the tests ended" if gone[0] else OVER


def forks(folder: Path, until: float, turn: int) -> None:
    for name in ("torch.distributed", "torchdata.stateful_dataloader", "trainpipes.testing"):
        import_module(name)
    os.chdir(ROOT)
    pytest.main([*PYTEST, "tests"], [Forks(folder, until, turn)])


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
