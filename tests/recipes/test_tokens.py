"""The recipe for token ids that are there already: what its batches hold."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes_recipes import tokens

DOCUMENTS = [[k, *range(1, 1 + k % 29), 999] for k in range(300)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_a_file_of_ids_is_cut_into_rows_that_come_once(tmp_path: Path, dtype: str) -> None:
    np.arange(1000, dtype=dtype).tofile(tmp_path / "train.bin")
    pipe = tokens(
        tmp_path / "train.bin", dtype=dtype, max_length=50, batch_size=5, epochs=1, num_shards=1
    )
    batches = list(pipe)
    assert len(pipe) == len(batches) == 4
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.dtype == torch.int64
    assert sorted(ids[:, 0].tolist()) == list(range(0, 1000, 50))
    assert ids[:, 0].tolist() != sorted(ids[:, 0].tolist())
    assert (ids.diff() == 1).all()
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"])
        batch["labels"][:] = -100  # shares no memory
        assert (batch["input_ids"] >= 0).all()


def test_it_goes_on_without_end(tmp_path: Path) -> None:
    np.arange(1000, dtype="uint16").tofile(tmp_path / "train.bin")
    pipe = tokens(tmp_path / "train.bin", dtype="uint16", max_length=50, batch_size=5, num_shards=1)
    batches = list(islice(pipe, 12))
    epochs = [
        torch.cat([b["input_ids"][:, 0] for b in batches[k : k + 4]]).tolist() for k in (0, 4, 8)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 1000, 50))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def documents(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    found = []
    for batch in batches:
        for ids, segments, labels in zip(
            batch["input_ids"], batch["segment_ids"], batch["labels"], strict=True
        ):
            for number in range(1, int(segments.max()) + 1):
                here = segments == number
                found.append(ids[here].tolist())
                assert labels[here].tolist()[1:] == found[-1][1:]
                assert labels[here][0] == -100
            assert (labels[segments == 0] == -100).all()
    return found


@pytest.mark.parametrize("kind", ["parquet", "rows", "memmap"])
def test_documents_are_packed_whole(tmp_path: Path, kind: str) -> None:
    table = pa.table({"token_ids": DOCUMENTS, "id": list(range(300))})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
        given: object = tmp_path / "a.parquet"
    elif kind == "memmap":
        tp.from_arrow(table).write_memmap(tmp_path / "a")
        given = tmp_path / "a"
    else:
        given = tp.from_arrow(table)
    pipe = tokens(given, max_length=64, batch_size=2, epochs=1, num_shards=1)
    batches = list(pipe)
    assert all(batch["input_ids"].shape[1] == 64 for batch in batches)
    assert sorted(documents(batches)) == sorted(DOCUMENTS)


def test_labels_of_the_rows_are_kept() -> None:
    rows = tp.from_dataset([{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}] * 4)
    batch = tokens(rows, max_length=6, batch_size=1, epochs=1, num_shards=1).peek()
    assert batch["labels"].tolist() == [[-100, 2, -100, -100, 2, -100]]


@pytest.mark.parametrize("name", ["input_ids", "tokens"])
def test_rows_with_padding_are_refused(name: str, tmp_path: Path) -> None:
    table = pa.table({name: [[1, 2], [3, 0]], "attention_mask": [[1, 1], [1, 0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    pipe = tokens(tmp_path, max_length=6, batch_size=1, epochs=1, num_shards=1)
    with pytest.raises(tp.DataError, match=r"must be 1 on .*, got 0 on padding") as caught:
        list(pipe)
    assert caught.value.row == 1
    assert list(
        tokens(tp.from_arrow(table[:1]), max_length=6, batch_size=1, epochs=1, num_shards=1)
    )


@pytest.mark.parametrize(("data", "options", "said"), [
    ("a.bin", {"dtype": "uint16", "column": "ids"}, "got dtype='uint16' and column='ids'"),
    (tp.from_dataset([1]), {"dtype": "uint16"}, "got dtype='uint16' and a pipeline"),
    ("a.parquet", {}, "no file or folder 'a.parquet'"),
    (tp.from_dataset([{"x": [1]}]), {}, r"no column found for the token ids; the columns are \['x'\]"),
    (tp.from_dataset([{"ids": "text"}]), {}, "ids"),
])  # fmt: skip
def test_bad_input_is_refused_in_words(data: object, options: dict[str, str], said: str) -> None:
    with pytest.raises(tp.TrainpipesError, match=said):
        next(iter(tokens(data, num_shards=1, **options)))  # type: ignore[arg-type]


def test_a_file_of_ids_needs_its_dtype(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"\0" * 100)
    with pytest.raises(tp.ConfigError, match=r"train\.bin'\)\): .* add dtype='uint16'"):
        tokens(tmp_path / "train.bin")
