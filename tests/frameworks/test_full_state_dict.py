"""``Loader.full_state_dict``: the state of all ranks, as checkpoints that all share have it."""

from __future__ import annotations

from pathlib import Path

from frameworks.plain_runs import come_late, saved_alone
from frameworks.ranks import run


def test_a_rank_that_saves_alone_is_told_so_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    first, second = run(saved_alone, 2, tmp_path / "ranks", False)
    assert first[0].startswith(
        "the state of all ranks is asked for by all of them after the same step, and rank 1 did not ask "
        "within 1 s, rank 0 did"
    )
    assert first[1:4] == second[:3] == [6, 6, 6]
    assert "batches" in first[4]
    assert first[4] == second[3]


def test_where_batches_are_counted_a_rank_may_save_alone(tmp_path: Path) -> None:
    first, second = run(saved_alone, 2, tmp_path / "ranks", True)
    assert first == [6, 6, 6, 6, 2]
    assert second == [6, 6, 6, 4]


def test_ranks_agree_whether_one_came_too_late(tmp_path: Path) -> None:
    tries = 20
    first, second = run(come_late, 2, tmp_path / "ranks", tries)
    assert first == second
    for number, found in enumerate(first[:-1]):
        assert found in (None, [[number, 0], [number, 1]])
    assert first[-1] == [["last", 0], ["last", 1]]
