"""A run by ``trainpipes.steps`` on 4, then 2 ranks, then one: batches, losses and weights of one on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic import steps_on_ranks
from elastic.steps_on_ranks import steps_of
from elastic.test_docs_examples import TORCH_ABORTS
from launch import Launch


def run(ranks: int, folder: Path, name: str, steps: int) -> dict[str, list[list[object]]]:
    launch = Launch(
        Path(steps_on_ranks.__file__), ranks, folder / name, str(folder), name, str(steps), trains=True
    )  # fmt: skip
    if launch.wait() != 0:
        assert TORCH_ABORTS in launch.said(), launch.said()
    return steps_of(folder, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_4_2_and_1_ranks_is_the_run_on_one(tmp_path: Path) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    whole = run(1, alone, "whole", 24)
    parts = [run(ranks, moved, f"on-{ranks}", 8) for ranks in (4, 2, 1)]
    for kind, expected in whole.items():
        found = [step for part in parts for step in part[kind]]
        assert [digests for digests, *_ in found] == [digests for digests, *_ in expected]
        for step, same in zip(found, expected, strict=True):
            assert step[1:] == pytest.approx(same[1:], rel=1e-9)
        losses = [float(loss) for _, loss, _ in expected]  # type: ignore[arg-type]
        assert losses[-1] < losses[0]
