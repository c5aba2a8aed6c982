"""The files that the examples in the help of commands name. Add yours."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["write_small_data"]


def write_small_data(folder: Path) -> None:
    """Write them into a folder."""
    chat = {
        "prompt": [f"What is {i} + {i}?" for i in range(120)],
        "response": [f"It is {2 * i}." for i in range(120)],
    }
    pq.write_table(pa.table(chat), folder / "chat.parquet", row_group_size=30)
    texts = {"text": [f"Document {i}. " + "It goes on. " * (i % 7) for i in range(120)]}
    (folder / "data").mkdir()
    for part in range(3):
        rows = pa.table(texts).slice(40 * part, 40)
        pq.write_table(rows, folder / "data" / f"part-{part}.parquet", row_group_size=16)
    lines = tp.read_parquet(str(folder / "chat.parquet"))
    with (folder / "chat.jsonl").open("w") as file:
        import json

        file.writelines(f"{json.dumps(row)}\n" for row in lines)
    (folder / "train.yaml").write_text(
        "recipe: sft\noptions:\n  files: chat.parquet\n  tokenizer: bytes\n  batch_size: 8\n"
    )
