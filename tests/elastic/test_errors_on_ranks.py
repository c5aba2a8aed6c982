"""Ranks that look ahead, to agree where an epoch ends, hear of an error when its batch is due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic.errors_on_ranks import uneven
from launch import Launch

SCRIPT = Path(__file__).parent / "errors_on_ranks.py"


SEQUENCE = [[row["x"] for row in batch] for batch in uneven()]
#: A step, and workers of each rank.
CASES = [(step, workers) for step in (6, 29) for workers in (0, 2)]


def failing(step: int) -> int:
    """The last row of rank 1's batch of a step."""
    return int(SEQUENCE[2 * step + 1][-1])


def test_a_batch_that_fails_is_raised_at_its_step_and_one_rank_may_ask_for_the_last(
    tmp_path: Path,
) -> None:
    named = [f"{workers},{failing(step)}" for step, workers in CASES]
    run = Launch(SCRIPT, 2, tmp_path, str(tmp_path), *named)
    assert run.wait(100) == 0, run.said()

    def of_both(name: str) -> list[dict[str, Any]]:
        return [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]

    for step, workers in CASES:
        first, second = of_both(f"errors-{workers},{failing(step)}")
        assert first["got"] == SEQUENCE[: 2 * step + 1 : 2]
        assert second["got"] == SEQUENCE[1 : 2 * step : 2]
        assert all(f"cannot take row {failing(step)}" in text for text in second["told"])
        assert first["told"] == SEQUENCE[2 * step + 2 : 2 * step + 6 : 2]
        assert second["state"]["batches"] == 2 * step  # the batch that failed was not given
    first, second = of_both("asked")
    for way in ("plain", "placed"):
        steps = len(second[way])
        assert first[way] == SEQUENCE[: 2 * steps : 2]
        assert second[way] == SEQUENCE[1 : 2 * steps : 2]
        assert first[f"{way} answers"] == [False] * (steps - 1) + [True]
        left = len(SEQUENCE) - 2 * steps
        assert left > 0
        assert f"epoch 0: {left} of {len(SEQUENCE)} batches" in run.said()
        assert first[f"{way} looked at"] < 300  # the first batch waits for two, not for sixteen
