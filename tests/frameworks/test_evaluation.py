"""docs/examples/evaluate.py counts every row once, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from frameworks.plain_runs import evaluated
from frameworks.ranks import run

#: 26 batches of which the last has 1 row; 24 whole ones; 2 and 1, so that a rank may have none.
COUNTS = (101, 96, 6, 3)


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

    found = run(evaluated, ranks, tmp_path / "ranks", files, str(tmp_path / "weights.pt"))
    assert [undisturbed for _, undisturbed in found] == [True] * ranks
    for at, count in enumerate(COUNTS):
        told = [of_rank[at] for of_rank, _ in found]
        assert [rows for _, rows, _ in told] == [count] * ranks
        assert [loss for loss, *_ in told] == pytest.approx([means[at]] * ranks, rel=1e-6)
        own = [one for *_, one in told]
        assert sum(own) == count
        assert max(own) - min(own) <= 4
