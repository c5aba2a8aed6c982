"""Texts of many megabytes, and what is made of them on one machine or on Ray. Also a program that tests start
and kill: its arguments are the job, the texts, the folder, and the address of the cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import trainpipes as tp
from trainpipes.prepare import repack, tokenize
from trainpipes.writers import Ray

#: Bytes of a word, and words of a text, at most.
WORD, WORDS = 8, 400
#: Bytes of rows that ``repack`` may hold: much less than the texts have.
MEMORY = 16 << 20


def write_texts(folder: Path, size: int, files: int) -> int:
    """Write texts of so many bytes into so many files; gives the rows of all."""
    random = np.random.default_rng(7)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    known = random.choice(letters, (5000, WORD))
    known[:, -1] = ord(" ")
    known[::9, :2] = np.frombuffer("é".encode(), np.uint8)
    rows = 0
    for number in range(files):
        content = known[random.integers(0, len(known), size // files // WORD)].reshape(-1)
        lengths = random.integers(1, WORDS, 2 * len(content) // (WORD * WORDS)) * WORD
        ends = np.cumsum(lengths)
        count = int(np.searchsorted(ends, len(content)))
        offsets = np.zeros(count + 1, np.int32)
        offsets[1:] = ends[:count]
        text = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(content))
        table = pa.table({"n": np.arange(rows, rows + count), "text": text})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=1000)
        rows += count
    return rows


Function = Callable[[pa.Table], pa.Table]


def kills_once(row: int, note: Path | None) -> Function:
    """A function that leaves rows as they are, and kills its process where it meets a row, the first time.

    Args:
        row: its number.
        note: a file that is made then; None for no kill.
    """

    def function(table: pa.Table) -> pa.Table:
        if note and not note.exists() and pc.any(pc.equal(table["n"], row)).as_py():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return table

    return function


def _tokenize(rows: tp.Pipeline, folder: Path, **how: Any) -> Any:
    return tokenize(rows.tokenize("bytes"), folder, **how)


def _repack(rows: tp.Pipeline, folder: Path, **how: Any) -> Any:
    return repack(rows, folder, shuffle=True, num_files=12, memory_limit=MEMORY, **how)


def _write(rows: tp.Pipeline, folder: Path, **how: Any) -> Any:
    return rows.write_parquet(folder, num_files=12, **how)


JOBS: dict[str, Callable[..., Any]] = {
    "tokenize": _tokenize,
    "repack": _repack,
    "write_parquet": _write,
}


def make(job: str, texts: Path, folder: Path, function: Function | None = None, **how: Any) -> Any:
    """Do a job; ``how`` holds options of its engine."""
    rows = tp.list_files(texts).read_parquet()
    rows = rows.map_batches(function or kills_once(0, None), version="1")
    return JOBS[job](rows, folder, **how)


if __name__ == "__main__":
    job, texts, folder, address = sys.argv[1:]
    make(job, Path(texts), Path(folder), executor=Ray(address))
