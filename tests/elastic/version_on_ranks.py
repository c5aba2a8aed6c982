"""What each rank runs: a table that grows after rank 0 has opened it, and before rank 1 does.

    python -m torch.distributed.run --nproc-per-node 2 version_on_ranks.py FOLDER

Each rank writes ``rows-R.json``: the rows of two epochs, and of a new run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import torch.distributed as dist
from deltalake import write_deltalake

import trainpipes as tp
from launch import write_beside


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, uri = dist.get_rank(), str(folder / "table")

    def loader() -> tp.Loader:
        return tp.Loader(tp.read_delta(uri).sharding_filter(4).shuffle(20).batch(4))

    if rank == 0:
        write_deltalake(uri, pa.table({"x": range(40)}))
    dist.barrier()
    run = loader()
    if rank == 0:
        len(run)  # opens it
    dist.barrier()
    if rank == 1:
        write_deltalake(uri, pa.table({"x": range(40, 80)}), mode="append")
        len(run)
    dist.barrier()
    epochs = [[row["x"] for batch in each for row in batch] for each in (run, run, loader())]
    write_beside(folder / f"rows-{rank}.json", epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
