"""Writers that are killed, for ``test_killed``.

Run as a program, with the name of a case, a folder, a number of kills, how, and a seed: writes rows once
without being disturbed; then again and again, in a process that is killed by SIGKILL: "at steps" that a disk
would see, at times once more while it goes on; or "at random" moments, time after time, until it ends. Prints
how many kills there were, and at which of them the files were others than those of the first time, or
something else was left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import every_stage
import trainpipes as tp
from trainpipes.prepare import repack, tokenize
from trainpipes.writers import Threads
from unfinished import contents

#: Calls at which a process is killed: before each of them, and after it.
STEPS = ("fsync", "replace", "unlink", "remove", "write")
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
    "in order": {"rows_per_file": 60},
    "shuffled": {"shuffle": True, "seed": 1, "rows_per_file": 60},
    "shuffled by groups": {"shuffle": True, "seed": 1, "num_files": 12},
    "shuffled stream": {"shuffle": True, "seed": 2, "rows_per_file": 60},
}  # fmt: skip


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
                "x": [i * 7 % 120 for i in range(160)],
                "text": [f"row {i % 40}" * 5 for i in range(160)],
                "wide": [bytes([i % 256]) * 1000 for i in range(160)],
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


def memmap(data: Path) -> Work:
    rows = every_stage.rows(data).select("x").shuffle(30)
    return lambda out, threads: tp.write_memmap(
        out, rows, rows_per_file=11, executor=Threads(threads)
    )


def tokenized(data: Path) -> Work:
    for number in range(6):
        texts = ["word " * (n % 90) for n in range(400)]
        pq.write_table(pa.table({"text": texts}), data / f"{number}.parquet", row_group_size=50)
    rows = tp.list_files(data).read_parquet().tokenize("bytes")
    return lambda out, threads: tokenize(rows, out, executor=Threads(threads))


CASES = {f"counted, {format}": writes("counted", format) for format in ("parquet", "json")}
CASES |= {f"{name}, arrow": writes(name, "arrow") for name in PIPES}
CASES |= {"memmap": memmap, "tokenize": tokenized}
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


def odd_in(out: Path, expected: dict[str, bytes]) -> str | None:
    """What is wrong with what a kill has left."""
    left = contents(out) if out.exists() else {}
    parts = {name for name in left if name.startswith("part-")}
    if any(left[part] != expected.get(part) for part in parts):
        return "a file is not whole"
    if "_manifest.json" in left and len(parts) < len(expected) - 1:
        return "the manifest is early"
    return None


def odd_at_the_end(work: Work, out: Path, expected: dict[str, bytes], threads: int) -> str | None:
    """What is wrong once the work has gone on."""
    if in_child(lambda: work(out, threads)):
        return "it does not go on"
    if contents(out) != expected or len(list(out.iterdir())) != len(expected):
        return "other files"
    return None


def at_steps(
    name: str, work: Work, whole: Path, out: Path, kills: int, draw: random.Random
) -> tuple[int, int, list[Any]]:
    steps = steps_of(lambda: work(whole, 1))
    expected = contents(whole)
    odd: list[Any] = []
    places = sorted(draw.sample(range(1, steps + 1), min(kills, steps)))
    for place in places:
        status = in_child(stepping(lambda: work(out, 1), place.__eq__))
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        if name.startswith("repack") or place % 3 == 0:
            in_child(stepping(lambda: work(out, 1), draw.randint(1, steps).__eq__))
        found = odd_in(out, expected) or odd_at_the_end(work, out, expected, 1 + place % 2)
        odd += [[place, found]] if found else []
        shutil.rmtree(out)
    return len(places), steps, odd


def at_random(
    work: Work, whole: Path, out: Path, kills: int, draw: random.Random
) -> tuple[int, int, list[Any]]:
    begun = time.monotonic()
    assert not in_child(lambda: work(whole, 2))
    seconds, expected = time.monotonic() - begun, contents(whole)
    odd: list[Any] = []
    done = 0
    while done < kills:
        child = os.fork()
        if not child:
            work(out, 2)
            os._exit(0)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        done += status != 0
        found = odd_in(out, expected)
        if status == 0 or draw.random() < 0.1:  # and begin anew
            found = found or odd_at_the_end(work, out, expected, 2)
            shutil.rmtree(out)
        odd += [[done, found]] if found else []
    found = odd_at_the_end(work, out, expected, 2)
    return done, 0, odd + ([[done, found]] if found else [])


def main(name: str, folder: Path, kills: int, how: str, seed: int) -> None:
    os.fsync = lambda _: None  # a kill loses nothing that was written
    data, whole, out = folder / "data", folder / "whole", folder / "out"
    data.mkdir()
    work, draw = CASES[name](data), random.Random(seed)
    if how == "at steps":
        done, steps, odd = at_steps(name, work, whole, out, kills, draw)
    else:
        done, steps, odd = at_random(work, whole, out, kills, draw)
    found = {"kills": done, "steps": steps, "files": len(contents(whole)) - 1, "odd": odd}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
