"""What each rank runs: epochs of a folder to which files come, also between the listings of two ranks.

    python -m torch.distributed.run --nproc-per-node 2 grow_on_ranks.py FOLDER OUT LEG EPOCHS

Each rank writes ``rows-LEG-EPOCH-R.json`` after each epoch: its batches. Leg 0 saves in epoch 2 after two
steps, and waits to be killed. Later legs load that first.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

import trainpipes as tp
from launch import write_beside

__all__ = ["SAVED", "growing", "write"]

ROWS = 48
#: The epoch and the steps after which leg 0 saves.
SAVED = (2, 2)


def write(folder: Path, number: int) -> None:
    rows = pa.table({"x": range(ROWS * number, ROWS * (number + 1))})
    pq.write_table(rows, folder / f"part-{number}.tmp", row_group_size=8)
    (folder / f"part-{number}.tmp").rename(folder / f"part-{number}.parquet")


def growing(folder: Path, filters: bool) -> tp.Pipeline:
    files = tp.list_files(folder / "*.parquet", refresh="epoch").read_parquet()
    rows = files.sharding_filter(4).shuffle(20, seed=0)
    if filters:
        rows = rows.filter(lambda row: row["x"] % 48 < 40, version="1")
    return rows.batch(2)


def main() -> None:
    folder, out, leg, epochs = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    faulthandler.dump_traceback_later(90, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, loader = dist.get_rank(), tp.Loader(growing(folder, out.name == "filtered"))
    if leg != "0":
        loader.load_state_dict(json.loads((out / "state.json").read_text()))
    begin = SAVED[0] if leg != "0" else 0
    for epoch in range(begin, begin + epochs):
        batches, got = iter(loader), []
        if rank == 1:  # rank 0 has listed by then
            time.sleep(0.3)
            write(folder, len(list(folder.glob("*.parquet"))))
        for step, batch in enumerate(batches, start=1):
            got.append([row["x"] for row in batch])
            if leg == "0" and (epoch, step) == SAVED:
                state = loader.full_state_dict()
                write_beside(out / f"rows-{leg}-{epoch}-{rank}.json", got)
                dist.barrier()
                if not rank:
                    write_beside(out / "state.json", state)
                time.sleep(90)
        write_beside(out / f"rows-{leg}-{epoch}-{rank}.json", got)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
