"""``repack`` on Ray, as a program that tests start and kill: its arguments are the input, the folder, the
address of the cluster, and the options as JSON."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.storage import Ray

#: Little, so that a small input is several parts.
MEMORY = "64KB"


def kills_once(n: int, note: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Kills the process that gets the row ``n``, the first time."""

    def kill(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == n and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    return kill


def on_a_full_disk(row: dict[str, Any]) -> dict[str, Any]:
    """No file of this process can have more than 12 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))
    return row


def rows(folder: str | Path) -> tp.Pipeline:
    return tp.list_files(f"{folder}/*.parquet").read_parquet()


def table(count: int = 3000) -> pa.Table:
    """Rows with nulls, NaN and duplicates."""
    return pa.table(
        {
            "n": range(count),
            "key": pa.array([None if i % 7 == 0 else i * 37 % 100 for i in range(count)]),
            "x": [float("nan") if i % 11 == 0 else (i % 5) / 2 for i in range(count)],
            "text": [f"é{i % 500}" * (i % 4) for i in range(count)],
            "ids": [list(range(i % 6)) if i % 13 else None for i in range(count)],
        }
    )


if __name__ == "__main__":
    given, out, address, options = sys.argv[1:]
    pipe, found = rows(given), json.loads(options)
    if found.pop("full", False):
        pipe = pipe.map(on_a_full_disk)
    done = repack(pipe, out, memory_limit=MEMORY, executor=Ray(address), **found)
    sys.stdout.write(json.dumps({"rows": done.rows, "kept": done.kept}))
