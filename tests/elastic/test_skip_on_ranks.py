"""Real ranks that leave batches out stay in step, and another number of ranks goes on without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trainpipes as tp
from elastic.launch import Launch
from elastic.skip_on_ranks import LOADERS, SAVED, SKIPPED, WORKERS

SCRIPT = Path(__file__).parent / "skip_on_ranks.py"
SHARDS = 4


def given_by(loader: tp.Loader) -> list[Any]:
    """Number and rows of each batch."""
    return [[loader.provenance().m, [row["x"] for row in batch]] for batch in loader]


def left(name: str, epoch: int) -> tuple[list[Any], int]:
    """What is left of what one rank gives, and how much of that comes before the first batch that is missing,
    since a shard has ended."""
    loader = tp.Loader(LOADERS[name](), with_provenance=True, threads=0)
    loader.set_epoch(epoch)
    starts = [m for e, m in SKIPPED if e == epoch]
    found = [one for one in given_by(loader) if not any(s <= one[0] < s + SHARDS for s in starts)]
    delivered = [m - SHARDS * sum(s < m for s in starts) for m, _ in found]
    return found, next((n for n, m in enumerate(delivered) if n != m), len(found))


def test_ranks_leave_the_same_out_end_together_and_others_go_on(tmp_path: Path) -> None:
    run = Launch(SCRIPT, 2, tmp_path, str(tmp_path))
    assert run.wait(100) == 0, run.said()
    ranks = [json.loads((tmp_path / f"skipped-{rank}.json").read_text()) for rank in (0, 1)]
    for name in LOADERS:
        for workers in WORKERS[name]:
            for epoch in (0, 1):
                own = [rank[f"{name}, {workers} workers"]["epochs"][epoch] for rank in ranks]
                found = [one for step in zip(*own, strict=True) for one in step]
                expected, hole = left(name, epoch)
                assert found == expected[: hole // 2 * 2]
                assert len(found) > 20
            state = ranks[0][f"{name}, {workers} workers"]["state"]
            rest = left(name, 0)[0][2 * SAVED :]
            for world in (
                (1, 4) if name == "counted" else (1,)
            ):  # others would have to agree on the end
                for rank in range(world):
                    pipe = LOADERS[name]().distributed(rank=rank, world_size=world)
                    loader = tp.Loader(pipe, with_provenance=True, threads=0)
                    loader.load_state_dict(state)
                    given = given_by(loader)
                    assert given == rest[rank::world][: len(given)]
                    assert len(given) == len(rest) // world
