"""Writers that are killed, for ``test_killed``.

Run as a program, with the name of a pipeline, of a format and of a folder: writes the pipeline's rows once
without being disturbed; then, again and again, in a process that is killed by SIGKILL at its first, second
... step that a disk would see, and then by one that is left alone. Prints how often that was, and in which
cases the files were others than those of the first time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_stage
import trainpipes as tp
from unfinished import contents

#: Rows in a file, so that there are a few of them.
ROWS = {"filtered": 15, "packed": 20, "several rows of one": 120}
#: Calls at which a process is killed: before each of them, and after it.
STEPS = ("fsync", "replace", "unlink", "write")


def counted() -> Any:
    return ({"x": n, "text": f"row {n}", "tags": [None, "é"] * (n % 3)} for n in range(97))


PIPES: dict[str, Callable[[Path], tp.Pipeline]] = {
    "counted": lambda f: every_stage.sharded(f, buffer=30),
    "filtered": lambda f: every_stage.rows(f).shuffle(30).filter(every_stage.odd).take(40),
    "stream": lambda f: tp.from_iterable(counted).shuffle(9),
    "several rows of one": lambda f: every_stage.rows(f).shuffle(20).flat_map(every_stage.words),
    "packed": lambda f: every_stage.rows(f).shuffle(20).pack(6, column="tokens", buffer_size=15),
    "mixed": lambda f: tp.mix(
        {"a": every_stage.part(f, 60), "b": every_stage.part(f, 30, 60)}, weights={"a": 2, "b": 1}
    ),
}  # fmt: skip


def write(pipe: tp.Pipeline, format: str, folder: Path, rows: int) -> None:
    getattr(pipe, f"write_{format}")(folder, rows_per_file=rows)


def in_child(work: Callable[[], None]) -> int:
    """What a process of its own ends with."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def dying(work: Callable[[], None], last: int) -> Callable[[], None]:
    """Work that ends by SIGKILL at the ``last``-th of the steps."""
    passed, write = 0, os.write

    def die_at(step: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == last:
                if step is write:  # some of it gets there
                    step(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **options)

        return instead

    def work_and_die() -> None:
        for name in STEPS:
            setattr(os, name, die_at(getattr(os, name)))
        work()

    return work_and_die


def main(name: str, format: str, folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    pipe, rows = PIPES[name](data), ROWS.get(name, 60)
    whole, out = folder / "whole", folder / "out"
    assert not in_child(lambda: write(pipe, format, whole, rows))
    expected = contents(whole)
    step, odd = 1, []
    while status := in_child(dying(lambda: write(pipe, format, out, rows), step)):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        left = contents(out)
        parts = {name for name in left if name.startswith("part-")}
        good = all(left[name] == expected[name] for name in parts)
        good &= "_manifest.json" not in left or len(parts) == len(expected) - 1
        if (
            in_child(lambda: write(pipe, format, out, rows))
            or contents(out) != expected
            or not good
        ):
            odd.append(step)
        shutil.rmtree(out)
        step += 1
    sys.stdout.write(json.dumps({"kills": step - 1, "files": len(expected) - 1, "odd": odd}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
