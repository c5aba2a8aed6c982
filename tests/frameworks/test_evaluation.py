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


@pytest.mark.parametrize("count", [101, 96, 6, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_row_counts_once_whatever_the_number_of_ranks(
    ranks: int, count: int, tmp_path: Path
) -> None:
    """26 batches of which the last has 1 row; 24 whole ones; 2 and 1, so that a rank may have none."""
    files, weights = str(tmp_path / "rows.parquet"), str(tmp_path / "weights.pt")
    texts = [f"row {i} " + "more " * (i % 7) for i in range(count)]
    pq.write_table(pa.table({"text": texts}), files, row_group_size=20)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258))
    torch.save(model.state_dict(), weights)

    losses = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([*text.encode(), 256])
            losses.append(cross_entropy(model(ids[:-1]), ids[1:], reduction="none"))
    mean = float(torch.cat(losses).double().mean())

    found = run(evaluated, ranks, tmp_path / "ranks", files, weights)
    assert len(found) == ranks
    for one in found:
        assert one["rows"] == count
        assert one["loss"] == pytest.approx(mean, rel=1e-6)
        assert one["is_undisturbed"]
    own = [one["own"] for one in found]
    assert sum(own) == count
    assert max(own) - min(own) <= 4
