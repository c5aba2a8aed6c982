"""docs/examples/evaluate.py counts every row once, on any number of ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import trainpipes as tp
from frameworks.example import example
from frameworks.ranks import run

#: 26 batches of which the last has 1 row; 24 whole ones; 2 and 1, so that a rank may have none.
COUNTS = (101, 96, 6, 3)


def evaluated(files: str, weights: str) -> tuple[Any, ...]:
    """What docs/examples/evaluate.py finds, and this rank's own rows. A training in whose midst it runs is
    not disturbed."""
    script = example("evaluate")
    train = tp.from_dataset(range(200)).sharding_filter(num_shards=4).batch(4)
    batches, begin = iter(tp.Loader(train)), dist.init_process_group
    given = [next(batches)]
    with pytest.MonkeyPatch.context() as patch:  # main() begins it
        patch.setattr(dist, "init_process_group", lambda name: dist.is_initialized() or begin(name))
        loss, rows = script.main(files, weights)
    own = sum(len(batch["input_ids"]) for batch in tp.Loader(script.pipeline(files)))
    assert [*given, *islice(batches, 3)] == list(islice(tp.Loader(train), 4))
    return loss, rows, own


def every(files: list[str], weights: str) -> list[tuple[Any, ...]]:
    return [evaluated(path, weights) for path in files]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_row_counts_once_whatever_the_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    files, means = [], []
    for count in COUNTS:
        texts = [f"row {i} " + "more " * (i % 7) for i in range(count)]
        files.append(str(tmp_path / f"{count}.parquet"))
        pq.write_table(pa.table({"text": texts}), files[-1], row_group_size=20)
        losses = []
        with torch.no_grad():
            for text in texts:
                ids = torch.tensor([*text.encode(), 256])
                losses.append(cross_entropy(model(ids[:-1]), ids[1:], reduction="none"))
        means.append(float(torch.cat(losses).double().mean()))

    found = run(every, ranks, tmp_path / "ranks", files, str(tmp_path / "weights.pt"))
    for mean, count, told in zip(means, COUNTS, zip(*found, strict=True), strict=True):
        losses, rows, own = zip(*told, strict=True)
        assert rows == (count,) * ranks
        assert losses == pytest.approx((mean,) * ranks, rel=1e-6)
        assert sum(own) == count
        assert max(own) - min(own) <= 4
