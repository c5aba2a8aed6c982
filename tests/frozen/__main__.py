"""python tests/frozen: compare and look at the frozen chains. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frozen import chains, corpus, public, showing


def say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/frozen", description=__doc__)
    parser.add_argument("command", choices=["compare", "make", "show", "dump", "public"])
    parser.add_argument("numbers", nargs="*", type=int, help="chains; all if none are given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--against", help="show: another checkout, to compare items with")
    given = parser.parse_args()
    numbers = given.numbers or list(chains.read())
    if given.command == "public":
        public.FILE.write_text(public.text())
        say(f"wrote {public.FILE}")
        return 0
    if given.command == "show":
        return max(showing.show(number, say, given.against) for number in numbers)
    if given.command == "dump":
        for number in numbers:
            showing.dump(number, say)
        return 0
    return run(given.command, numbers, given.jobs)


def run(command: str, numbers: list[int], jobs: int) -> int:
    written = {number: line.digest for number, line in chains.read().items()}
    started, kinds, new, bad = time.monotonic(), Counter[str](), dict[int, str](), 0
    try:
        for count, result in enumerate(corpus.run_all(numbers, jobs), 1):
            kinds[result.kind] += 1
            wrong = result.kind in ("differs", "hangs") or result.accident
            bad += wrong
            if result.kind != "gone" and written[result.number] != result.digest:
                new[result.number] = result.digest
                wrong |= command == "compare"
            if wrong:
                why = showing.changed(written[result.number], result.digest)
                say(f"\r{result.number}: {why}: {result.kind}, {result.said[:300]}")
            if count % 20 == 0 or count == len(numbers):
                took = time.monotonic() - started
                say(f"\r{count} of {len(numbers)} chains, {took:.0f} s ", end="")
    except KeyboardInterrupt:
        say("\nstopped; what has run counts")
    say("\n" + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    if command == "make" and not bad:
        chains.write(new)
        say(f"{len(new)} digests are new; wrote {chains.FILE}")
    elif new:
        say(f"{len(new)} changed: {' '.join(map(str, sorted(new)[:40]))}")
        say("look at one: python tests/frozen show NUMBER; where it is meant: make NUMBER")
    return int(bool(bad) or (command == "compare" and bool(new)))


if __name__ == "__main__":
    sys.exit(main())
