"""What each rank runs: Accelerate, and the HF Trainer, over a pipeline that deals its rows itself.

    python -m torch.distributed.run --nproc-per-node 2 accelerate_on_ranks.py FOLDER

The first rank writes ``found.json``: for each case what every rank got, as rows.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import trainpipes as tp

#: Rows that both ranks' batches divide, and rows that they don't; with workers, those of each worker.
ROWS = (96, 101)
BATCH = 4


def pipeline(rows: int) -> tp.Pipeline:
    table = pa.table({"row": list(range(rows))})
    return tp.from_arrow(table).sharding_filter(4).shuffle(16, seed=1)


def batching(rows: int) -> tp.Pipeline:
    return pipeline(rows).batch(BATCH).collate(format="torch")


def prepared(loader: Any, dispatch: bool | None) -> Any:
    # Here, since a spawned worker goes through this file, too.
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    return Accelerator(cpu=True, dataloader_config=config).prepare(loader)


def rows_of(loader: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in loader]


def cases() -> Iterator[tuple[str, Any, Any]]:
    """A name, a function that makes a loader, and its ``dispatch_batches``."""
    for rows, workers, dispatch in product(ROWS, (0, 2), (None, True, False)):
        name = f"{rows} rows, {workers} workers, dispatch {dispatch}"
        yield (
            name,
            DataLoader(pipeline(rows), batch_size=BATCH, num_workers=workers),
            dispatch,
        )
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


class Model(torch.nn.Module):
    """Notes the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[list[int]] = []

    def forward(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows.append(row.tolist())
        return {"loss": (self.weight * row).mean()}


def trained(folder: Path, workers: int) -> dict[str, Any]:
    """One epoch of the HF Trainer."""
    from transformers import Trainer, TrainingArguments

    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=True, num_train_epochs=1, report_to=[],
        per_device_train_batch_size=BATCH, save_strategy="no", disable_tqdm=True,
        dataloader_num_workers=workers, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=pipeline(96))
    trainer.train()
    return {"rows": model.rows, "steps": trainer.state.global_step}


def refused(loader: Any, dispatch: bool | None) -> str:
    try:
        return f"gave {rows_of(prepared(loader, dispatch))}"
    except tp.ConfigError as error:
        return str(error)


def main() -> None:
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(200, exit=True)  # a hang fails, and says where
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, made, dispatch in cases():
            loader = prepared(made, dispatch)
            epochs = 1 if "spawned" in name else 2
            found[name] = {"len": len(loader), "epochs": [rows_of(loader) for _ in range(epochs)]}
        for workers in (0, 2):
            found[f"Trainer, {workers} workers"] = trained(folder, workers)
    own = prepared(tp.Loader(batching(96)), None)
    found["Loader"] = {"len": len(own), "epochs": [rows_of(own), rows_of(own)]}
    found["warnings"] = [str(w.message) for w in said if "shares out rows" in str(w.message)]
    found["batches as rows"] = refused(DataLoader(batching(96), batch_size=1), False)
    found["batches sent on"] = refused(DataLoader(batching(96), batch_size=None), True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
