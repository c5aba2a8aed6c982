"""What each rank runs: epochs of folders to which files come, also between the listings of two ranks.

    python -m torch.distributed.run --nproc-per-node 2 grow_on_ranks.py FOLDER LEG EPOCHS

Each pipeline has a folder by its name. Each rank writes ``NAME/rows-LEG-EPOCH-R.json`` after each epoch:
its batches. Leg 0 saves in epoch 2 after two steps, and waits to be killed; it begins with a folder that rank
0 cannot list, and writes what it was told, ``told-R.json``. Later legs load what was saved first.
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

__all__ = ["NAMES", "SAVED", "growing", "write"]

ROWS = 48
NAMES = ("counted", "filtered")
#: The epoch and the steps after which leg 0 saves.
SAVED = (2, 2)


def write(folder: Path, number: int) -> None:
    rows = pa.table({"x": range(ROWS * number, ROWS * (number + 1))})
    pq.write_table(rows, folder / f"part-{number}.tmp", row_group_size=8)
    (folder / f"part-{number}.tmp").rename(folder / f"part-{number}.parquet")


def growing(folder: Path) -> tp.Pipeline:
    files = tp.list_files(folder / "*.parquet", refresh="epoch").read_parquet()
    rows = files.sharding_filter(4).shuffle(20, seed=0)
    if folder.name == "filtered":
        rows = rows.filter(lambda row: row["x"] % 48 < 40, version="1")
    return rows.batch(2)


def run_epoch(folder: Path, loader: tp.Loader, leg: str, epoch: int) -> None:
    rank = dist.get_rank()
    batches, got = iter(loader), []
    if rank == 1:  # rank 0 has listed by then
        time.sleep(0.3)
        write(folder, len(list(folder.glob("*.parquet"))))
    for step, batch in enumerate(batches, start=1):
        got.append([row["x"] for row in batch])
        if leg == "0" and (epoch, step) == SAVED:
            state = loader.full_state_dict()
            if not rank:
                write_beside(folder / "state.json", state)
            break
    write_beside(folder / f"rows-{leg}-{epoch}-{rank}.json", got)
    dist.barrier()


def main() -> None:
    work, leg, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    faulthandler.dump_traceback_later(90, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    folders = [work / name for name in NAMES]
    loaders = [tp.Loader(growing(folder)) for folder in folders]
    begin = 0
    if leg == "0":
        try:
            next(iter(tp.Loader(growing(work / "empty"))))
        except tp.DataError as error:
            write_beside(work / f"told-{dist.get_rank()}.json", str(error))
    else:
        begin = SAVED[0]
        for folder, loader in zip(folders, loaders, strict=True):
            loader.load_state_dict(json.loads((folder / "state.json").read_text()))
    for epoch in range(begin, begin + epochs):
        for folder, loader in zip(folders, loaders, strict=True):
            run_epoch(folder, loader, leg, epoch)
    if leg == "0":
        write_beside(work / f"saved-{dist.get_rank()}.json", True)
        time.sleep(90)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
