"""Attacks of many minutes, with drawn faults: ``python -m tests.attacks --minutes 60``.

Each attack runs in a process of its own for its share of the minutes, and ends with a line of figures. Its
seed is printed, and each failure at the end with its round: ``--only NAME --seed N --round R`` draws that
round again. ``--write`` puts the table into CONTRIBUTING.md. The exit code is 1 if anything was wrong.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]  # attacks use the tests that they extend

from attacks import chains, files, kills, lasting, storage  # noqa: E402
from attacks.rounds import Attack  # noqa: E402

PAGE = TESTS.parent / "CONTRIBUTING.md"
HEAD = "| attack | cases | exact | an error that names it | wrong |\n|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\|\n)*")
#: Seconds after its time is over in which an attack hangs: its last round takes minutes on a busy machine.
HANGS = 900

ATTACKS: dict[str, tuple[str, Attack]] = {
    "files": ("damaged files of all formats, beside their reference libraries", files.damaged_files),
    "rows": ("bad rows set aside, over resumes and ranks", files.bad_rows),
    "replaced": ("files replaced, cut, exchanged, added, removed or copied", files.replaced_files),
    "growing": ('folders that grow, with `refresh="epoch"`', files.growing_folders),
    "storage": ("stores that fail: errors, lost connections and answers, silence", storage.failing_storage),
    "trainers": ("trainers killed: processes and shared memory left", kills.killed_trainers),
    "resumes": ("trainers killed, and started again until they end", kills.resumed_trainers),
    "workers": ("workers killed, and the run resumed", kills.killed_workers),
    "writers": ("writers killed, and started again", kills.killed_writers),
    "states": ("changed states", lasting.changed_states),
    "chains": ("chains of any stages in any order, over resumes and ranks", chains.any_chains),
    "soak": ("epochs over a store that fails: memory, files and threads flat", lasting.soak),
}  # fmt: skip


def run(name: str, seed: int, seconds: float, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Rounds of an attack until the time is over, one at least: what came, and what was wrong."""
    came: Counter[str] = Counter()
    wrong: list[str] = []
    until, draw = time.monotonic() + seconds, random.Random()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rounds = ATTACKS[name][1](Path(folder), draw)
        for number in count(first):
            draw.seed(f"{seed} {number}")
            try:
                said = list(next(rounds)())
            except StopIteration:
                break
            except Exception:
                said = [traceback.format_exc()[-3000:]]
            came.update(each if each in ("exact", "named") else "wrong" for each in said)
            wrong += [f"round {number}: {each}" for each in said if each not in ("exact", "named")]
            if time.monotonic() > until or len(wrong) > 9:
                break
        rounds.close()  # type: ignore[attr-defined]
    return came, wrong


def in_process(
    name: str, seed: int, seconds: float, first: int = 0
) -> tuple[dict[str, int], list[str]]:
    """The same in a process of its own, with all that it starts ended."""
    print(f"{name}: --only {name} --seed {seed}", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.attacks", "--child"]
    command += ["--only", name, "--seed", str(seed), "--minutes", str(seconds / 60)]
    command += ["--round", str(first)]
    child = subprocess.Popen(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, _ = child.communicate(timeout=seconds + HANGS + 60)
    except subprocess.TimeoutExpired:
        said = ""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.wait() or not said:
        return {"wrong": 1}, [f"the process ended with {child.returncode}"]
    came, wrong = json.loads(said.splitlines()[-1])
    return came, wrong


def line(name: str, came: dict[str, int]) -> str:
    figures = [sum(came.values()), *(came.get(kind, 0) for kind in ("exact", "named", "wrong"))]
    return f"| {ATTACKS[name][0]} | " + " | ".join(f"{one:,}" for one in figures) + " |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="of all attacks together")
    parser.add_argument("--only", choices=ATTACKS, action="append", help="one of them, or several")
    parser.add_argument("--seed", type=int, help="drawn if left out")
    parser.add_argument("--round", type=int, default=0, help="the first one")
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or list(ATTACKS)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    seconds = 60 * args.minutes / len(names)
    if args.child:
        warnings.simplefilter("ignore")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # each request
        logging.getLogger("trainpipes").setLevel(logging.ERROR)  # each retry
        faulthandler.dump_traceback_later(seconds + HANGS, exit=True)
        print(json.dumps(run(names[0], seed, seconds, args.round)), flush=True)
        os._exit(0)  # whatever a fault has left
    lines, failures = [], list[str]()
    for name in names:
        came, wrong = in_process(name, seed, seconds, args.round)
        lines.append(line(name, came))
        failures += [f"WRONG {name} --seed {seed}, {one}" for one in wrong]
        print(lines[-1], flush=True)
    if args.write:
        PAGE.write_text(TABLE.sub(lambda _: HEAD + "".join(lines), PAGE.read_text()))
    print(*failures, sep="\n")  # last, where the end of a long output is all that one sees
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
