"""Faults in the library's code, and whether the tests notice them.

python tests/faults record FOLDER       run all tests, and write down which come by each fault; minutes
python tests/faults run FOLDER          for each fault, the tests that come by it, to the first that fails
python tests/faults table FOLDER        what was noticed, by area, and what was not
python tests/faults lost                the faults whose code is no more

The list, ``faults.json``, was drawn once. Where code is rewritten, an entry is written anew by
hand: a fault like it, in the code that does the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from schemata import faults, instrument

ROOT = Path(__file__).resolve().parents[2]
AREAS = {}  # draw()


def main() -> None:
    what, *more = sys.argv[1:]
    if what == "lost":
        with tempfile.TemporaryDirectory() as folder:
            for number in instrument(
                ROOT / "pipes/trainpipes", Path(folder) / "trainpipes", faults()
            ):
                print(number, faults()[number])
        return
    folder = Path(more[0]).resolve()
    if what == "table":
        table(folder)
        return
    source = folder / "pipes" / "trainpipes"
    if what == "record" or not source.exists():
        lost = instrument(ROOT / "pipes/trainpipes", source, faults())
        print(f"{len(faults()) - len(lost)} faults are in the copy; not found: {lost}")
    hits = folder / "hits"
    hits.mkdir(parents=True, exist_ok=True)
    path = [str(folder / "pipes"), str(ROOT / "recipes"), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    call = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
    if what == "record":
        environment["FAULT_RECORD"] = str(hits)
        call += ["-n", "2", "--timeout", "600", *more[1:]]
        subprocess.run(call, cwd=ROOT, env=environment, check=False)
        return
    results = folder / "results"
    results.mkdir(exist_ok=True)
    halves = plan(folder)
    running = []
    for half, chosen in enumerate(halves):
        numbers = folder / f"plan-{half}.json"
        numbers.write_text(json.dumps(chosen))
        files = sorted({test.split("::")[0] for tests in chosen.values() for test in tests})
        own = environment | {"FAULT_NUMBERS": str(numbers), "FAULT_RESULTS": str(results)}
        running.append(
            subprocess.Popen([*call, *files], cwd=ROOT, env=own, stdout=subprocess.DEVNULL)
        )
    for one in running:
        one.wait()
    table(folder)


def plan(folder: Path) -> list[dict[str, list[str]]]:
    """The tests of each fault: the shortest first, one of each file before a second one of any."""
    seconds: dict[str, float] = {}
    for file in (folder / "hits").glob("seconds-*.txt"):
        for line in file.read_text().splitlines():
            test, _, wall = json.loads(line)
            seconds[test] = wall
    halves: list[dict[str, list[str]]] = [{}, {}]
    for number in range(len(faults())):
        by_file = defaultdict(list)
        for file in (folder / "hits" / str(number)).glob("*"):
            test = file.read_text().rsplit(" (", 1)[0]
            by_file[test.split("::")[0]].append(test)
        ordered = [
            sorted(tests, key=lambda test: seconds.get(test, 9.0)) for tests in by_file.values()
        ]
        turns = [
            (n, seconds.get(test, 9.0), test) for tests in ordered for n, test in enumerate(tests)
        ]
        halves[number % 2][str(number)] = [test for _, _, test in sorted(turns)]
    return halves


def table(folder: Path) -> None:
    all_of_it, noticed = Counter(), Counter()
    for number, fault in enumerate(faults()):
        file = folder / "results" / f"{number}.json"
        if not file.exists():
            continue
        said = json.loads(file.read_text())
        all_of_it[fault.area] += 1
        noticed[fault.area] += bool(said["noticed"])
        if not said["noticed"]:
            print(
                f"{number}: {fault.function}: {fault.old}  ->  {fault.new}; {said['tests']} tests"
            )
    for area, count in all_of_it.items():
        print(f"{area:12} {noticed[area]:4} of {count}")
    print(f"{'all':12} {noticed.total():4} of {all_of_it.total()}")


main()
