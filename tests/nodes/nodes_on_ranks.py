"""What each rank runs: chains of nodes, saved and loaded at all places.

    python -m torch.distributed.run --nproc-per-node 2 nodes_on_ranks.py FOLDER

Each rank writes ``rows-R.json``, the rows that it got in two epochs of each chain.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist
from torchdata.nodes import Loader

from nodes.contract import check_contract
from trainpipes import nodes as tn

ROWS = 45


def some(row: dict[str, Any]) -> bool:
    return bool(row["row"] % 3)


def counted() -> Any:
    """11 batches and a part of one: one more than two ranks divide."""
    rows: Any = tn.FromArrow(table=pa.table({"row": list(range(ROWS))}))
    return tn.Batch(tn.Shuffle(tn.ShardingFilter(rows, num_shards=4), buffer_size=9), batch_size=4)


def filtered() -> Any:
    """Ranks agree on where an epoch ends."""
    rows: Any = tn.FromArrow(table=pa.table({"row": list(range(ROWS))}))
    return tn.Batch(tn.Filter(tn.ShardingFilter(rows, num_shards=4), predicate=some), batch_size=2)


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo")
    found = {}
    for make in (counted, filtered):
        check_contract(make, every=2)
        loader = Loader(make())
        epochs = [[[row["row"] for row in batch] for batch in loader] for _ in range(2)]
        found[make.__name__] = epochs
    (Path(sys.argv[1]) / f"rows-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
