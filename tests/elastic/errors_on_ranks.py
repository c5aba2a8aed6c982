"""What each rank runs: an uneven epoch in which one rank's function fails at a row, and one in which rank 0
alone asks after each batch whether it is the last.

    python -m torch.distributed.run --nproc-per-node 2 errors_on_ranks.py FOLDER WORKERS,ROW ...

Each rank writes for each case ``errors-WORKERS,ROW-R.json``: the batches that it got, and what it was told
when it asked on. After each step all ranks exchange a number, as for gradients, and stop together. It writes
``asked-R.json``, too: its batches, the answers, and how many rows were filtered before the first batch came.
"""

from __future__ import annotations

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

import trainpipes as tp
from launch import write_beside

__all__ = ["uneven"]


looked_at = 0


def uneven(failing: int | None = None) -> tp.Pipeline:
    """An epoch of some 170 batches, whose number is known only at its end."""

    def some(row: dict[str, Any]) -> bool:
        global looked_at
        looked_at += 1
        if row["x"] == failing:
            raise LookupError(f"cannot take row {failing}")
        return bool(row["x"] * 7919 % 101 % 3)

    table = pa.table({"x": list(range(1000))})
    dealt = tp.from_arrow(table).sharding_filter(4).shuffle(50, seed=5)
    return dealt.filter(some, version="1").batch(4)


def run(workers: int, failing: int) -> dict[str, Any]:
    loader = tp.Loader(uneven(failing), num_workers=workers, timeout=30 if workers else 0)
    batches = iter(loader)
    got, told = [], []
    failed = torch.zeros(1)
    while not failed:
        try:
            got.append([row["x"] for row in next(batches)])
        except LookupError:
            failed += 1
        dist.all_reduce(failed)  # what gradients do
    while len(told) < 2:  # without another rank's help
        try:
            told.append([row["x"] for row in next(batches)])
        except LookupError as error:
            told.append(str(error))
    return {"got": got, "told": told, "state": loader.state_dict()}


def asked(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, pipe in (("plain", uneven()), ("placed", uneven().to("cpu"))):
        got, answers, before = [], [], looked_at
        batches = iter(tp.Loader(pipe, threads=0))
        for batch in batches:
            if not got:
                found[f"{way} looked at"] = looked_at - before
            got.append([row["x"] for row in batch])
            if rank == 0:
                answers.append(batches.is_last())
            dist.barrier()  # the other one waits for this, as for gradients
        found |= {way: got, f"{way} answers": answers}
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(60, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for case in sys.argv[2:]:
        workers, failing = map(int, case.split(","))
        write_beside(folder / f"errors-{case}-{dist.get_rank()}.json", run(workers, failing))
        dist.barrier()
    write_beside(folder / f"asked-{dist.get_rank()}.json", asked(dist.get_rank()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
