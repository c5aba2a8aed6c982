"""What the index of 1 GB of JSON lines costs: the first start, a later one, and one beside the first.

    python benchmarks/index_cost.py [--gigabytes 1] [--folder FOLDER]

Makes chats of about 430 bytes in one file, in 8, and in 8 that are compressed in members of 1 MB; removes
them at the end. Opens a pipeline over them until its rows are known, each time in a new process: the first
makes the index, another that begins at the same time waits for it, a third finds it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trainpipes as tp
from benchmarks.fresh import begin

__all__ = ["costs"]

FILES = 8
PART = 1 << 20


def part(number: int) -> bytes:
    """About 1 MB of JSON lines."""
    draw, lines, size = random.Random(number), [], 0
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(2000)]
    while size < PART:
        text = " ".join(draw.choices(words, k=draw.randint(20, 100)))
        row = {"id": len(lines), "messages": [{"role": "user", "content": text}]}
        lines.append(json.dumps(row).encode() + b"\n")
        size += len(lines[-1])
    return b"".join(lines)


def write(folder: Path, files: int, megabytes: int, pack: Callable[[bytes], bytes]) -> None:
    """Files of a few parts, which come again and again."""
    parts = [pack(part(number)) for number in range(16)]
    folder.mkdir()
    for file in range(files):
        with open(folder / f"{file}.jsonl", "wb") as opened:
            for number in range(file, megabytes, files):
                opened.write(parts[number % len(parts)])


def opened(folder: Path) -> tuple[float, float, int]:
    """Seconds, of the clock and of the processor, until the number of rows is known; and that number."""
    clock, work = time.perf_counter(), time.process_time()
    rows = len(tp.read_json(str(folder), index=True))
    return time.perf_counter() - clock, time.process_time() - work, rows


def costs(megabytes: int, where: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each kind of files what is found."""
    kinds: dict[str, tuple[int, str, Callable[[bytes], bytes]]] = {
        "1 file": (1, "", bytes),
        f"{FILES} files": (FILES, "", bytes),
        f"{FILES} files, gzip": (FILES, ".gz", lambda data: gzip.compress(data, 1)),
    }
    for kind, (files, ending, pack) in kinds.items():
        with tempfile.TemporaryDirectory(dir=where) as name:
            folder, cache = Path(name, "data"), Path(name, "cache")
            os.environ["TRAINPIPES_CACHE"] = str(cache)
            write(folder, files, megabytes, pack)
            for path in list(folder.iterdir()):
                path.rename(f"{path}{ending}")
            first, beside = (
                begin(lambda folder=folder: opened(folder)),
                begin(  # type: ignore[misc]
                    lambda folder=folder: opened(folder)  # type: ignore[misc]
                ),
            )
            both = sorted((first(), beside()), key=lambda found: -found[1])
            later = begin(lambda folder=folder: opened(folder))()  # type: ignore[misc]
            assert both[0][2] == both[1][2] == later[2]
            kept = sum(path.stat().st_size for path in cache.rglob("*.arrow"))
        yield kind, {
            "s": both[0][0], "CPU s": both[0][1], "beside it, CPU s": both[1][1], "later, s": later[0],
            "kB": kept / 1e3, "rows": later[2],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--folder", type=Path, help="for the files; the system's if left out")
    args = parser.parse_args()
    print("| | first start, s | its CPU s | beside it, CPU s | later start, s | index, kB | rows |")
    print("|---|---|---|---|---|---|---|")
    for kind, found in costs(int(args.gigabytes * 1000), args.folder):
        figures = " | ".join(f"{value:,.2f}" for value in list(found.values())[:4])
        print(f"| {kind} | {figures} | {found['kB']:.0f} | {found['rows']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
