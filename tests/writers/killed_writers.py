"""Writers that are killed, for ``test_killed``.

Run as a program, with the name of a case, a folder and a number of kills: writes rows once without being
disturbed; then again and again, in a process that is killed by SIGKILL at one of the steps that a disk would
see, at times killed once more while it goes on, and then left alone. Prints how many steps there are, and at
which of them the files were others than those of the first time, or something else was left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

import every_stage
import trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.storage import Threads
from unfinished import contents

#: Calls at which a process is killed: before each of them, and after it.
STEPS = ("fsync", "replace", "unlink", "write")
#: Writes to a folder, by so many threads.
Work = Callable[[Path, int], Any]


def counted() -> Any:
    return ({"x": n, "text": f"row {n}", "tags": [None, "é"] * (n % 3)} for n in range(97))


PIPES: dict[str, tuple[int, Callable[[Path], tp.Pipeline]]] = {  # with rows of a file
    "counted": (60, lambda f: every_stage.sharded(f, buffer=30)),
    "filtered": (15, lambda f: every_stage.rows(f).shuffle(30).filter(every_stage.odd).take(40)),
    "stream": (60, lambda f: tp.from_iterable(counted).shuffle(9)),
    "flat": (120, lambda f: every_stage.rows(f).shuffle(20).flat_map(every_stage.words)),
    "packed": (
        20, lambda f: every_stage.rows(f).shuffle(20).pack(6, column="tokens", buffer_size=15)
    ),
    "mixed": (60, lambda f: tp.mix(
        {"a": every_stage.part(f, 60), "b": every_stage.part(f, 30, 60)}, weights={"a": 2, "b": 1}
    )),
}  # fmt: skip
REPACKS: dict[str, dict[str, Any]] = {
    "in order": {"rows_per_file": 170},
    "shuffled": {"shuffle": True, "seed": 1, "rows_per_file": 170},
    "shuffled by groups": {"shuffle": True, "seed": 1, "num_files": 24},
    "shuffled stream": {"shuffle": True, "seed": 2, "rows_per_file": 170},
    "sorted without duplicates": {
        "sort": ["text", "x"], "drop_duplicates": ["x"], "rows_per_file": 170
    },
}  # fmt: skip
if not find_spec("duckdb"):
    del REPACKS["sorted without duplicates"]


def writes(name: str, format: str) -> Callable[[Path], Work]:
    def made(data: Path) -> Work:
        rows, make = PIPES[name]
        pipe = make(data)
        return lambda out, _: getattr(pipe, f"write_{format}")(out, rows_per_file=rows)

    return made


def repacks(name: str) -> Callable[[Path], Work]:
    def made(data: Path) -> Work:
        table = pa.table(
            {
                "x": [i * 7 % 450 for i in range(600)],
                "text": [f"row {i % 40}" * 5 for i in range(600)],
                "wide": [bytes([i % 256]) * 1000 for i in range(600)],
            }
        )
        pipe = tp.from_arrow(table)
        if "stream" in name:
            pipe = pipe.filter(bool)
        return lambda out, threads: repack(
            pipe, out, row_group_size=64, memory_limit="64KB", **REPACKS[name],
            executor=None if name == "in order" else Threads(threads),
        )  # fmt: skip

    return made


CASES = {f"counted, {format}": writes("counted", format) for format in ("parquet", "json")}
CASES |= {f"{name}, arrow": writes(name, "arrow") for name in PIPES}
CASES |= {f"repack, {name}": repacks(name) for name in REPACKS}


def in_child(work: Callable[[], Any]) -> int:
    """What a process of its own ends with."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def stepping(work: Callable[[], Any], at_step: Callable[[int], bool]) -> Callable[[], Any]:
    """Work that calls a function at each of its steps, and ends by SIGKILL where that says so."""
    passed, write = 0, os.write

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if at_step(passed):
                if step is write:  # some of it gets there
                    step(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **options)

        return instead

    def work_and_die() -> None:
        for name in STEPS:
            setattr(os, name, watched(getattr(os, name)))
        work()

    return work_and_die


def steps_of(work: Callable[[], Any]) -> int:
    """How many steps there are, as a process says that does the work."""
    with tempfile.TemporaryFile() as count:

        def note(step: int) -> bool:
            os.pwrite(count.fileno(), str(step).encode(), 0)
            return False

        assert not in_child(stepping(work, note))
        return int(os.pread(count.fileno(), 100, 0))


def main(name: str, folder: Path, kills: int) -> None:
    data, whole, out = folder / "data", folder / "whole", folder / "out"
    data.mkdir()
    work = CASES[name](data)
    steps = steps_of(lambda: work(whole, 1))
    expected = contents(whole)
    draw, odd = random.Random(steps), []
    places = sorted(draw.sample(range(1, steps + 1), min(kills, steps)))
    for place in places:
        status = in_child(stepping(lambda: work(out, 1), place.__eq__))
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        if name.startswith("repack") or place % 3 == 0:
            in_child(stepping(lambda: work(out, 1), draw.randint(1, steps).__eq__))
        left = contents(out)
        parts = {name for name in left if name.startswith("part-")}
        if any(left[part] != expected[part] for part in parts):
            odd.append([place, "a file is not whole"])
        elif "_manifest.json" in left and len(parts) < len(expected) - 1:
            odd.append([place, "the manifest is early"])
        elif in_child(lambda: work(out, 1 + place % 2)):  # noqa: B023
            odd.append([place, "it does not go on"])
        elif contents(out) != expected or len(list(out.iterdir())) != len(expected):
            odd.append([place, "other files"])
        shutil.rmtree(out)
    sys.stdout.write(
        json.dumps({"kills": len(places), "steps": steps, "files": len(expected) - 1, "odd": odd})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
