"""What each rank runs to save a checkpoint of two loaders with ``torch.distributed.checkpoint``.

    python -m torch.distributed.run --nproc-per-node 2 saved_on_ranks.py FOLDER

With two ranks it made ``golden/format-1/checkpoint``.
"""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import trainpipes as tp
from golden_pipelines import odd

__all__ = ["LOADERS", "STEPS"]

STEPS = 5


def rows() -> tp.Pipeline:
    return tp.from_tensors(x=np.arange(300)).sharding_filter(12).shuffle(11, seed=4)


LOADERS = {
    "counted": lambda: rows().batch(5).collate(),
    "uncounted": lambda: rows().filter(odd).batch(5).repeat().collate(),
}


def main() -> None:
    dist.init_process_group("gloo")
    loaders = {name: tp.Loader(make()) for name, make in LOADERS.items()}
    for loader in loaders.values():
        list(islice(loader, STEPS))
    dcp.save(loaders, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
