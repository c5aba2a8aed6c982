"""``repack`` that is killed, for ``test_repack_killed``.

Run as a program, with the name of a case, a folder and a number of kills: rewrites some rows once without
being disturbed; then again and again, in a process that is killed by SIGKILL at one of the steps that a disk
would see, killed once more while it goes on, and then left alone. Prints how often that was, and in which
cases the rows were others than those of the first time, or something else was left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.storage import Threads
from writers.killed_writers import STEPS, dying, in_child

CASES: dict[str, dict[str, Any]] = {
    "in order": {"rows_per_file": 170},
    "shuffled": {"shuffle": True, "seed": 1, "rows_per_file": 170},
    "shuffled by groups": {"shuffle": True, "seed": 1, "num_files": 24},
    "shuffled stream": {"shuffle": True, "seed": 2, "rows_per_file": 170},
    "sorted without duplicates": {
        "sort": ["text", "x"], "drop_duplicates": ["x"], "rows_per_file": 170
    },
}  # fmt: skip


def rows(name: str) -> tp.Pipeline:
    table = pa.table(
        {
            "x": [i * 7 % 450 for i in range(600)],
            "text": [f"row {i % 40}" * 5 for i in range(600)],
            "wide": [bytes([i % 256]) * 1000 for i in range(600)],
        }
    )
    pipe = tp.from_arrow(table)
    return pipe.filter(_all) if "stream" in name else pipe


def _all(row: Any) -> bool:
    return True


def work(name: str, folder: Path, threads: int = 1) -> Callable[[], None]:
    def do() -> None:
        executor = None if name == "in order" else Threads(threads)
        repack(
            rows(name), folder, row_group_size=64, memory_limit="64KB", executor=executor,
            **CASES[name],
        )  # fmt: skip

    return do


def steps_of(name: str, folder: Path) -> int:
    """How many steps there are, as a process says that counts them."""
    read, write = os.pipe()
    count, said = 0, os.write

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return step(*args, **options)

        return instead

    def counted() -> None:
        for kind in STEPS:
            setattr(os, kind, counting(getattr(os, kind)))
        work(name, folder)()
        said(write, str(count).encode())

    assert not in_child(counted)
    return int(os.read(read, 100))


def contents(folder: Path) -> dict[str, pa.Table]:
    return {path.name: pq.read_table(path) for path in sorted(folder.glob("part-*"))}


def main(name: str, folder: Path, kills: int) -> None:
    whole, out = folder / "whole", folder / "out"
    steps = steps_of(name, whole)
    expected = contents(whole)
    draw = random.Random(steps)
    odd = []
    places = sorted(draw.sample(range(1, steps + 1), min(kills, steps)))
    for place in places:
        assert in_child(dying(work(name, out), place))
        again = draw.randint(1, steps)
        in_child(dying(work(name, out), again))
        if any(found != expected[part] for part, found in contents(out).items()):
            odd.append([place, again, "a file is not whole"])
        elif in_child(work(name, out, 1 + place % 2)):
            odd.append([place, again, "it does not go on"])
        elif contents(out) != expected:
            odd.append([place, again, "other rows"])
        elif {path.name for path in out.iterdir()} != {*expected, "_manifest.json"}:
            odd.append([place, again, "something is left"])
        shutil.rmtree(out)
    sys.stdout.write(json.dumps({"kills": len(places), "steps": steps, "odd": odd}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
