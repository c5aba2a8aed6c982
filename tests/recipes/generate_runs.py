"""Answers that take random times, in a process that tests kill."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import trainpipes as tp
from trainpipes_recipes.generate import generate

ROWS = 1200


def answer(row: dict[str, Any]) -> str:
    time.sleep(random.random() * 0.02)
    if random.random() < 0.02:
        raise OSError("busy")
    return f"answer {row['id']}"


def run(folder: str, ordered: bool) -> int:
    rows = tp.from_arrow(pa.table({"id": range(ROWS), "prompt": [f"{k}?" for k in range(ROWS)]}))
    return generate(
        rows, answer, Path(folder), in_flight=64, rows_per_file=17, ordered=ordered, tries=9
    )


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2] == "ordered")
