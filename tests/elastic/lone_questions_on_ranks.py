"""What each rank runs: an uneven epoch in which rank 0 alone asks after each batch whether it is the last.

    python -m torch.distributed.run --nproc-per-node 2 lone_questions_on_ranks.py FOLDER

Each rank writes ``asked-R.json``: its batches by way of iterating, the answers, and how many items were made
before the first batch came.
"""

from __future__ import annotations

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

import trainpipes as tp
from launch import write_beside

made = 0


def counting(row: dict[str, Any]) -> bool:
    global made
    made += 1
    return bool(row["x"] * 7919 % 101 % 3)


def uneven(*, placed: bool) -> tp.Pipeline:
    table = pa.table({"x": list(range(1000))})
    pipe = tp.from_arrow(table).sharding_filter(4).shuffle(50, seed=5)
    pipe = pipe.filter(counting, version="1").batch(4)
    return pipe.to("cpu") if placed else pipe


def main() -> None:
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(60, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, found = dist.get_rank(), {}
    for way in ("plain", "placed"):
        loader = tp.Loader(uneven(placed=way == "placed"), threads=0)
        got, answers, before = [], [], made
        batches = iter(loader)
        for batch in batches:
            if not got:
                found[f"{way} made"] = made - before
            got.append([row["x"] for row in batch])
            if rank == 0:
                answers.append(batches.is_last())
                dist.barrier()  # the other one waits for this, as for gradients
            else:
                dist.barrier()
        found |= {way: got, f"{way} answers": answers}
    write_beside(folder / f"asked-{rank}.json", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
