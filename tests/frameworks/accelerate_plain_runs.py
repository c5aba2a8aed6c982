"""What ranks do with Accelerate over a plain DataLoader of a pipeline of rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pyarrow as pa
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import trainpipes as tp

#: Rows that both ranks' batches divide, and rows that they don't; with workers, those of each worker.
ROWS = (96, 101)
BATCH = 4


def pipeline(rows: int) -> tp.Pipeline:
    table = pa.table({"row": list(range(rows))})
    return tp.from_arrow(table).sharding_filter(4).shuffle(16, seed=1)


def prepared(loader: Any, dispatch: bool | None) -> Any:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    return Accelerator(cpu=True, dataloader_config=config).prepare(loader)


def rows_of(loader: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in loader]


def cases() -> Iterator[tuple[str, Any, Any]]:
    """A name, a function that makes a loader, and its ``dispatch_batches``."""
    kinds = (0, None), (0, False), (2, True), (2, False)
    for rows, (workers, dispatch) in product(ROWS, kinds):
        name = f"{rows} rows, {workers} workers, dispatch {dispatch}"
        yield name, DataLoader(pipeline(rows), batch_size=BATCH, num_workers=workers), dispatch
    for dispatch in (True, False):
        loader = DataLoader(
            pipeline(101), batch_size=BATCH, num_workers=1, multiprocessing_context="spawn"
        )
        yield f"101 rows, a spawned worker, dispatch {dispatch}", loader, dispatch
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for dispatch in (True, False):
        loader = DataLoader(
            pipeline(101).distributed(rank=rank, world_size=world), batch_size=BATCH
        )
        yield f"101 rows, ranks given, dispatch {dispatch}", loader, dispatch


def plain_loaders() -> dict[str, Any]:
    """What a rank got in each case, as rows."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, made, dispatch in cases():
            loader = prepared(made, dispatch)
            epochs = 1 if "spawned" in name else 2
            found[name] = {"len": len(loader), "epochs": [rows_of(loader) for _ in range(epochs)]}
    found["warnings"] = [str(w.message) for w in said if "shares out rows" in str(w.message)]
    return found
