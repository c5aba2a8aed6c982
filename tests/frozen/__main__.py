"""python tests/frozen: compare and look at the frozen chains. See README.md."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frozen import chains, public, running


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/frozen", description=__doc__)
    parser.add_argument("command", choices=["compare", "make", "items", "gives", "public"])
    parser.add_argument("numbers", nargs="*", type=int, help="chains; all if none are given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--against", help="compare, items: another checkout of the library")
    given = parser.parse_args()
    numbers = given.numbers or list(chains.read())
    if given.command == "public":
        public.FILE.write_text(public.text())
        return 0
    if given.command == "items":
        return items(numbers, given.against)
    found = running.run_all(numbers, given.jobs)
    if given.command == "gives":  # for another checkout
        say(json.dumps(found))
        return 0
    wanted = {number: chains.read()[number].digest for number in numbers}
    if given.against:
        there = elsewhere(given.against, "gives", *numbers, "--jobs", given.jobs)
        wanted = {int(number): digest for number, (digest, _) in json.loads(there).items()}
    new = {number: found[number][0] for number in numbers if found[number][0] != wanted[number]}
    for number, digest in new.items():
        what = "the run without a stop" if digest[:8] != wanted[number][:8] else "the legs alone"
        say(f"{number}: other is {what}: {found[number][1][:300]}")
    say(f"{len(new)} of {len(numbers)} chains give something else")
    if given.command == "make":
        chains.write(new)
        return 0
    return bool(new)


def items(numbers: list[int], against: str | None) -> int:
    """Print chains and the items that they read, or those that another checkout reads otherwise."""
    for number in numbers if not against else ():
        _, plan, code = chains.read()[number]
        say(f"# {number}: {code}\n# read as {json.dumps(plan)}")
        running.digest = lambda item: say(" ".join(repr(item).split())[:600]) or ""  # type: ignore[func-returns-value]
        with running.small_data():
            say(f"# {running.run(code, plan, number)[1]}")
    if against:
        there, here = (
            elsewhere(where, "items", *numbers).splitlines() for where in (against, public.ROOT)
        )
        lines = difflib.unified_diff(there, here, lineterm="", n=1)
        say("\n".join(list(lines)[2:80]))
    return 0


def elsewhere(checkout: str | Path, *words: object) -> str:
    """What this program prints with the library of another checkout."""
    path = os.pathsep.join(str(Path(checkout).resolve() / part) for part in ("pipes", "recipes"))
    command = [sys.executable, str(Path(__file__).parent), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, stdout=-1, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
