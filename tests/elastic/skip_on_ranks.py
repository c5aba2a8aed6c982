"""What each rank runs: loaders that leave batches out, with a collective after each step.

    python -m torch.distributed.run --nproc-per-node 2 skip_on_ranks.py FOLDER

Each rank writes ``skipped-R.json``: of each loader the batches of two epochs, and a state for any number of
ranks after some steps of the first.
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
from elastic.launch import write_beside

__all__ = ["LOADERS", "SAVED", "SKIPPED", "WORKERS"]

#: Steps after which the state is taken.
SAVED = 4
SKIPPED = [(0, 9), (0, 30), (1, 0)]


def rows() -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(300)})).sharding_filter(4).shuffle(20, seed=5)


def some(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 3)


LOADERS = {
    "counted": lambda: rows().batch(5),
    "uneven": lambda: rows().filter(some, version="1").batch(4),
}
#: Worker processes with which each is run.
WORKERS = {"counted": [0], "uneven": [0, 2]}


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        for workers in WORKERS[name]:
            timeout = 30 if workers else 0
            loader = tp.Loader(
                make(),
                skip_batches=SKIPPED,
                num_workers=workers,
                timeout=timeout,
                with_provenance=True,
            )
            epochs, state = [], None
            for _ in range(2):
                epochs.append([])
                for batch in loader:
                    dist.all_reduce(torch.zeros(1))  # what gradients do
                    xs = [row["x"] for row in batch]
                    epochs[-1].append([loader.provenance().m, xs])
                    if state is None and len(epochs[-1]) == SAVED:
                        state = loader.gather_state()
            found[f"{name}, {workers} workers"] = {"epochs": epochs, "state": state}
    write_beside(Path(sys.argv[1]) / f"skipped-{dist.get_rank()}.json", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
