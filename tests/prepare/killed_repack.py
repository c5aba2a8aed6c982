"""``repack`` that is killed, for ``test_repack_killed``.

Run as a program, with the name of a case and a folder: rewrites some rows once without being disturbed; then
again and again, in a process that is killed by SIGKILL at one of the steps that a disk would see, killed once
more while it goes on, and then left alone. Prints how often that was, and in which cases the files were
others than those of the first time, or something else was left.
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

import trainpipes as tp
from prepare.repack_reference import contents
from trainpipes.prepare import repack
from writers.killed_writers import dying, in_child

#: So little memory that there are several parts, each of several runs.
MEMORY = 40_000
CASES: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True, "seed": 1},
    "shuffled stream": {"shuffle": True, "seed": 2},
    "sorted without duplicates": {"sort": ["text", "x"], "drop_duplicates": ["x"]},
}
#: Steps at which it is killed, at most; spread evenly over all.
KILLS = 8


def rows(name: str) -> tp.Pipeline:
    table = pa.table(
        {"x": [i * 7 % 450 for i in range(600)], "text": [f"row {i % 40}" * 5 for i in range(600)]}
    )
    pipe = tp.from_arrow(table)
    return pipe.filter(_all) if "stream" in name else pipe


def _all(row: Any) -> bool:
    return True


def work(name: str, folder: Path, threads: int = 1) -> Callable[[], None]:
    def do() -> None:
        sys.modules["trainpipes.prepare.repack.repack"].LEAST_MEMORY = 1  # type: ignore[attr-defined]
        repack(
            rows(name), folder, rows_per_file=170, row_group_size=64, memory_limit=MEMORY,
            threads=threads, **CASES[name],
        )  # fmt: skip

    return do


def steps_of(name: str, folder: Path) -> int:
    """How many steps there are, as a process says that counts them."""
    read, write = os.pipe()
    count = 0

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return step(*args, **options)

        return instead

    def counted() -> None:
        for kind in ("fsync", "replace", "unlink"):
            setattr(os, kind, counting(getattr(os, kind)))
        work(name, folder)()
        os.write(write, str(count).encode())

    assert not in_child(counted)
    return int(os.read(read, 100))


def main(name: str, folder: Path) -> None:
    whole, out = folder / "whole", folder / "out"
    steps = steps_of(name, whole)
    expected = contents(whole)
    draw = random.Random(steps)
    odd = []
    places = sorted(draw.sample(range(1, steps + 1), min(KILLS, steps)))
    for place in places:
        assert in_child(dying(work(name, out), place))
        again = draw.randint(1, steps)
        in_child(dying(work(name, out), again))
        left = {path.name for path in out.iterdir()}
        good = all(
            (out / part).read_bytes() == expected[part] for part in left if part.startswith("part-")
        )
        threads = 1 + place % 2
        if in_child(work(name, out, threads)) or not good or left_over(out):
            odd.append([place, again, "left"])
        elif contents(out) != expected:
            odd.append([place, again, "other"])
        shutil.rmtree(out)
    sys.stdout.write(json.dumps({"kills": len(places), "steps": steps, "odd": odd}))


def left_over(out: Path) -> bool:
    return any(path.is_dir() or path.name.startswith((".", "_un")) for path in out.iterdir())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
