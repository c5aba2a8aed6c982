"""A resume in the Trainer of transformers: a streamed dataset of Hugging Face, and a pipeline.

Each is trained for some steps by a model that costs nothing, saved, and resumed by a new Trainer. Printed:
whether the next batch is the one that would have come, and the seconds until it comes. Needs the packages of
``make test-frameworks``. ``python -m benchmarks.hf_trainer --help``
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import trainpipes as tp
from trainpipes.integrations.transformers import Trainer

BATCH, LENGTH, FILES = 32, 128, 8


class Recorder(torch.nn.Module):
    """Notes the first row number of each batch, and when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, float]] = []

    def forward(self, row: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append((int(row[0]), time.perf_counter()))
        return {"loss": self.weight.sum()}


def write(folder: Path, rows: int) -> list[str]:
    """Parquet files of row numbers and token ids."""
    ids = pa.array(np.arange(rows * LENGTH, dtype=np.int32) % 1000)
    table = pa.table(
        {"row": range(rows), "input_ids": pa.FixedSizeListArray.from_arrays(ids, LENGTH)}
    )
    for part in range(FILES):
        size = rows // FILES
        pq.write_table(
            table.slice(part * size, size), folder / f"{part}.parquet", row_group_size=4096
        )
    return sorted(map(str, folder.glob("*.parquet")))


def streamed(files: list[str], buffer: int) -> tuple[type, Any, Any]:
    import datasets
    import transformers

    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return transformers.Trainer, rows.shuffle(seed=0, buffer_size=buffer).with_format("torch"), None


def ours(files: list[str], buffer: int) -> tuple[type, Any, Any]:
    rows = tp.list_files(files).read_parquet().sharding_filter()
    return Trainer, rows.shuffle(buffer, seed=0).batch(BATCH).collate(), None


def trained(
    make: Callable[[], tuple[type, Any, Any]], folder: Path, steps: int, resume: bool
) -> list[Any]:
    """What a run sees: the rows that begin its batches, and seconds from its start."""
    from transformers import TrainingArguments

    trainer, data, collator = make()
    options: Mapping[str, Any] = {
        "max_steps": steps + 5, "save_steps": steps, "per_device_train_batch_size": BATCH, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    model, start = Recorder(), time.perf_counter()
    args = TrainingArguments(str(folder), **options)
    run = trainer(model, args, train_dataset=data, data_collator=collator)
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps}") if resume else None)
    return [(row, when - start) for row, when in model.seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps before the resume")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--buffer", type=int, default=10_000)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as place:
        files = write(Path(place), chosen.rows)
        for name, kind in (("HF datasets, streamed", streamed), ("trainpipes", ours)):
            folder = Path(place, name)
            make = lambda kind=kind: kind(files, chosen.buffer)  # noqa: E731
            first = trained(make, folder, chosen.steps, False)
            again = trained(make, folder, chosen.steps, True)
            expected, found = first[chosen.steps][0], again[0]
            same = "the same next batch" if expected == found[0] else "another next batch"
            print(
                f"{name:24} after {chosen.steps:,} steps: {same}, {found[1]:.1f} s until it comes"
            )


if __name__ == "__main__":
    main()
