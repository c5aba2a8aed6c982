"""Chains of nodes on real ranks keep torchdata's contract, and end their epochs together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import Launch

SCRIPT = Path(__file__).parent / "nodes_on_ranks.py"


@pytest.mark.timeout(200)
def test_chains_of_nodes_on_two_ranks_save_and_load_at_all_places(tmp_path: Path) -> None:
    run = Launch(SCRIPT, 2, tmp_path, str(tmp_path))
    assert run.wait() == 0, run.said()
    ranks = [json.loads((tmp_path / f"rows-{rank}.json").read_text()) for rank in range(2)]
    for chain in ("counted", "filtered"):
        for epochs in zip(*(rank[chain] for rank in ranks), strict=True):
            assert len({len(epoch) for epoch in epochs}) == 1, "ranks take as many steps"
            rows = [row for epoch in epochs for batch in epoch for row in batch]
            assert len(rows) == len(set(rows)) >= 24
