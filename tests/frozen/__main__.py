"""python tests/frozen: make, compare and look at the frozen chains. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frozen import corpus
from frozen.chains import CHAINS, draw, fingerprint


def say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/frozen", description=__doc__)
    parser.add_argument("command", choices=["compare", "make", "show", "dump", "table", "public"])
    parser.add_argument("numbers", nargs="*", type=int, help="chains; all if none are given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--against", help="show: another checkout, to compare items with")
    parser.add_argument("--stop", type=int, default=CHAINS, help="the number after the last one")
    given = parser.parse_args()
    numbers = given.numbers or list(range(given.first, given.stop))
    if given.command == "public":
        from frozen import public

        public.FILE.write_text(public.text())
        say(f"wrote {public.FILE}")
        return 0
    if given.command == "show":
        from frozen.showing import show

        return max(show(number, say, given.against) for number in numbers)
    if given.command == "dump":
        from frozen.showing import dump

        for number in numbers:
            dump(number, say)
        return 0
    if given.command == "table":
        from frozen.showing import table

        say(table(corpus.read()))
        return 0
    return run(given.command, numbers, given.jobs)


def run(command: str, numbers: list[int], jobs: int) -> int:
    written = corpus.read() if corpus.FILE.exists() else {}
    before = dict(written)
    started, kinds, changed, bad = time.monotonic(), Counter[str](), [], []
    found: list[corpus.Result] = []
    try:
        for count, result in enumerate(corpus.run_all(numbers, jobs), 1):
            found.append(result)
            kinds[result.kind] += 1
            if result.kind in ("differs", "hangs") or result.accident:
                bad.append(result)
                say(f"\r{result.number}: {result.kind}: {result.said[:300]}\n", end="")
            line = before.get(result.number)
            if result.kind != "gone" and (line is None or line.digest != result.digest):
                changed.append(result.number)
                if command == "compare":
                    from frozen.showing import changed as changed_in

                    why = "is new" if line is None else changed_in(line.digest, result.digest)
                    if line is not None and line.chain != fingerprint(draw(result.number)):
                        why = "is drawn otherwise"
                    say(f"\r{result.number}: {why}: {result.kind}, {result.said[:160]}\n", end="")
            if command == "make" and count % 100 == 0:
                save(found, written)
            if count % 20 == 0 or count == len(numbers):
                took = time.monotonic() - started
                say(f"\r{count} of {len(numbers)} chains, {took:.0f} s ", end="")
    except KeyboardInterrupt:
        say("\nstopped; what has run counts")
    say()
    say(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    if command == "make":
        save(found, written)
        corpus.write(written.values(), corpus.spread(written.values()))
        say(f"{len(changed)} digests are new; wrote {corpus.FILE}")
    elif changed:
        say(f"{len(changed)} changed: {' '.join(map(str, sorted(changed)[:40]))}")
        say(
            "look at one: python tests/frozen show NUMBER; write them anew: python tests/frozen make"
        )
    accidents = sum(result.accident for result in found)
    if accidents:
        say(f"{accidents} ended with an error that is none of the library's own")
    return int(bool(bad) or (command == "compare" and bool(changed)))


def save(found: list[corpus.Result], written: dict[int, corpus.Line]) -> None:
    """Write down what there is so far."""
    for result in found:
        if result.kind in ("runs", "refused"):
            written[result.number] = corpus.line_of(result)
        elif result.kind == "gone":
            written.pop(result.number, None)
    corpus.write(written.values())


if __name__ == "__main__":
    sys.exit(main())
