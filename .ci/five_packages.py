"""The whole chain with nothing installed but what trainpipes requires: files to batches, saved and
resumed. Run from a folder that holds no source tree."""

# ruff: noqa: T201

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import trainpipes as tp

ABSENT = ("tokenizers", "transformers", "sentencepiece", "tiktoken", "matplotlib", "pytest", "s3fs")


def write(folder: Path) -> None:
    """Three files of uneven row groups, 1,000 rows."""
    first = 0
    for number, (rows, group) in enumerate([(600, 128), (37, 10), (363, 363)]):
        texts = [f"row {i} " + "x" * (i % 23) for i in range(first, first + rows)]
        table = pa.table({"prompt": texts, "response": [t[::-1] for t in texts]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
        first += rows


def chain(folder: Path) -> tp.Pipeline:
    return (
        tp.list_files(str(folder / "*.parquet"))
        .read_parquet(columns=["prompt", "response"])
        .sharding_filter(num_shards=12)
        .shuffle(buffer_size=256, seed=0)
        .tokenize("bytes", concat=["prompt", "response"], add_eos=True, labels="response")
        .batch(16)
        .pad_collate()
    )


def same(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(first, second, strict=True)
    )


def text(row: torch.Tensor) -> str:
    return bytes(i for i in row.tolist() if i < 256).decode()


def main() -> None:
    there = [name for name in ABSENT if importlib.util.find_spec(name)]
    assert not there, f"{there} must not be installed here"
    assert "site-packages" in tp.__file__, f"{tp.__file__} is not the installed package"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        whole = list(tp.Loader(chain(folder)))
        assert len(whole) == 63, len(whole)
        got = sorted(text(row) for batch in whole for row in batch["input_ids"])
        texts = [f"row {i} " + "x" * (i % 23) for i in range(1000)]
        assert got == sorted(t + t[::-1] for t in texts)

        for before, after in ((0, 0), (0, 2), (2, 1)):
            loader = tp.Loader(chain(folder), num_workers=before)
            batches = iter(loader)
            start = [next(batches) for _ in range(20)]
            state = loader.state_dict()
            del batches
            resumed = tp.Loader(chain(folder), num_workers=after)
            resumed.load_state_dict(state)
            assert same(whole, start + list(resumed)), (before, after)
        rows = tp.read_parquet(str(folder / "*.parquet"))
        rows.write_json(folder / "json")
        assert list(tp.read_json(str(folder / "json"))) == list(rows)
        recipe = tp.recipe("sft", files=str(folder / "*.parquet"), tokenizer="bytes")
        assert next(iter(recipe))["labels"].shape[0] == 8
    print("files to batches, saved and resumed with 0, 1 and 2 workers: the same batches")


if __name__ == "__main__":
    main()
