"""The command: runs the suite, or checks what README and docs promise."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from benchmarks import environments, suite
from benchmarks.alone import NEEDS
from benchmarks.check import check
from benchmarks.contestants import ENTRIES, ENVIRONMENTS
from benchmarks.jobs import JOBS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=suite.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes; the default")
    parser.add_argument("--full", action="store_true", help="what results are quoted from")
    parser.add_argument(
        "--check", action="store_true", help="a few minutes: does what README and docs promise hold"
    )
    parser.add_argument("--install", action="store_true", help="install what peers need, first")
    parser.add_argument("--jobs", nargs="+", default=[], choices=JOBS, metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], choices=list(ENTRIES), metavar="NAME")
    parser.add_argument("--repeats", type=int, help="runs of each cell; 3 quick, 5 full")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are ended on the way out
    folder = args.folder.absolute()
    if args.install:
        for name in sorted(NEEDS.values()) if args.check else ENVIRONMENTS:
            suite.Suite.tell(f"installing {name}")
            error = environments.install(folder / "environments", name)
            if error:
                suite.Suite.tell(f"{name}: {error}\n")
    if args.check:
        sys.exit(1 if check(folder) else 0)
    chosen = suite.Suite(
        "full" if args.full else "quick", folder, args.jobs, args.only, args.repeats
    )
    chosen.load = os.getloadavg()  # type: ignore[attr-defined]
    chosen.run()
    print((chosen.results / "results.md").read_text())
    print(f"{chosen.results}/results.md, results.json and pictures")


if __name__ == "__main__":
    main()
