"""What each of two ranks runs: shares of a mix change at a batch on which they agree.

    python -m torch.distributed.run --nproc-per-node 2 weights_on_ranks.py FOLDER

Each writes ``weights-R.json``: the batch at which shares changed, its batches of a mix without an end and of
one with an end, and the error where ranks name different weights.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch.distributed as dist

import trainpipes as tp
from launch import write_beside
from sources.mixed.test_set_weights import batched, names

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = tp.Loader(batched())
    batches = iter(loader)
    found = [names(batch) for batch in islice(batches, 11)]
    step = loader.set_weights({"b": 5, "c": 0})
    found += [names(batch) for batch in islice(batches, 69)]
    try:
        loader.set_weights({"b": 5 + rank})
        error = ""
    except tp.ConfigError as raised:
        error = str(raised)
    loader = tp.Loader(batched(stop="all_exhausted"), num_workers=1)
    batches = iter(loader)
    ending = [names(next(batches))]
    loader.set_weights({"b": 5, "c": 0})
    ending += [names(batch) for batch in batches]
    told = {"step": step, "batches": found, "error": error, "ending": ending}
    write_beside(Path(sys.argv[1]) / f"weights-{rank}.json", told)
    dist.destroy_process_group()
