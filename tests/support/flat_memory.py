"""What a run of several epochs holds in memory, told by a process of its own.

    python flat_memory.py FOLDER|ROWS WORKERS EPOCHS

Prints JSON: after each epoch the bytes of this process and its workers; and those of a bare worker, unless
there are some.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

import trainpipes as tp

LIBC = ctypes.CDLL(None)


def held() -> int:
    """Bytes of this process and those below it, without mapped files, of which other processes' shares
    change; what they share counts once.
    """
    me = psutil.Process()
    found = 0
    for process in [me, *me.children(recursive=True)]:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        kilobytes = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.MULTILINE)
        assert len(kilobytes) == 2
        found += 1024 * sum(map(int, kilobytes))
    return found


def bare() -> int:
    """Bytes of a process that has imported what a worker has, on top of what it shares with this one."""
    code = "import trainpipes, psutil; print(psutil.Process().memory_full_info().uss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def words(count: int) -> list[Any]:
    """Rows as Python objects, of which each use changes a count of references."""
    return [{"number": n, "text": f"{n:08}" * 25} for n in range(count)]


def pipeline(what: str) -> tp.Pipeline:
    if what.isdigit():
        rows = tp.from_dataset(words(int(what))).sharding_filter(8).shuffle(20_000, seed=1)
        return rows.batch(256)
    read = tp.list_files(what).read_parquet().sharding_filter(8).shuffle(5000, seed=1)
    return read.batch(32).pad_collate()


def main() -> None:
    what, workers, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipe = pipeline(what)
    loader = tp.Loader(pipe, num_workers=workers, persistent_workers=workers > 0)
    found = []
    for _ in range(epochs):
        batches = sum(1 for _ in loader)
        gc.collect()
        pa.default_memory_pool().release_unused()  # what allocators keep free is nobody's
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)
        found.append(held())
    told = {"epochs": found, "bare": 0 if workers else bare(), "batches": batches}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
