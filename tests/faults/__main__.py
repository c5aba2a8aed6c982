"""Faults in the library's code, and whether the tests notice them.

python tests/faults record FOLDER [SEED [PYTEST…]]   draw faults, and find the tests that run the code of each
python tests/faults run FOLDER     for each fault, the tests that run its code, to the first that fails
python tests/faults table FOLDER   what was noticed, by area, and what was not

``run`` goes on where it was stopped. A fault that no test notices is either no fault (the code does the
same) or asks for a test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from schemata import draw, instrument, load, save

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
#: Files of each area, and the number of faults.
AREAS = {
    "order": (["order/*.py", "samplers/**/*.py"], 18),
    "state": (["state/**/*.py"], 16),
    "engine": (["engine/**/*.py", "loader/*.py", "pipeline/*.py"], 24),
    "stages": (["stages/**/*.py", "columns/**/*.py"], 26),
    "sources": (["sources/**/*.py"], 24),
    "writers": (["writers/**/*.py", "filesystems/*.py", "prepare/**/*.py"], 12),
}
#: Of one process, and of several (``-n 3``).
PASSED = re.compile(r"^(tests/.*) PASSED|^\[gw\d+\] .*PASSED (tests/.*?) *$", re.M)
#: Seconds of tests for one fault, as they took in the record.
SECONDS = 120


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    path = [str(folder / "pipes"), str(ROOT / "recipes")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    if what == "record":
        seed, *more = sys.argv[3:] or ["0"]
        library = ROOT / "pipes/trainpipes"
        drawn = draw(library, AREAS, seed)
        found = instrument(library, folder / "pipes/trainpipes", drawn)
        save(folder, found)
        print(f"{len(found)} faults are in the copy of the library")
        with (folder / "record.txt").open("w") as out:
            environment["FAULT_RECORD"] = str(folder / "hits")
            call = [*PYTEST, "-vv", "--durations=0", *more]
            subprocess.run(call, cwd=ROOT, env=environment, stdout=out, check=False)
    elif what == "run":
        for number, tests in plan(folder).items():
            result = folder / f"results/{number}.json"
            if not result.exists():
                result.parent.mkdir(exist_ok=True)
                noticed = run(tests, environment | {"FAULT": str(number)}, folder / "tests.txt")
                result.write_text(json.dumps({"noticed": noticed, "tests": len(tests)}))
                print(number, noticed or "UNNOTICED", flush=True)
    table(folder)


def plan(folder: Path) -> dict[int, list[str]]:
    """The tests of each fault: the shortest first, one of each file before a second one of any."""
    record = (folder / "record.txt").read_text()
    passed = {test for pair in PASSED.findall(record) for test in pair if test}
    seconds = dict.fromkeys(passed, 0.5)
    for took, test in re.findall(r"^([\d.]+)s \w+ +(tests/.*)$", record, re.M):
        seconds[test] = seconds.get(test, 0) + float(took)
    chosen: dict[int, list[str]] = {}
    for number in range(len(load(folder))):
        by_file = defaultdict(list)
        for hit in (folder / f"hits/{number}").glob("*"):
            if (test := hit.read_text().rsplit(" (", 1)[0]) in passed:
                by_file[test.split("::")[0]].append(test)
        turns = []
        for tests in by_file.values():
            tests.sort(key=seconds.__getitem__)
            turns += [(turn, seconds[test], test) for turn, test in enumerate(tests)]
        chosen[number], left = [], float(SECONDS)
        for _, took, test in sorted(set(turns)):
            left -= took
            if left > 0:
                chosen[number].append(test)
    return chosen


def run(tests: list[str], environment: dict[str, str], arguments: Path) -> str:
    """The test that fails, or nothing."""
    if not tests:
        return ""
    arguments.write_text("\n".join(tests))
    call = [*PYTEST, "-x", "--tb=no", f"@{arguments}"]
    try:
        ended = subprocess.run(
            call, cwd=ROOT, env=environment, timeout=4 * SECONDS, text=True, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return ""  # a test that hangs is ended by its own limit
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ended.stdout, re.M)
    return (failed or [f"ends with {ended.returncode}"])[0] if ended.returncode else ""


def table(folder: Path) -> None:
    of, noticed = Counter[str](), Counter[str]()
    for number, fault in enumerate(load(folder)):
        result = folder / f"results/{number}.json"
        if result.exists():
            said = json.loads(result.read_text())
            of[fault.area] += 1
            noticed[fault.area] += bool(said["noticed"])
            if not said["noticed"]:
                print(f"{number}: {fault.file}: {fault.function}: {fault.old}  ->  {fault.new}")
                print(f"    {said['tests']} tests run it")
    for area in of:
        print(f"{area:12} {noticed[area]:4} of {of[area]}")
    print(f"{'all':12} {noticed.total():4} of {of.total()}")


main()
