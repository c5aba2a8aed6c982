"""The recipe for pretraining: what its batches hold."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes_recipes import pretrain

END, PAD = 256, 257


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [f"{k} " + "and so on " * (k * 7 % 23) for k in range(600)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, (start, stop, group) in enumerate([(0, 400, 90), (400, 420, 3), (420, 600, 180)]):
        table = pa.table({"text": texts[start:stop], "url": ["x"] * (stop - start)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    return folder


def documents(batch: dict[str, Any]) -> list[list[int]]:
    """The pieces of documents in a batch, cut where ``cu_seqlens`` says."""
    flat = batch["input_ids"].flatten().tolist()
    edges = batch["cu_seqlens"].tolist()
    pieces = [flat[a:b] for a, b in pairwise(edges)]
    return [piece for piece in pieces if piece[0] != PAD]


def test_every_text_is_there_once_in_an_epoch(files: Path, texts: list[str]) -> None:
    batches = list(pretrain(files, "bytes", max_length=256, batch_size=4, epochs=1, num_shards=1))
    found = Counter(bytes(piece[:-1]).decode() for batch in batches for piece in documents(batch))
    assert found == Counter(texts)
    for batch in batches:
        assert batch["input_ids"].shape[1] == 256
        assert all(piece[-1] == END for piece in documents(batch))
        first = batch["position_ids"] == 0
        assert (batch["labels"][first] == -100).all()
        assert torch.equal(batch["labels"][~first], batch["input_ids"][~first])
    pipe = pretrain(files, "bytes", max_length=256, batch_size=4, epochs=1, num_shards=1)
    assert len(batches) == tp.Loader(pipe).estimate_len()


def test_hardly_anything_is_padded(files: Path) -> None:
    pipe = pretrain(
        files, "bytes", max_length=512, batch_size=4, num_shards=2, pack_buffer_size=512
    )
    assert pipe.stats(40).padding.share < 0.02
    concat = pretrain(files, "bytes", max_length=512, method="concat")
    assert concat.stats(40).padding.padding == 0


def test_all_batches_have_one_shape_and_go_on_over_epochs(files: Path) -> None:
    pipe = pretrain(files, "bytes", max_length=128, batch_size=2, num_shards=2, pack_buffer_size=64)
    shapes = {tuple(batch["input_ids"].shape) for batch in islice(pipe, 700)}
    assert shapes == {(2, 128)}
